"""The device arena: one buffer of equal frames, and the growing tables that live in them."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from kvpolicy.errors import CapacityError
from kvpolicy.kernels.paging import Paged, upload
from kvpolicy.memory.frames import FrameAllocator
from kvpolicy.memory.layout import Item

# Freed frames are filled with this byte when poisoning is on: as float32 or bf16 it is NaN, as
# int32 it is -1, so a read of a row that nobody wrote cannot pass unseen.
POISON = 0xFF


class Arena:
    """``capacity`` bytes of device memory in frames of ``frame_bytes``.

    poison: overwrite frames when they are freed (for tests and --validate).
    """

    def __init__(
        self, capacity: int, frame_bytes: int, device: torch.device, poison: bool = False
    ) -> None:
        self.frame_bytes = frame_bytes
        self.device = device
        self.poison = poison
        shape = (capacity // frame_bytes, frame_bytes)
        try:
            self.buffer = torch.zeros(shape, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise CapacityError(
                "device", f"{capacity} bytes: {str(error).splitlines()[0]}"
            ) from None
        self.frames = FrameAllocator(shape[0])  # after the buffer: its list of frames is large too

    def view(self, item: Item) -> Tensor:
        """The whole arena read as items of one kind: [frames, per_frame, *shape], strided."""
        used = item.per_frame * item.bytes
        typed = self.buffer[:, :used].view(item.dtype)
        return typed.view(self.frames.num_frames, item.per_frame, *item.shape)

    def close(self) -> None:
        """Free the buffer; the allocator's books stay. Tables keep their part of it until they go."""
        self.buffer = self.buffer.new_empty(0)

    def release(self, frames: list[int], owner: Hashable) -> None:
        """Give frames back, poisoned if so set."""
        self.frames.release(frames, owner)
        if self.poison and frames:
            self.buffer[frames] = POISON


class Table:
    """A vector of items in frames of an arena that one owner holds; grows and shrinks by frames.

    row: int64 [n] on the device, one row of a block table that batched kernels read; the table
    keeps its frame numbers there.
    """

    def __init__(
        self, arena: Arena, item: Item, owner: Hashable, row: Tensor | None = None
    ) -> None:
        self.arena = arena
        self.item = item
        self.owner = owner
        self.items = 0
        self._frames: list[int] = []
        self._row = row
        self._paged = Paged(arena.view(item), self._tensor(0))

    @classmethod
    def sharing(cls, owner: Table, item: Item, items: int) -> Table:
        """Another reading of ``owner``'s frames, as ``items`` items of another kind. Not to be resized."""
        table = cls(owner.arena, item, owner.owner)
        table._frames = owner._frames
        table.items = items
        table._paged = Paged(owner.arena.view(item), owner.paged.frames)
        return table

    def _tensor(self, kept: int) -> Tensor:
        """Frame numbers on the device; the first ``kept`` of them are there already."""
        if self._row is None:
            return upload(self._frames, self.arena.device)
        count = len(self._frames)
        if count > kept:
            self._row[kept:count] = upload(self._frames[kept:], self.arena.device)
        return self._row[:count]

    @property
    def paged(self) -> Paged:
        """The table as kernels see it. Changes when the table is resized."""
        return self._paged

    @property
    def num_frames(self) -> int:
        return len(self._frames)

    def resize(self, items: int) -> None:
        """Room for exactly ``items`` items. CapacityError and no change if frames run out."""
        held = len(self._frames)
        change = self.item.frames(items) - held
        if self._row is not None and held + change > self._row.shape[0]:
            raise ValueError(f"{items} items of {self.owner}: the block table is too narrow")
        if change > 0:
            self._frames += self.arena.frames.allocate(change, self.owner)
        elif change < 0:
            self.arena.release(self._frames[change:], self.owner)
            del self._frames[change:]
        self.items = items
        if change:
            self._paged = Paged(self._paged.view, self._tensor(min(held, held + change)))

    def column(self, index: int) -> Paged:
        """One component of one-dimensional items, as a table of scalars."""
        return Paged(self._paged.view[..., index], self._paged.frames)
