"""All hot caches of an engine as one set of arrays: the bookkeeping of a decode step in a few numpy calls.

The state machine of :class:`kvpolicy.recording.caches.SlotCache` and of the runtime's kernels (slots, stamps,
a hand, key functions, ties to the lowest slot), for many caches at once: a test holds all of them together,
to the slot. A *lane* is one request's cache in one store.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpolicy.errors import IntegrityError
from kvpolicy.kernels.eviction import (
    CLOCK_EARLY,
    CLOCK_LESS,
    CLOCK_MOST_STEPS,
    CLOCK_SPARE_STEPS,
)
from kvpolicy.recording.caches import ABSENT, Rule

__all__ = ["SlotPool"]

Ints = NDArray[np.integer[Any]]

# Caches of up to so many slots are ranked whole; of larger ones half as many are looked at first.
WINDOW = 512
# Slots looked at first where one row comes in that nobody waits for.
FEW = 64
FAR, FARTHER = (1 << 15) - 1, 1 << 30
# A key of LRU is a stamp above so many bits of slot; NEVER is none.
SLOT_BITS, NEVER = 28, np.int64(1 << 62)


class SlotPool:
    """``lanes`` mapped caches, all empty with capacity 0.

    rule: how they evict; may be changed between two steps. entries: most entries that a lane will
    ever name; slots: most slots it will ever have. Entry ``entries`` is padding: naming it does nothing.
    """

    def __init__(self, rule: Rule, lanes: int, entries: int, slots: int) -> None:
        self.rule = rule
        self.entries, self.slots = entries, slots
        # One column more: padding is an entry that is always found, in a slot nobody counts.
        self._width, self._depth = entries + 1, slots + 1
        self._slot_of = np.full(lanes * self._width, ABSENT, dtype=np.int32)
        self._slot_of[entries :: self._width] = slots
        self._entry_of = np.full(lanes * self._depth, entries, dtype=np.int32)
        self._stamp = np.zeros(lanes * self._depth, dtype=np.int32)
        self.capacity = np.zeros(lanes, dtype=np.int64)
        self.used = np.zeros(lanes, dtype=np.int64)
        self.hand = np.zeros(lanes, dtype=np.int64)
        self.draws = np.zeros(lanes, dtype=np.int64)
        self.age = np.full(lanes, CLOCK_SPARE_STEPS, dtype=np.int64)

    # --- a step, many lanes ------------------------------------------------------------------------

    def resolve(self, lanes: Ints, wanted: Ints, step: int, due: NDArray[np.bool_]) -> Ints:
        """Look up, touch, admit what is missing. lanes: int64 [n], distinct; wanted: int [n, k], distinct
        entries of each, padded; due: [n], whose hits are stamped even where nothing misses. Returns how
        many were missing: int64 [n]."""
        found = self._slot_of.take((lanes * self._width)[:, None] + wanted)
        absent = found < 0
        missed: Ints = np.count_nonzero(absent, axis=1)
        open_ = self.capacity[lanes] > 0
        if self.rule.touch:
            # What is absent counts as in the slot of padding, whose stamp nobody reads.
            slot = np.minimum(found.view(np.uint32), self.slots)
            touched = open_ & (due | (missed > 0))
            at = (lanes * self._depth)[:, None] + slot
            self._stamp[at if touched.all() else at[touched]] = 2 * step + 1
        placing = missed if open_.all() else np.where(open_, missed, 0)
        if placing.any():
            index = np.flatnonzero(absent if open_.all() else absent & open_[:, None])
            keep = None if self.rule.touch else found
            self._bring_in(lanes, placing, wanted.ravel()[index], step, keep, True)
        return missed

    def offer(self, lanes: Ints, entries: Ints, step: int, evict: bool = True) -> None:
        """One row that nobody waits for comes into each lane: any other may go for it."""
        open_ = np.flatnonzero(self.capacity[lanes] > 0)
        if open_.size:
            ones = np.ones(open_.size, dtype=np.int64)
            self._bring_in(lanes[open_], ones, entries[open_], step, None, False, evict)

    def _bring_in(
        self,
        lanes: Ints,
        counts: Ints,
        new: Ints,
        step: int,
        keep: Ints | None,
        resolving: bool,
        evict: bool = True,
    ) -> None:
        """Place ``counts[i]`` entries (``new``, lane by lane) in free slots, then in victims' slots."""
        used = self.used[lanes]
        free = np.minimum(counts, self.capacity[lanes] - used)
        if evict and not free.any():
            taken, own = self._victims(lanes, counts, step, keep, np.arange(lanes.size), resolving)
            if taken.size == new.size:  # nothing was free, and everything found a victim
                self._replace(lanes[own], taken, new, step)
                return
            placed, slot, owner = self._in_victims(taken, own, counts, new.size)
        else:
            placed, slot, owner = self._in_free(
                lanes, counts, free, used, step, keep, resolving, evict
            )
        self.used[lanes] = used + free
        if not placed.all():
            owner, slot, new = owner[placed], slot[placed], new[placed]
        self._replace(lanes[owner], slot, new, step)

    def _in_victims(
        self, taken: Ints, own: Ints, counts: Ints, size: int
    ) -> tuple[NDArray[np.bool_], Ints, Ints]:
        """Where ``size`` entries go if only the first of each lane found a victim."""
        found = np.bincount(own, minlength=counts.size)
        starts = np.cumsum(counts) - counts
        at = starts[own] + np.arange(taken.size) - (np.cumsum(found) - found)[own]
        placed, slot = np.zeros(size, dtype=bool), np.zeros(size, dtype=np.int64)
        placed[at], slot[at] = True, taken
        return placed, slot, np.repeat(np.arange(counts.size), counts)

    def _in_free(
        self, lanes: Ints, counts: Ints, free: Ints, used: Ints, step: int, keep: Ints | None,
        resolving: bool, evict: bool,
    ) -> tuple[NDArray[np.bool_], Ints, Ints]:  # fmt: skip
        """Which entries find a slot, and where: free ones first, then victims."""
        need = counts - free
        starts = np.cumsum(counts) - counts
        owner = np.repeat(np.arange(lanes.size), counts)
        rank = np.arange(owner.size) - starts[owner]
        slot = used[owner] + rank
        placed = rank < free[owner]
        short = np.flatnonzero(need)
        if evict and short.size:
            taken, own = self._victims(lanes[short], need[short], step, keep, short, resolving)
            # Victim j of a lane takes the lane's entry behind those that found free slots.
            found = np.bincount(own, minlength=short.size)
            place = np.arange(taken.size) - (np.cumsum(found) - found)[own]
            at = starts[short[own]] + free[short[own]] + place
            slot[at], placed[at] = taken, True
        return placed, slot, owner

    def _replace(self, lane: Ints, slot: Ints, new: Ints, step: int) -> None:
        """Entries into slots; who was in a taken one is not held any more."""
        depth = lane * self._depth + slot
        width = lane * self._width
        # A free slot has the padding entry, whose place in the map is put right again.
        self._slot_of[width + self._entry_of[depth]] = ABSENT
        self._slot_of[width + self.entries] = self.slots
        self._slot_of[width + new] = slot
        self._entry_of[depth] = new
        self._stamp[depth] = 2 * step

    def _victims(
        self, lanes: Ints, counts: Ints, step: int, keep: Ints | None, rows: Ints, resolving: bool
    ) -> tuple[Ints, Ints]:
        """Slots that give way, and which of ``lanes`` each is of, lane by lane in the rule's order."""
        some = counts > 0
        if not some.all():
            lanes, counts, rows = lanes[some], counts[some], rows[some]
            taken, own = self._victims(lanes, counts, step, keep, rows, resolving)
            return taken, np.flatnonzero(some)[own]
        self.draws[lanes] += 1
        if self.rule.key is None:
            return self._swept(lanes, counts, step, resolving)
        if self.rule.name == "lru":
            return self._oldest(lanes, counts, step, resolving)
        slots, owners = [], []
        for i, (lane, count) in enumerate(zip(lanes.tolist(), counts.tolist(), strict=True)):
            used = int(self.used[lane])
            stamp = self._stamp[lane * self._depth : lane * self._depth + used]
            candidate = np.ones(used, dtype=bool)
            if resolving and keep is None:
                candidate = stamp != 2 * step + 1
            elif keep is not None:
                held = keep[rows[i]]
                candidate[held[(held >= 0) & (held < used)]] = False
            slot = np.flatnonzero(candidate)
            keys = self.rule.key(slot, stamp[slot].astype(np.int64), step, int(self.draws[lane]))
            whole = keys * int(self.capacity[lane]) + slot
            if count < slot.size:
                whole = np.partition(whole, count - 1)[:count]
            whole.sort()
            taken = whole % int(self.capacity[lane])
            if taken.size:
                self.hand[lane] = (int(taken[-1]) + 1) % int(self.capacity[lane])
            slots.append(np.sort(taken))
            owners.append(np.full(taken.size, i))
        return np.concatenate(slots), np.concatenate(owners)

    def _oldest(self, lanes: Ints, counts: Ints, step: int, resolving: bool) -> tuple[Ints, Ints]:
        """LRU's victims: the lowest (stamp, slot) of each lane, given out by slot."""
        width, most = int(self.used[lanes].max()), int(counts.max())
        slot = np.arange(width)
        stamp = self._stamp.take((lanes * self._depth)[:, None] + slot)
        outside = slot >= self.used[lanes][:, None]
        if resolving:
            outside |= stamp == 2 * step + 1
        keys = (stamp.astype(np.int64) << SLOT_BITS) + slot
        keys[outside] = NEVER
        if most < width:
            keys = np.partition(keys, most - 1, axis=1)[:, :most]
        keys.sort(axis=1)
        taken = (np.arange(keys.shape[1]) < counts[:, None]) & (keys != NEVER)
        got = np.count_nonzero(taken, axis=1)
        some = np.flatnonzero(got)
        last = keys[some, got[some] - 1] & ((1 << SLOT_BITS) - 1)
        self.hand[lanes[some]] = (last + 1) % self.capacity[lanes[some]]
        keys = np.where(taken, keys & ((1 << SLOT_BITS) - 1), NEVER)
        keys.sort(axis=1)
        flat = keys.ravel()[np.flatnonzero(keys != NEVER)]
        return flat, np.repeat(np.arange(lanes.size), got)

    # --- the CLOCK sweep ---------------------------------------------------------------------------

    def _swept(self, lanes: Ints, counts: Ints, step: int, resolving: bool) -> tuple[Ints, Ints]:
        """CLOCK's victims, in the order in which the hand comes to them."""
        most = int(self.capacity[lanes].max())
        if most <= (WINDOW if resolving else FEW):
            return self._ranked(lanes, counts, step, resolving, most)
        # Large caches: those whose hand does not pass the window need not be looked at whole.
        slot, own, done = self._window(
            lanes, counts, step, resolving, WINDOW // 2 if resolving else FEW
        )
        if done.all():
            return slot, own
        left = np.flatnonzero(~done)
        kept = done[own]
        slot, own = slot[kept], own[kept]
        width = int(self.capacity[lanes[left]].max())
        more, owner = self._ranked(lanes[left], counts[left], step, resolving, width)
        slot, own = np.concatenate((slot, more)), np.concatenate((own, left[owner]))
        order = np.argsort(own, kind="stable")
        return slot[order], own[order]

    def _ranked(
        self, lanes: Ints, counts: Ints, step: int, resolving: bool, width: int
    ) -> tuple[Ints, Ints]:
        """Victims of whole caches by how many slots the hand passes before it takes them, laps added."""
        _, inside, stamp = self._look(lanes, step, resolving, width)
        capacity = self.capacity[lanes]
        small = 3 * width < FAR  # two bytes a key where they do
        kind: type[np.integer[Any]] = np.int16 if small else np.int32
        far = FAR if small else FARTHER
        lap = capacity.astype(kind)[:, None]
        age = self.age[lanes]
        keys = lap * (stamp > _newest_unused(step, age))
        keys += lap * (stamp > _newest_unused(step, (age + 1) // 2))
        keys += np.arange(width, dtype=kind)
        keys[~inside] = far
        most = int(counts.max())
        if most < width:
            keys = np.partition(keys, most - 1, axis=1)[:, :most]
        keys.sort(axis=1)
        taken = (np.arange(keys.shape[1]) < counts[:, None]) & (keys != far)
        got = np.count_nonzero(taken, axis=1)
        own = np.repeat(np.arange(lanes.size), got)
        slots = (self.hand[lanes][own] + keys[taken]) % capacity[own]
        last = keys[np.arange(lanes.size), np.maximum(got - 1, 0)].astype(np.int64)
        some = got > 0
        self.hand[lanes[some]] = (self.hand[lanes[some]] + last[some] + 1) % capacity[some]
        if resolving:
            late = (got < counts) | (last >= capacity)
            early = ~late & ((last + 1) * CLOCK_EARLY < capacity)
            now = self.age[lanes]
            now = np.where(late, np.maximum(1, now - CLOCK_LESS), now)
            self.age[lanes] = np.where(early, np.minimum(CLOCK_MOST_STEPS, now + 1), now)
        return slots, own

    def _look(
        self, lanes: Ints, step: int, resolving: bool, width: int
    ) -> tuple[Ints, NDArray[np.bool_], Ints]:
        """The ``width`` slots from each hand: which they are, which may go, their stamps."""
        capacity = self.capacity[lanes].astype(np.int32)
        used = self.used[lanes]
        ahead = np.arange(width, dtype=np.int32)
        slot = self.hand[lanes].astype(np.int32)[:, None] + ahead
        slot -= (slot >= capacity[:, None]) * capacity[:, None]
        stamp = self._stamp.take((lanes * self._depth)[:, None] + slot)
        inside = stamp != 2 * step + 1 if resolving else np.ones(slot.shape, dtype=bool)
        if (used < self.capacity[lanes]).any():
            inside &= slot < used.astype(np.int32)[:, None]
        if width > int(capacity.min()):
            inside &= ahead < capacity[:, None]
        return slot, inside, stamp

    def _window(
        self, lanes: Ints, counts: Ints, step: int, resolving: bool, width: int
    ) -> tuple[Ints, Ints, NDArray[np.bool_]]:
        """Victims of lap 1 within the window; done: lanes that found all of theirs there."""
        slot, inside, stamp = self._look(lanes, step, resolving, width)
        inside &= stamp <= _newest_unused(step, self.age[lanes])
        found = np.flatnonzero(inside)
        own = found // width
        each = np.bincount(own, minlength=lanes.size)
        rank = np.arange(found.size) - (np.cumsum(each) - each)[own]
        done = each >= counts
        last = found[(rank == counts[own] - 1)] % width
        taken = rank < counts[own]
        found, own = found[taken], own[taken]
        ready = lanes[done]
        slot = slot.ravel()[found]
        if ready.size:
            ends = slot[np.cumsum(np.minimum(each, counts))[done] - 1]
            self.hand[ready] = (ends + 1) % self.capacity[ready]
            if resolving:
                early = (last + 1) * CLOCK_EARLY < self.capacity[ready]
                self.age[ready[early]] = np.minimum(CLOCK_MOST_STEPS, self.age[ready[early]] + 1)
        return slot, own, done

    # --- one lane, seldom --------------------------------------------------------------------------

    def held(self, lane: int) -> Ints:
        """The entries that are in it, in slot order."""
        base = lane * self._depth
        return self._entry_of[base : base + int(self.used[lane])].astype(np.int64)

    def start(self, lane: int) -> None:
        """Somebody new: nothing held, no slots, evictions as at the start."""
        self.clear(lane)
        self.draws[lane], self.age[lane] = 0, CLOCK_SPARE_STEPS

    def clear(self, lane: int) -> None:
        """No slots, nothing held."""
        self._forget(lane)
        self.capacity[lane] = self.used[lane] = self.hand[lane] = 0

    def _forget(self, lane: int) -> None:
        """Nothing is held."""
        base, used = lane * self._depth, int(self.used[lane])
        self._slot_of[lane * self._width + self.held(lane)] = ABSENT
        self._entry_of[base : base + used] = self.entries

    def fill(self, lane: int, entries: Ints, stamp: int | Ints) -> None:
        """The content anew: these entries (distinct, at most its capacity) in the first slots."""
        self._forget(lane)
        self.used[lane] = entries.size
        self._put(lane, entries, np.arange(entries.size), stamp)

    def resize(self, lane: int, rows: int) -> None:
        """Another number of slots; a shrink keeps those used last, and moves them down."""
        old = int(self.capacity[lane])
        if rows < old:
            self._shrink(lane, rows)
        elif rows > old:
            self.hand[lane], self.capacity[lane] = old, rows

    def leave_full(self, lane: int, rows: int, entries: Ints, recent: Ints | None) -> None:
        """A full cache shrinks to ``rows`` slots that hold ``entries``; those in ``recent`` rank above."""
        self.start(lane)
        self.resize(lane, rows)
        stamps = np.zeros(entries.size, dtype=np.int64)
        if recent is not None:
            stamps[np.isin(entries, recent)] = 1
        self.fill(lane, entries, stamps)

    def _put(self, lane: int, entries: Ints, slots: Ints, stamp: int | Ints) -> None:
        base = lane * self._depth
        self._slot_of[lane * self._width + entries] = slots
        self._entry_of[base + slots] = entries
        self._stamp[base + slots] = stamp

    def _shrink(self, lane: int, rows: int) -> None:
        base, used = lane * self._depth, int(self.used[lane])
        stamp = self._stamp[base : base + used].astype(np.int64)
        entry = self.held(lane)
        order = np.argsort(-stamp, kind="stable")
        keep, drop = order[:rows], order[rows:]
        self._slot_of[lane * self._width + entry[drop]] = ABSENT
        occupied = np.zeros(max(int(self.capacity[lane]), 1), dtype=bool)
        occupied[keep] = True
        movers = np.sort(keep[keep >= rows])
        targets = np.flatnonzero(~occupied[:rows])[: movers.size]
        self._put(lane, entry[movers], targets, stamp[movers])
        self._entry_of[base + rows : base + used] = self.entries
        self.capacity[lane], self.used[lane] = rows, min(used, rows)
        self.hand[lane] = int(self.hand[lane]) % rows if rows else 0

    def check_integrity(self) -> None:
        """IntegrityError unless every lane's map and slots mirror each other."""
        for lane in range(len(self.capacity)):
            held, base = self.held(lane), lane * self._width
            found = np.flatnonzero(self._slot_of[base : base + self.entries] != ABSENT)
            if self.used[lane] > self.capacity[lane] or found.size != held.size:
                raise IntegrityError(f"lane {lane}: {found.size} mapped, {held.size} held")
            if not np.array_equal(self._slot_of[base + held], np.arange(held.size)):
                raise IntegrityError(f"lane {lane}: slot -> entry -> slot is not the identity")


def _newest_unused(step: int, age: Ints) -> Ints:
    """The highest stamp of a slot that has not been used for ``age`` steps: int32 [n, 1]."""
    found: Ints = (2 * (step - age) + 1).astype(np.int32)[:, None]
    return found
