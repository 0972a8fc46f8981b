"""Miss counts of a row cache under classic policies on one request's selection trace.

A step selects k rows. They are pinned for the step; those absent are misses. The new token's row
enters without a miss, unless every slot is pinned. Priorities below: the lowest is evicted first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
Trace = NDArray[np.integer]

NEVER = 1 << 30


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


def simulate_clock(trace: Trace, first: int, capacity: int, counted: int) -> int:
    """The same for CLOCK: one reference bit a slot, a hand that clears it in passing."""
    slot_row = np.full(capacity, -1, dtype=np.int64)
    slot_of = np.full(first + len(trace), -1, dtype=np.int64)
    reference, hand, misses = np.zeros(capacity, dtype=bool), 0, 0

    def place(rows: Rows, pinned: Rows) -> None:
        nonlocal hand
        held = np.zeros(capacity, dtype=bool)
        own = slot_of[pinned]
        held[own[own >= 0]] = True
        order = (hand + np.arange(capacity)) % capacity
        open_ = order[~held[order]]
        victims = np.concatenate([open_[~reference[open_]], open_[reference[open_]]])[: len(rows)]
        if len(victims) == 0:
            return
        last = int(np.flatnonzero(order == victims[-1])[0])
        second_lap = bool(reference[victims[-1]])
        reference[order if second_lap else order[: last + 1]] = False
        hand = (int(victims[-1]) + 1) % capacity
        gone = slot_row[victims]
        slot_of[gone[gone >= 0]] = -1
        slot_row[victims], slot_of[rows[: len(victims)]] = rows[: len(victims)], victims

    for step, row in enumerate(trace):
        rows, new = row.astype(np.int64), first + step
        absent = rows[slot_of[rows] < 0]
        misses += int((absent != new).sum()) * (step >= counted)
        place(absent, rows)
        reference[slot_of[rows]] = True
        if slot_of[new] < 0:
            place(np.array([new]), rows)
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
