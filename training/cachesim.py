"""Miss counts of a row cache under classic policies on one request's selection trace.

A step selects k rows. They are pinned for the step; those absent are misses. The new token's row
enters without a miss, unless every slot is pinned (kvpolicy appends it after the step, when the
selected rows may go too). Priorities below: the lowest is evicted first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
Trace = NDArray[np.integer]

NEVER = 1 << 30
# As in kvpolicy's CLOCK (kernels/eviction.py); check.py compares the two.
CLOCK_SPARE_STEPS, CLOCK_MOST_STEPS, CLOCK_EARLY, CLOCK_LESS = 5, 1023, 3, 2


def next_uses(trace: Trace, first: int) -> tuple[Rows, Rows]:
    """Step of the next use of every selected row [S, k] and of every new row [S]."""
    steps = len(trace)
    seen = np.full(first + steps, NEVER, dtype=np.int64)
    selected, new = np.full(trace.shape, NEVER, dtype=np.int64), np.empty(steps, dtype=np.int64)
    for step in range(steps - 1, -1, -1):
        selected[step] = seen[trace[step]]
        new[step] = seen[first + step]
        seen[trace[step]] = step
    return selected, new


class Cache:
    """Residency of at most `capacity` rows, with one priority per row."""

    def __init__(self, rows: int, capacity: int) -> None:
        """An empty cache for row numbers below `rows`."""
        self.capacity = capacity
        self.resident = np.zeros(rows, dtype=bool)
        self.priority = np.zeros(rows, dtype=np.int64)
        self.used = 0

    def make_room(self, wanted: int, pinned: Rows) -> None:
        """Evict unpinned rows, lowest priority then lowest number first, until `wanted` fit."""
        excess = self.used + wanted - self.capacity
        if excess <= 0:
            return
        free = self.resident.copy()
        free[pinned] = False
        candidates = np.flatnonzero(free)
        order = np.argsort(self.priority[candidates], kind="stable")[:excess]
        self.resident[candidates[order]] = False
        self.used -= len(order)

    def admit(self, rows: Rows) -> None:
        """Make rows resident that are not."""
        self.resident[rows] = True
        self.used += len(rows)


def simulate(trace: Trace, first: int, capacity: int, policy: str, counted: int) -> int:
    """Misses of the steps from `counted` on; trace [S, k], step s decodes position first + s."""
    if policy == "clock":
        return simulate_clock(trace, first, capacity, counted)
    cache, misses = Cache(first + len(trace), capacity), 0
    selected_next, new_next = next_uses(trace, first)
    rng = np.random.default_rng(0)
    for step, row in enumerate(trace):
        rows, new = row.astype(np.int64), first + step
        hit = cache.resident[rows]
        absent = rows[~hit]
        fetched = absent[absent != new]
        misses += len(fetched) * (step >= counted)
        if policy == "random":
            cache.priority[:] = rng.integers(0, NEVER, size=len(cache.priority))
        cache.make_room(len(absent), rows)
        cache.admit(absent)
        set_priorities(cache, policy, step, rows, hit, selected_next[step])
        if not cache.resident[new]:
            offer_new(cache, policy, step, new, rows, int(new_next[step]))
    return misses


def set_priorities(
    cache: Cache, policy: str, step: int, rows: Rows, hit: NDArray[np.bool_], following: Rows
) -> None:
    """Priorities of the selected rows: stale < loaded < hits for LRU."""
    if policy == "lru":
        cache.priority[rows] = 2 * step + 1 + hit
    elif policy == "fifo":
        cache.priority[rows[~hit]] = step + 1
    elif policy == "belady":
        cache.priority[rows] = -following


def offer_new(cache: Cache, policy: str, step: int, new: int, rows: Rows, following: int) -> None:
    """Admit the new token's unselected row if a slot is not pinned; Belady may decline it."""
    if policy == "belady":
        cache.priority[new] = -following
        if cache.used >= cache.capacity:
            free = cache.resident.copy()
            free[rows] = False
            if not free.any() or cache.priority[free].min() >= -following:
                return
    elif policy != "random":
        cache.priority[new] = 2 * step + 1 if policy == "lru" else step + 1
    cache.make_room(1, rows)
    if cache.used < cache.capacity:
        cache.admit(np.array([new]))


@dataclass
class Sweep:
    """Where a CLOCK's hand stands, and for how many steps it spares a slot."""

    hand: int = 0
    age: int = CLOCK_SPARE_STEPS

    def victims(
        self, used: Rows, candidate: NDArray[np.bool_], count: int, step: int, tune: bool
    ) -> Rows:
        """Slots [<= count] in the order of a sweep; used: last-use steps.

        Lap 1 spares slots used within ``age`` steps, lap 2 within half of it, lap 3 takes any candidate.
        tune: a second lap lowers the age, an early end raises it.
        """
        size = len(used)
        ahead = (np.arange(size) - self.hand) % size
        unused = step - used
        laps = (unused < self.age).astype(int) + (unused < (self.age + 1) // 2)
        passed = ahead + laps * size
        slots = np.flatnonzero(candidate)
        taken = slots[np.argsort(passed[slots])][:count]
        if tune and (len(taken) < count or passed[taken[-1]] >= size):
            self.age = max(1, self.age - CLOCK_LESS)
        elif tune and (passed[taken[-1]] + 1) * CLOCK_EARLY < size:
            self.age = min(CLOCK_MOST_STEPS, self.age + 1)
        if len(taken):
            self.hand = int(taken[-1] + 1) % size
        return taken


def simulate_clock(trace: Trace, first: int, capacity: int, counted: int) -> int:
    """The same for CLOCK, which works on slots: free ones are filled first, lowest first."""
    slot_row = np.full(capacity, -1, dtype=np.int64)
    slot_of = np.full(first + len(trace), -1, dtype=np.int64)
    used, sweep, misses = np.zeros(capacity, dtype=np.int64), Sweep(), 0

    def place(rows: Rows, step: int, pinned: Rows, tune: bool) -> None:
        room = np.flatnonzero(slot_row < 0)[: len(rows)]
        if len(room) < len(rows):
            candidate = slot_row >= 0
            candidate[pinned] = False
            victims = sweep.victims(used, candidate, len(rows) - len(room), step, tune)
            slot_of[slot_row[victims]] = -1
            room = np.concatenate([room, victims])
        placed = rows[: len(room)]
        slot_row[room], slot_of[placed], used[room] = placed, room, step

    for step, row in enumerate(trace):
        rows, new = row.astype(np.int64), first + step
        slots = slot_of[rows]
        absent, hits = rows[slots < 0], slots[slots >= 0]
        misses += int((absent != new).sum()) * (step >= counted)
        used[hits] = step
        place(absent, step, hits, tune=True)
        if slot_of[new] < 0:  # offered, not missed: the age learns nothing
            place(np.array([new]), step, slot_of[rows], tune=False)
    return misses


POLICIES = ("lru", "clock", "fifo", "random", "belady")


def miss_table(
    trace: Trace, first: int, capacities: list[int], counted: int
) -> dict[str, list[float]]:
    """Miss rate per selected row for every policy and capacity."""
    total = trace.shape[1] * (len(trace) - counted)
    return {
        policy: [simulate(trace, first, c, policy, counted) / total for c in capacities]
        for policy in POLICIES
    }
