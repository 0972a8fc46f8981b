"""The host pool: every committed row and index key of every request, the source of truth.

Each request's region is contiguous: store after store, all records, then all keys,
at last the draft ring, which is there while the request is preempted. A record holds the rows of
all layers of its store for one entry (token-major inside a layer group), so a fetch of one entry is one long
read: records from 1.7 KB on reach 0.9 of the link's copy rate at any span and order, where single rows of
656 bytes reach 0.4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicy.errors import CapacityError
from kvpolicy.memory import accounting
from kvpolicy.memory.extents import Extent, ExtentAllocator
from kvpolicy.memory.layout import WORD, Item, Layout
from kvpolicy.memory.pinning import PinnedBuffer, Progress


@dataclass(frozen=True, slots=True)
class HostRegion:
    """One request's share of the pool, contiguous.

    rows, keys: per store, [entries, layers, width] and [entries, width], views of the pool.
    row_base, key_base: where each begins, in words of the pool. ring: [items, width], or None.
    """

    extent: Extent
    rows: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]
    row_base: tuple[int, ...]
    key_base: tuple[int, ...]
    ring: Tensor | None = None


class HostPool:
    """``capacity`` bytes of host memory, page-locked where ``pinned``; progress: told while it is being
    pinned. CapacityError where there is not so much."""

    def __init__(
        self, capacity: int, layout: Layout, pinned: bool, progress: Progress | None = None
    ) -> None:
        self.layout = layout
        self.extents = ExtentAllocator(capacity)
        try:
            self._memory = PinnedBuffer(capacity, pinned, progress)
        except RuntimeError as error:
            raise CapacityError("host", f"{capacity} bytes: {str(error).splitlines()[0]}") from None
        self._buffer = self._memory.bytes
        self.words = self._buffer[: capacity // WORD * WORD].view(torch.int32)

    def reserve(self, max_tokens: int) -> HostRegion:
        """Room for ``max_tokens`` tokens of one request, or CapacityError and no change."""
        extent = self.extents.allocate(accounting.host_bytes(self.layout, max_tokens))
        rows: list[Tensor] = []
        keys: list[Tensor] = []
        bases: tuple[list[int], list[int]] = ([], [])
        offset = extent.start
        for store in self.layout.stores:
            entries = store.store.entries(max_tokens)
            for item, into, base in (
                (store.record, rows, bases[0]),
                (store.key, keys, bases[1]),
            ):
                into.append(self._array(offset, entries, item))
                base.append(offset // WORD)
                offset += ExtentAllocator.rounded(entries * item.bytes)
        ring = self.layout.ring
        saved = self._array(offset, ring.items, ring.item) if ring else None
        return HostRegion(extent, tuple(rows), tuple(keys), tuple(bases[0]), tuple(bases[1]), saved)

    def _array(self, offset: int, entries: int, item: Item) -> Tensor:
        raw = self._buffer[offset : offset + entries * item.bytes]
        return raw.view(item.dtype).view(entries, *item.shape)

    def release(self, region: HostRegion) -> None:
        """Give a region back; its views must not be used any more."""
        self.extents.release(region.extent)

    def close(self) -> None:
        """Unpin and free the memory once the device is done with it; the allocator's books stay. A
        second call does nothing."""
        self._memory.close()
        self._buffer = self._memory.bytes
        self.words = self._buffer.view(torch.int32)
