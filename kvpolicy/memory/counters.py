"""What retrieval did, counted. Rows are per layer: one record of n layers counts n rows.

Retrieval counts on the device, without waiting for it; a reader asks for a snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(slots=True)
class RetrievalCounters:
    """Totals. In-flight rows are never counted: they need no retrieval.

    selected_rows: rows that query rows attended to. unique_rows: after the union over the query
    rows of one request. fetched_rows: copied from the host for attention (misses).
    staged_rows: those of them that could not stay. refetched_rows: copied again for a later layer
    because the step was served in waves.
    """

    selected_rows: int = 0
    unique_rows: int = 0
    fetched_rows: int = 0
    staged_rows: int = 0
    refetched_rows: int = 0
    host_to_device_bytes: int = 0

    @property
    def miss_rate(self) -> float:
        """Fetched rows over unique rows, 0 where nothing was selected."""
        return self.fetched_rows / self.unique_rows if self.unique_rows else 0.0

    @property
    def miss_rate_selected(self) -> float:
        """Fetched rows over selected rows, the form the paper reports."""
        return self.fetched_rows / self.selected_rows if self.selected_rows else 0.0

    def since(self, earlier: RetrievalCounters) -> RetrievalCounters:
        """What was counted after ``earlier``."""
        names = (field.name for field in fields(self))
        return RetrievalCounters(*(getattr(self, n) - getattr(earlier, n) for n in names))


WIDTH = len(fields(RetrievalCounters))


class RetrievalCounts:
    """The counters of all seats on the device, in the order of RetrievalCounters' fields.

    decode and prefill are apart: miss rates speak of decode.
    """

    def __init__(self, seats: int, device: torch.device) -> None:
        self.seats = seats
        self._live = torch.zeros((2 * seats, WIDTH), dtype=torch.int64, device=device)
        self._ended = torch.zeros((2, WIDTH), dtype=torch.int64, device=device)

    def row(self, seat: int, decode: bool) -> int:
        """Where a seat is counted."""
        return seat if decode else seat + self.seats

    def add(self, rows: Tensor, counts: Tensor) -> None:
        """Add counts [p, WIDTH] at rows [p] (int64)."""
        self._live.index_add_(0, rows, counts)

    def end(self, seat: int) -> None:
        """A seat is given up: its counts become part of the totals."""
        own = self._live[seat :: self.seats]
        self._ended += own
        own.zero_()

    def totals(self) -> tuple[RetrievalCounters, RetrievalCounters]:
        """Decode and prefill, of all requests ever. Waits for the device."""
        live = self._live.view(2, self.seats, WIDTH).sum(1)
        decode, prefill = (live + self._ended).tolist()
        return RetrievalCounters(*decode), RetrievalCounters(*prefill)

    def by_seat(self) -> list[RetrievalCounters]:
        """Decode retrieval of whoever sits there, since the seat was taken. Waits for the device."""
        return [RetrievalCounters(*row) for row in self._live[: self.seats].tolist()]


class MemoryCounters:
    """Everything the hierarchy counts.

    moved_*: rows copied from the host to seed or promote hot caches, not for attention.
    release_steps: steps in which a budget was taken back. request_waves: extra waves, beyond one
    per retrieval. shortages: times a growing context found no free frame. forced_frames: optional
    frames that were taken back for it, whatever the controller had planned.
    """

    def __init__(self, seats: int, device: torch.device) -> None:
        self.retrieval = RetrievalCounts(seats, device)
        self.moved_rows = 0
        self.moved_bytes = 0
        self.device_to_host_bytes = 0
        self.release_steps = 0
        self.request_waves = 0
        self.shortages = 0
        self.forced_frames = 0

    @property
    def decode(self) -> RetrievalCounters:
        """Retrieval for rows that extend generations."""
        return self.retrieval.totals()[0]

    @property
    def prefill(self) -> RetrievalCounters:
        """Retrieval for prompt rows."""
        return self.retrieval.totals()[1]

    @property
    def host_to_device_bytes(self) -> int:
        """All bytes copied from host to device."""
        decode, prefill = self.retrieval.totals()
        return decode.host_to_device_bytes + prefill.host_to_device_bytes + self.moved_bytes
