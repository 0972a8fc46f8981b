"""A hot cache as bookkeeping alone: which entries it would hold, in numpy, without rows.

The same state machine as the runtime's (``kernels/resolve.py``, ``memory/hot_cache.py``): slots, stamps,
a hand, the same key functions and the same order of ties, so that replaying what a request selected
gives the misses that the engine counted, to the row (a test holds the two together).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpolicy.errors import unknown_name
from kvpolicy.kernels.eviction import CLOCK_SPARE_STEPS, DRAW_CALL, DRAW_SLOT, DRAW_STEP

__all__ = ["RULES", "Rule", "SlotCache", "keep_order", "rule_named"]

Entries = NDArray[np.int64]
Key = Callable[[Entries, Entries, int, int, int, int], Entries]

ABSENT = -1


def _stamp_key(slot: Entries, stamp: Entries, cap: int, step: int, hand: int, draws: int) -> Entries:
    return stamp


def _clock_key(slot: Entries, stamp: Entries, cap: int, step: int, hand: int, draws: int) -> Entries:
    ahead = slot - hand
    ahead[ahead < 0] += cap
    ahead[step - (stamp >> 1) < CLOCK_SPARE_STEPS] += cap
    return ahead


def _random_key(slot: Entries, stamp: Entries, cap: int, step: int, hand: int, draws: int) -> Entries:
    with np.errstate(over="ignore"):
        mixed = (slot + 1) * np.int64(DRAW_SLOT) ^ np.int64(step * DRAW_STEP + draws * DRAW_CALL)
        keys: Entries = (mixed ^ (mixed >> 15)) * np.int64(DRAW_CALL) & np.int64(0x7FFFFFFF)
    return keys


@dataclass(frozen=True, slots=True)
class Rule:
    """An eviction rule on arrays: touch and key as in :class:`kvpolicy.kernels.eviction.EvictionRule`,
    the key of the given slots only."""

    name: str
    touch: bool
    key: Key


RULES = {
    rule.name: rule
    for rule in (
        Rule("clock", True, _clock_key),
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

    entries: most entries that will ever be named. Starts empty with capacity 0.
    """

    def __init__(self, rule: Rule, entries: int) -> None:
        self.rule = rule
        self.entries = entries
        self.capacity = 0
        self._slot_of = np.full(entries, ABSENT, dtype=np.int64)
        self._entry_of = np.empty(0, dtype=np.int64)
        self._stamp = np.empty(0, dtype=np.int64)
        self._hand = self._draws = self._used = 0

    @property
    def held(self) -> Entries:
        """The entries that are in it, in slot order."""
        return self._entry_of[self._entry_of >= 0]

    def resolve(self, wanted: Entries, step: int, evict: bool = True) -> Entries:
        """Look up, touch, admit what is missing. wanted: ascending and unique, int64 [u]. Returns the
        missing ones, ascending."""
        slot = self._slot_of[wanted]
        missed = wanted[slot < 0]
        if not self.capacity:
            return missed
        hits = slot[slot >= 0]
        if self.rule.touch:
            self._stamp[hits] = 2 * step + 1
        if missed.size:
            room = self._room(missed.size, hits, step, evict)
            self._place(missed[: room.size], room, 2 * step)
        return missed

    def _room(self, count: int, keep: Entries, step: int, evict: bool) -> Entries:
        """Free slots, then victims; both ascending."""
        room = np.empty(0, dtype=np.int64)
        if self._used < self.capacity:
            room = np.flatnonzero(self._entry_of < 0)[:count]
        missing = count - room.size
        if missing <= 0 or not evict:
            return room
        candidate = self._entry_of >= 0
        candidate[keep] = False
        victims = self._victims(np.flatnonzero(candidate), missing, step)
        self._slot_of[self._entry_of[victims]] = ABSENT
        self._entry_of[victims] = ABSENT
        self._used -= victims.size
        return np.concatenate((room, victims))

    def _victims(self, slots: Entries, count: int, step: int) -> Entries:
        self._draws += 1
        if not slots.size:
            return slots
        keys = self.rule.key(slots, self._stamp[slots], self.capacity, step, self._hand, self._draws)
        # Ties go to the lowest slot: one number that says both, so that no stable sort is needed.
        whole = keys * self.capacity + slots
        if count < slots.size:
            whole = np.partition(whole, count - 1)[:count]
        taken = whole % self.capacity
        self._hand = (int(taken[whole.argmax()]) + 1) % self.capacity
        taken.sort()
        return taken

    def _place(self, entries: Entries, slots: Entries, stamp: int | Entries) -> None:
        self._slot_of[entries] = slots
        self._entry_of[slots] = entries
        self._stamp[slots] = stamp
        self._used += entries.size

    def seed(self, entries: Entries, step: int) -> None:
        """Make ``entries`` (distinct, at most ``capacity``) the content."""
        self._slot_of[self.held] = ABSENT
        self._entry_of[:] = ABSENT
        self._stamp[:] = 0
        self._used = 0
        self._place(entries, np.arange(entries.size), 2 * step)

    def leave_full(self, rows: int, entries: Entries, recent: Entries | None) -> None:
        """A full cache shrinks to ``rows`` slots that hold ``entries``; those in ``recent`` rank above."""
        self.clear()
        self._draws = 0
        self.resize(rows)
        stamps = np.zeros(entries.size, dtype=np.int64)
        if recent is not None:
            stamps[np.isin(entries, recent)] = 1
        self._place(entries, np.arange(entries.size), stamps)

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
            more = rows - self.capacity
            self._entry_of = np.concatenate((self._entry_of, np.full(more, ABSENT)))
            self._stamp = np.concatenate((self._stamp, np.zeros(more, dtype=np.int64)))
            self._hand, self.capacity = self.capacity, rows

    def _shrink(self, rows: int) -> None:
        held = np.flatnonzero(self._entry_of >= 0)
        order = np.argsort(-self._stamp[held], kind="stable")
        keep, drop = held[order[:rows]], held[order[rows:]]
        self._slot_of[self._entry_of[drop]] = ABSENT
        occupied = np.zeros(self.capacity, dtype=bool)
        occupied[keep] = True
        movers = np.sort(keep[keep >= rows])
        targets = np.flatnonzero(~occupied[:rows])[: movers.size]
        entry, stamp = self._entry_of[movers], self._stamp[movers]
        self._entry_of[~occupied] = ABSENT
        self._stamp[~occupied] = 0
        self._entry_of, self._stamp = self._entry_of[:rows].copy(), self._stamp[:rows].copy()
        self._used = keep.size - movers.size
        self._place(entry, targets, stamp)
        self.capacity = rows
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
