"""What a verify step costs: the numbers that decide how much of a proposal is worth verifying.

Times are whole picoseconds on the device, so that sums have no order and a schedule is the same number
for number on every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

PICOSECONDS = 1e12


def staircase(measured: Mapping[int, float], most: int) -> list[float]:
    """Seconds of a step by its rows, 0..most, from measured sizes: the cost of the next larger measured
    size, never falling, and beyond the largest a line through it and the origin.

    Where steps run as captured graphs their sizes are the stairs. measured: rows -> seconds, at least
    one. ValueError if a size or a time is not positive.
    """
    if not measured or min(measured) < 1 or min(measured.values()) <= 0.0:
        raise ValueError(f"measured = {dict(measured)}: needs positive rows and seconds")
    sizes = sorted(measured)
    seconds, highest = {}, 0.0
    for size in sizes:
        highest = max(highest, measured[size])
        seconds[size] = highest
    found, at = [0.0], 0
    for rows in range(1, most + 1):
        while at < len(sizes) and sizes[at] < rows:
            at += 1
        if at < len(sizes):
            found.append(seconds[sizes[at]])
        else:
            found.append(highest * max(1.0, rows / sizes[-1]))
    return found


@dataclass(slots=True)
class StepCosts:
    """Device tensors, so that a captured schedule follows when the engine measures anew.

    draft: int64 [most requests + 1], picoseconds of drafting for that many requests. verify: int64
    [most rows + 1], of the target's step without its fetches, by verify rows (1 + length of each
    request). record: float64 [], picoseconds for one more record fetched from the host: 0 leaves
    fetching out of the choice.
    """

    draft: Tensor
    verify: Tensor
    record: Tensor

    @staticmethod
    def empty(requests: int, width: int, device: torch.device) -> StepCosts:
        """For up to ``requests`` of ``width`` proposed tokens. Until measured, each row costs alike."""
        rows = torch.arange(requests * (width + 1) + 1, device=device)
        return StepCosts(
            draft=torch.zeros(requests + 1, dtype=torch.int64, device=device),
            verify=rows * 1_000_000,
            record=torch.zeros((), dtype=torch.float64, device=device),
        )

    def set_verify(self, measured: Mapping[int, float]) -> None:
        """Verify steps by rows -> seconds, see :func:`staircase`."""
        self._set(self.verify, measured)

    def set_draft(self, measured: Mapping[int, float]) -> None:
        """Draft steps by requests -> seconds, see :func:`staircase`."""
        self._set(self.draft, measured)

    def set_record(self, seconds: float) -> None:
        """Seconds per record fetched, at the load of the link now. ValueError if negative or NaN."""
        if not seconds >= 0.0:
            raise ValueError(f"seconds = {seconds}: needs a number from 0")
        self.record.fill_(seconds * PICOSECONDS)

    @staticmethod
    def _set(table: Tensor, measured: Mapping[int, float]) -> None:
        stairs = staircase(measured, table.numel() - 1)
        table.copy_(torch.tensor([round(x * PICOSECONDS) for x in stairs], dtype=torch.int64))
