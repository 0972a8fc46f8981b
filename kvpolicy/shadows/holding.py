"""What a shadow holds: the caches of one request, with the frames that they would take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvpolicy.memory.layout import Layout, StoreLayout
from kvpolicy.recording.caches import Rule
from kvpolicy.recording.lane_cache import LaneCache
from kvpolicy.recording.lanes import FULL, Entries

__all__ = ["Count", "ShadowCache", "ShadowRequest"]

NONE: Entries = np.zeros(0, dtype=np.int64)


class ShadowCache:
    """One store of one request. Has what :mod:`kvpolicy.memory.cuts` asks of a hot cache.

    store: its layout. max_entries: most it can ever have. room: entries with room now. recent: what was
    selected last, ascending.
    """

    def __init__(self, store: StoreLayout, rule: Rule, max_entries: int, seat: int) -> None:
        self.store = store
        self.max_entries = max_entries
        self.room = 0
        self.recent = NONE
        self.lane = LaneCache(rule, max_entries + 1, seat)

    @property
    def full(self) -> bool:
        return self.lane.full

    @property
    def capacity(self) -> int:
        """The budget: slots, or ``max_entries`` where every entry is resident."""
        return self.max_entries if self.full else self.lane.cache.capacity

    @property
    def num_frames(self) -> int:
        rows = self.room if self.full else self.capacity
        return self.store.hot_frames(rows, self.full)

    def frames_for(self, rows: int) -> int:
        """Frames that a budget takes now."""
        full = rows >= self.max_entries
        return self.store.hot_frames(self.room if full else rows, full)

    def resize(self, rows: int, committed: int, free: int) -> None:
        """Another budget, as ``HotCache.resize``. free: frames that nobody holds."""
        if rows == self.capacity or (self.full and rows >= self.max_entries):
            return
        if self.full:
            # Slots need metadata, which may not fit in what a full cache gives back.
            allowed = free + self.num_frames
            while rows and self.store.hot_frames(rows, False) > allowed:
                rows = max(0, rows - self.store.record.per_frame)
        self.lane.resize(FULL if rows >= self.max_entries else rows, committed, self.recent)

    def come_back(self, rows: int, committed: int, seat: int) -> int:
        """On the device again with its last selection, as ``Mover.warm``. Returns records copied."""
        held = self.recent[self.recent < committed]
        full = rows >= self.max_entries
        entries = NONE if full else held[max(held.size - rows, 0) :]
        self.lane.start(FULL if full else rows, entries, seat)
        return committed if full else int(entries.size)


@dataclass(slots=True)
class Count:
    """Rows of decode steps, per layer: a record of n layers counts n."""

    unique: int = 0
    fetched: int = 0


class ShadowRequest:
    """The caches of one request on the device. committed: tokens. counts: since it was last asked."""

    def __init__(
        self, layout: Layout, rule: Rule, max_tokens: int, seat: int, recent: Sequence[Entries]
    ) -> None:
        self.committed = 0
        self.seen = Count()
        self.decoding = False
        self.hot = [
            ShadowCache(store, rule, store.store.entries(max_tokens), seat)
            for store in layout.stores
        ]
        for cache, entries in zip(self.hot, recent, strict=False):
            cache.recent = entries

    @property
    def num_frames(self) -> int:
        return sum(cache.num_frames for cache in self.hot)

    def entries(self, store: int) -> int:
        """Entries of a store that are durable."""
        return self.hot[store].store.store.entries(self.committed)

    def grow(self, tokens: int) -> None:
        """Room for so many tokens."""
        for cache in self.hot:
            cache.room = cache.store.store.entries(tokens)

    def floor_frames(self, floor_rows: int) -> int:
        """Frames of the protected minimum, as ``memory.usage.floor_frames``."""
        return sum(
            min(cache.frames_for(min(floor_rows, cache.max_entries)), cache.num_frames)
            for cache in self.hot
        )
