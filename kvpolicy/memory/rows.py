"""The rows of one step on the device: whose each is and where it stands, and what is stored of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from kvpolicy.kernels.memory_ops import MemoryOps
from kvpolicy.kernels.paging import upload
from kvpolicy.memory.arena import Table
from kvpolicy.memory.layout import StoreLayout
from kvpolicy.memory.request import RequestMemory
from kvpolicy.memory.segments import Segment


class StepRows:
    """One number per row of the step. All int64 [n], on the device.

    positions: in its request. seat: of its request. last: int64 [segments], each segment's last row.
    """

    positions: Tensor
    seat: Tensor
    last: Tensor
    _committed: Tensor
    _shift: Tensor

    def __init__(
        self,
        requests: Sequence[RequestMemory],
        segments: Sequence[Segment],
        device: torch.device,
    ) -> None:
        numbers: tuple[list[int], ...] = ([], [], [], [])
        for request, own in zip(requests, segments, strict=True):
            each = (request.seat, own.position, own.start - own.position)
            for into, value in zip(numbers[1:], each, strict=True):
                into += [value] * own.count
            numbers[0].extend(range(own.position, own.position + own.count))
        n, last = len(numbers[0]), [own.stop - 1 for own in segments]
        flat = upload([*itertools.chain(*numbers), *last], device)
        self.positions, self.seat, self._committed, self._shift = flat[: 4 * n].view(4, n)
        self.last = flat[4 * n :]
        self.index = torch.arange(n, device=device)
        self.device = device

    def committed(self, store: StoreLayout, start: int, stop: int) -> Tensor:
        """Committed entries of each row's request: [stop - start, 1]."""
        return (self._committed[start:stop] // store.store.tokens_per_entry)[:, None]

    def inflight(
        self, table: Table, store: StoreLayout, chosen: Tensor, start: int, stop: int
    ) -> Tensor:
        """Locations of entries that this step completes: the in-flight row of their last token.

        chosen: int64 [stop - start, k]. Where an entry is no entry of this step: the row itself,
        which is finite.
        """
        per = store.store.tokens_per_entry
        row = chosen * per + (per - 1) + self._shift[start:stop, None]
        itself = self.index[start:stop, None]
        new = chosen >= self.committed(store, start, stop)
        return table.paged.locate(torch.where(new, row, itself))


def stored_rows(store: StoreLayout, ops: MemoryOps, rows: Tensor) -> Tensor:
    """Rows [n, width] of one layer as its store keeps them: 8-bit records, or as they are."""
    return ops.quantize_rows(rows, store.latent) if store.latent else rows


def stored_keys(store: StoreLayout, ops: MemoryOps, keys: Tensor) -> Tensor:
    """Index keys [n, width] as a store keeps them."""
    return ops.quantize_keys(keys) if store.latent else keys
