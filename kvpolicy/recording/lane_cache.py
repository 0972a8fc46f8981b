"""The hot cache of one request in one store through its life, as bookkeeping: mapped or full."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvpolicy.recording.caches import Rule, SlotCache, keep_order
from kvpolicy.recording.lanes import FULL, Entries

__all__ = ["LaneCache"]


class LaneCache:
    """What ``memory.hot_cache.HotCache`` does, without rows: every step goes the runtime's way.

    entries: most that will ever be named. seat: see :class:`SlotCache`. full: every entry is resident
    (then the mapped cache has no slots). promoted: records copied because it came to hold everything.
    """

    def __init__(self, rule: Rule, entries: int, seat: int) -> None:
        self.cache = SlotCache(rule, entries, seat)
        self.full = False
        self.promoted = 0

    def start(self, budget: int, entries: Entries, seat: int) -> None:
        """A new cache of this budget that holds ``entries``, of a request that comes back."""
        self.cache = SlotCache(self.cache.rule, self.cache.entries, seat)
        self.full = budget >= FULL
        if not self.full:
            self.cache.resize(budget)
            self.cache.seed(entries, step=0)

    def resize(self, budget: int, committed: int, recent: Entries) -> None:
        """Another budget, with what the runtime does when a cache becomes full or ceases to be.

        committed: entries that are durable. recent: what was selected last, ascending."""
        if budget >= FULL:
            if not self.full:
                self.promoted += committed
                self.cache.clear()
            self.full = True
        elif self.full:
            recent = recent[recent < committed]
            self.cache.leave_full(budget, keep_order(recent, committed, budget), recent)
            self.full = False
        else:
            self.cache.resize(budget)

    def seed(self, selected: Entries, committed: int, step: int, how: str) -> int:
        """Fill it when the prompt has ended, as ``CacheRule.seed`` says. Returns records copied.

        selected: by the last prompt row, ascending."""
        if self.full:
            return 0
        rows = min(self.cache.capacity, committed)
        entries: Entries = np.arange(rows)
        if how != "first":
            entries = keep_order(selected[selected < committed], committed, rows)
        self.cache.seed(entries, step)
        return int(entries.size)

    def step(
        self,
        calls: Sequence[Entries],
        committed: int,
        after: int,
        step: int,
        admit_newest: bool,
    ) -> int:
        """One decode step; returns the records that were missing.

        calls: what each selector wanted, entries below ``committed``, ascending. after: entries that
        are durable behind the step."""
        if self.full:
            return 0
        missed = sum(self.cache.resolve(call, step).size for call in calls)
        self.cache.offer(np.arange(committed, after), step, admit_newest)
        return missed
