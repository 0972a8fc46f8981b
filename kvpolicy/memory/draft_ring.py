"""Draft rings: what a drafter keeps of the last committed tokens of each request, in the arena.

A row at position p sees committed tokens j with p - j < W, so with the anchor at s the positions
s - W + 1 .. s - 1 are alive: W - 1 rows, the one of position j in slot j mod (W - 1). Rows of a verify
step are written only once they are accepted, since slot (s + K) mod (W - 1) still holds an older row
that is needed. Then W - 1 rows are enough: committing s .. s + a overwrites positions down to
s + a - W + 1, and the next anchor s + a + 1 needs s + a - W + 2 and later ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.kernels.memory_ops import MemoryOps
from kvpolicy.kernels.paging import arange, gather
from kvpolicy.memory.arena import Arena
from kvpolicy.memory.layout import RingLayout

NOWHERE = -1
"""Position of an empty column; location of a row that is not written."""


class DraftRings:
    """The rings of all seats; every number that changes from step to step is read on the device.

    frames: int64 [seats, frames of a ring]. first: int64 [seats], the first position whose row was ever
    written (tokens before it were never computed).
    """

    def __init__(self, arena: Arena, layout: RingLayout, seats: int, ops: MemoryOps) -> None:
        self.layout = layout
        self.rows = layout.shape.rows
        self._ops = ops
        device = arena.device
        self._view = arena.view(layout.item)
        self.frames = torch.zeros((seats, layout.frames), dtype=torch.int64, device=device)
        self.first = torch.zeros(seats, dtype=torch.int64, device=device)
        self._parts = arange(layout.parts, device)
        self._back = arange(self.rows + 1, device) - (self.rows + 1)

    @property
    def window(self) -> int:
        """W: columns of what :meth:`read` gives."""
        return self.rows + 1

    def start(self, seat: int, first: int) -> None:
        """A request takes the seat; its ring is empty before position ``first``."""
        self.first[seat].fill_(first)

    def write(self, seats: Tensor, positions: Tensor, rows: Tensor, keep: Tensor) -> None:
        """Keep rows of committed tokens. Rows of one seat must be of less than W positions.

        seats, positions: int64 [n]. rows: float32 [n, width]. keep: bool [n], others write nothing.
        """
        where = self._locate(seats, positions)
        where = torch.where(keep[:, None], where, NOWHERE)
        width, item = self.layout.shape.width, self.layout.item.shape[0]
        padded = rows.new_zeros((rows.shape[0], self.layout.parts * item))
        padded[:, :width] = rows
        self._ops.put(self._view, where.flatten(), padded.view(-1, item))

    def read(self, seats: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What is kept before anchors. seats, positions: int64 [r].

        Returns float32 [r, W, width] and int64 [r, W]: columns are positions s - W .. s - 1, an empty one
        is -1 and zero. The first column is always empty.
        """
        columns = positions[:, None] + self._back
        valid = (columns > (positions - self.window)[:, None]) & (
            columns >= self.first[seats][:, None]
        )
        owners = seats.clamp_min(0)[:, None].expand_as(columns)
        where = self._locate(owners, columns.clamp_min(0))
        found = gather(self._view, where).flatten(-2)[..., : self.layout.shape.width]
        found = torch.where(valid[..., None], found, 0.0)
        return found, torch.where(valid, columns, NOWHERE)

    def _locate(self, seats: Tensor, positions: Tensor) -> Tensor:
        """Locations of the items of rows: int64 [..., parts]."""
        parts, per = self.layout.parts, self.layout.item.per_frame
        item = (positions % self.rows * parts)[..., None] + self._parts
        return self.frames[seats[..., None], item // per] * per + item % per
