"""A hot cache as bookkeeping alone: which entries it would hold, in numpy, without rows.

The same state machine as the runtime's (``kernels/resolve.py``, ``memory/hot_cache.py``): slots, stamps,
a hand, the same key functions and the same order of ties, so that replaying what a request selected
gives the misses that the engine counted, to the row (a test holds the two together).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpolicy.errors import unknown_name
from kvpolicy.kernels.eviction import (
    CLOCK_EARLY,
    CLOCK_LAZY,
    CLOCK_LESS,
    CLOCK_MOST_STEPS,
    CLOCK_SPARE_STEPS,
    DRAW_CALL,
    DRAW_SLOT,
    DRAW_STEP,
)

__all__ = ["RULES", "Rule", "SlotCache", "keep_order", "rule_named"]

Entries = NDArray[np.integer[Any]]
Key = Callable[[Entries, Entries, int, int], Entries]

ABSENT = -1


def _stamp_key(slot: Entries, stamp: Entries, step: int, draws: int) -> Entries:
    return stamp


def _random_key(slot: Entries, stamp: Entries, step: int, draws: int) -> Entries:
    with np.errstate(over="ignore"):
        mixed = (slot + 1) * np.int64(DRAW_SLOT) ^ np.int64(step * DRAW_STEP + draws * DRAW_CALL)
        keys: Entries = (mixed ^ (mixed >> 15)) * np.int64(DRAW_CALL) & np.int64(0x7FFFFFFF)
    return keys


@dataclass(frozen=True, slots=True)
class Rule:
    """An eviction rule on arrays: as :class:`kvpolicy.kernels.eviction.EvictionRule`. key: of the given
    slots (slot, stamp, step, draws), None for the CLOCK sweep."""

    name: str
    touch: bool
    key: Key | None
    lazy: int = 1


RULES = {
    rule.name: rule
    for rule in (
        Rule("clock", True, None, CLOCK_LAZY),
        Rule("lru", True, _stamp_key),
        Rule("fifo", False, _stamp_key),
        Rule("random", True, _random_key),
    )
}


def rule_named(name: str) -> Rule:
    """The rule of this name. UserError for one that has no form on arrays (a plug-in's)."""
    if name not in RULES:
        raise unknown_name("eviction rule", name, RULES)
    return RULES[name]


class SlotCache:
    """One request's hot cache in one store, mapped form: ``capacity`` slots.

    entries: most entries that will ever be named. lazy_at: see ``kernels.resolve.HotState``, the seat.
    Starts empty with capacity 0.
    """

    def __init__(self, rule: Rule, entries: int, lazy_at: int = 0) -> None:
        self.rule = rule
        self.entries = entries
        self.lazy_at = lazy_at
        self.capacity = 0
        self._slot_of = np.full(entries, ABSENT, dtype=np.int64)
        self._entry_of = np.empty(
            0, dtype=np.int64
        )  # of the slots in use, which are the first ones
        self._stamp = np.empty(0, dtype=np.int64)
        self._used = self._hand = self._draws = 0
        self._age = CLOCK_SPARE_STEPS

    @property
    def held(self) -> Entries:
        """The entries that are in it, in slot order."""
        return self._entry_of[: self._used].copy()

    def resolve(self, wanted: Entries, step: int) -> Entries:
        """Look up, touch, admit what is missing. wanted: unique, int64 [u]. Returns the missing ones."""
        slot = self._slot_of[wanted]
        missed = wanted[slot < 0]
        if not self.capacity:
            return missed
        hits = slot[slot >= 0]
        due = missed.size or (step + self.lazy_at) % self.rule.lazy == 0
        if self.rule.touch and due:
            self._stamp[hits] = 2 * step + 1
        if missed.size:
            room = self._room(missed.size, hits, step)
            self._place(missed[: room.size], room, 2 * step)
        return missed

    def offer(self, entries: Entries, step: int, evict: bool = True) -> None:
        """Rows that nobody waits for come in, as ``kernels.publish`` lets them: any other may go."""
        if self.capacity and entries.size:
            room = self._room(entries.size, None, step, evict)
            self._place(entries[: room.size], room, 2 * step)

    def _room(self, count: int, keep: Entries | None, step: int, evict: bool = True) -> Entries:
        """Free slots, then victims in the rule's order."""
        free = min(count, self.capacity - self._used)
        room = np.arange(self._used, self._used + free)
        if count > free and evict:
            candidate = np.ones(self._used, dtype=bool)
            if keep is not None and self.rule.touch:
                candidate = self._stamp[: self._used] != 2 * step + 1
            elif keep is not None:
                candidate[keep] = False
            slots = np.flatnonzero(candidate)
            victims = self._victims(slots, count - free, step, keep is not None)
            self._slot_of[self._entry_of[victims]] = ABSENT
            room = np.concatenate((room, victims))
        self._used += free
        return room

    def _victims(self, slots: Entries, count: int, step: int, tune: bool) -> Entries:
        self._draws += 1
        if self.rule.key is None:
            keys = self._passed(slots, step)
        else:
            keys = self.rule.key(slots, self._stamp[slots], step, self._draws)
        # Ties go to the lowest slot: one number that says both, so that no stable sort is needed.
        whole = keys * self.capacity + slots
        if count < slots.size:
            whole = np.partition(whole, count - 1)[:count]
        whole.sort()
        taken: Entries = whole % self.capacity
        if self.rule.key is None and tune:
            self._tune(whole // self.capacity, count)
        if taken.size:
            self._hand = (int(taken[-1]) + 1) % self.capacity
        return taken if self.rule.key is None else np.sort(taken)

    def _passed(self, slots: Entries, step: int) -> Entries:
        """How many slots a CLOCK sweep passes before it takes each."""
        ahead = slots - self._hand
        ahead[ahead < 0] += self.capacity
        unused = step - (self._stamp[slots] >> 1)
        ahead[unused < self._age] += self.capacity
        ahead[unused < (self._age + 1) // 2] += self.capacity
        return ahead

    def _tune(self, passed: Entries, count: int) -> None:
        if passed.size < count or int(passed[-1]) >= self.capacity:
            self._age = max(1, self._age - CLOCK_LESS)
        elif (int(passed[-1]) + 1) * CLOCK_EARLY < self.capacity:
            self._age = min(CLOCK_MOST_STEPS, self._age + 1)

    def _place(self, entries: Entries, slots: Entries, stamp: int | Entries) -> None:
        self._slot_of[entries] = slots
        self._entry_of[slots] = entries
        self._stamp[slots] = stamp

    def _fill(self, entries: Entries, stamp: int | Entries) -> None:
        """The content anew: these entries in the first slots."""
        self._slot_of[self.held] = ABSENT
        self._used = entries.size
        self._place(entries, np.arange(entries.size), stamp)

    def seed(self, entries: Entries, step: int) -> None:
        """Make ``entries`` (distinct, at most ``capacity``) the content."""
        self._fill(entries, 2 * step)

    def leave_full(self, rows: int, entries: Entries, recent: Entries | None) -> None:
        """A full cache shrinks to ``rows`` slots that hold ``entries``; those in ``recent`` rank above."""
        self.clear()
        self._draws, self._age = 0, CLOCK_SPARE_STEPS
        self.resize(rows)
        stamps = np.zeros(entries.size, dtype=np.int64)
        if recent is not None:
            stamps[np.isin(entries, recent)] = 1
        self._fill(entries, stamps)

    def clear(self) -> None:
        """No slots, nothing held."""
        self._slot_of[self.held] = ABSENT
        self._entry_of, self._stamp = self._entry_of[:0], self._stamp[:0]
        self.capacity = self._used = self._hand = 0

    def resize(self, rows: int) -> None:
        """Another number of slots; a shrink keeps those used last, and moves them down."""
        if rows < self.capacity:
            self._shrink(rows)
        elif rows > self.capacity:
            more = np.zeros(rows - self.capacity, dtype=np.int64)
            self._entry_of = np.concatenate((self._entry_of, more))
            self._stamp = np.concatenate((self._stamp, more))
            self._hand, self.capacity = self.capacity, rows

    def _shrink(self, rows: int) -> None:
        order = np.argsort(-self._stamp[: self._used], kind="stable")
        keep, drop = order[:rows], order[rows:]
        self._slot_of[self._entry_of[drop]] = ABSENT
        occupied = np.zeros(self.capacity, dtype=bool)
        occupied[keep] = True
        movers = np.sort(keep[keep >= rows])
        targets = np.flatnonzero(~occupied[:rows])[: movers.size]
        self._place(self._entry_of[movers], targets, self._stamp[movers])
        self._entry_of, self._stamp = self._entry_of[:rows].copy(), self._stamp[:rows].copy()
        self.capacity, self._used = rows, min(self._used, rows)
        self._hand = self._hand % rows if rows else 0


def keep_order(recent: Entries | None, committed: int, rows: int) -> Entries:
    """Up to ``rows`` distinct entries below ``committed``: ``recent`` ones (ascending; the newest of
    them first), then the newest; ascending."""
    mask = np.zeros(committed, dtype=bool)
    if recent is not None and rows:
        mask[recent[recent < committed][-rows:]] = True
    left = rows - int(mask.sum())
    if left > 0:
        mask[np.flatnonzero(~mask)[-left:]] = True
    return np.flatnonzero(mask)
