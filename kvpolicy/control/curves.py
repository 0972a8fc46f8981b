"""Miss curves from live selections: how many rows a budget of any size would have fetched.

One request at a time is followed. Its least-recently-used stack says for each selected entry how
many rows a cache would have needed to hold it still, so one pass gives the misses of every budget.
Selections do not depend on the policy, so neither do the curves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvpolicy.control.observation import MissCurve, RequestView

Entries = NDArray[np.int64]

# Weight of what is known after each step that was noted: half of it is forgotten in 512 steps, however
# often somebody asks.
KEEP = 0.5 ** (1 / 512)
# A budget is known while one step that judged it is at most so old.
LEAST = 0.5
# Steps a request is followed before another has its turn. A history long enough to have seen
# 8 x top-k distinct entries takes some 100 steps; changing is cheap, since what a short history
# cannot know is left out rather than guessed.
STICK = 1024
# Steps behind every curve from which on nobody is followed while all caches are full.
LEARNED = 256
# Budgets up to this many top-k are spaced evenly (half a top-k), larger ones by a factor.
EVEN = 8
FACTOR = 2**0.25


class MissSampler:
    """Follows one request and keeps the miss curve of each store.

    topk: per store, entries per query row. entries: most entries a request can have, the end of the
    grids. A grid of budgets is multiples of half a top-k.
    """

    def __init__(self, topk: Sequence[int], entries: int) -> None:
        self._stores = [_StoreCurve(k, entries) for k in topk]
        self.request_id: int | None = None

    def choose(self, requests: Sequence[RequestView]) -> int | None:
        """The request to follow next: the same while it decodes and has not had its turn, else the
        next by id among those that decode, None if none does. None also where every cache is full and
        the curves are known well enough for the pressure that may come: following costs the host
        time in each step. Changes nothing."""
        learned = all(store.steps >= LEARNED for store in self._stores)
        if learned and all(r.budget == r.max_rows for r in requests):
            return None
        ready = [r.request_id for r in requests if r.decoding]
        current = self.request_id
        if current in ready and max(store.followed for store in self._stores) < STICK:
            return current
        later = [i for i in ready if current is not None and i > current]
        return min(later or ready, default=None)

    def begin(self, request_id: int) -> None:
        """Follow this request from now on, with no history; the curves stay."""
        self.request_id = request_id
        for store in self._stores:
            store.begin()

    def note(self, store: int, step: int, entries: Entries, committed: int | None = None) -> None:
        """What a decode step of the followed request selected of a store.

        entries: distinct committed ones, int64 [n], once per selector that reads the store.
        committed: entries durable before the step, if known: those that came since the last note
        entered the cache when they were committed and are no misses.
        """
        self._stores[store].note(step, entries, committed)

    def curves(self) -> tuple[MissCurve, ...]:
        """The curve of each store as known now; without points where nothing was seen yet."""
        return tuple(store.curve() for store in self._stores)


class _StoreCurve:
    """One store. Arrays over the grid: misses seen, steps they were seen in.

    A step can judge a budget only if the followed history holds at least as many distinct entries:
    then an entry never seen is certainly a miss. Larger budgets are left out of that step, so a new
    history biases nothing.
    """

    def __init__(self, topk: int, entries: int) -> None:
        self._grid = _grid(topk, entries)
        self._misses = np.zeros(len(self._grid))
        self._steps = np.zeros(len(self._grid))
        self.begin()

    @property
    def steps(self) -> float:
        """Steps behind the curve, older ones for less."""
        return float(self._steps[0])

    def begin(self) -> None:
        """Forget the history, keep the counts."""
        self._step = -1
        self._last: Entries = np.full(1024, -1, dtype=np.int64)  # entry -> its group
        self._alive: Entries = np.zeros(1024, dtype=np.int64)  # group -> entries used last in it
        self.followed = self._groups = 0
        self._committed: int | None = None
        self._known = np.zeros(len(self._grid), dtype=bool)

    def note(self, step: int, entries: Entries, committed: int | None) -> None:
        """One selection: count its misses at every budget, then move its entries to the top."""
        if committed is not None:
            if self._committed is not None and committed > self._committed:
                self._touch(np.arange(self._committed, committed))
            self._committed = committed
        first, self._step = step != self._step, step
        self._reserve(int(entries.max(initial=0)) + 1)
        groups = self._last[entries]
        seen = groups[groups >= 0]
        used = np.bincount(seen, minlength=self._groups)[: self._groups]
        # Newest group first: distinct entries a cache holds down to it, and hits it has by then.
        depth = np.concatenate(([0], np.cumsum(self._alive[: self._groups][::-1])))
        hits = np.concatenate(([0], np.cumsum(used[::-1])))
        if first:
            self.followed += 1
            self._known = self._grid <= depth[-1]
            self._misses *= KEEP
            self._steps = self._steps * KEEP + self._known
        # Entries of one step have no order among themselves: a budget that ends within a group
        # holds that part of it.
        found = np.interp(self._grid, depth, hits)
        self._misses += np.where(self._known, len(entries) - found, 0.0)
        self._touch(entries)

    def _touch(self, entries: Entries) -> None:
        """Make entries (distinct) the most recently used, a group of their own."""
        if not len(entries):
            return
        self._reserve(int(entries.max()) + 1)
        old = self._last[entries]
        np.subtract.at(self._alive, old[old >= 0], 1)
        if self._groups == len(self._alive):
            self._alive = np.concatenate((self._alive, np.zeros_like(self._alive)))
        self._alive[self._groups] = len(entries)
        self._last[entries] = self._groups
        self._groups += 1

    def _reserve(self, entries: int) -> None:
        if entries > len(self._last):
            more = np.full(max(entries, 2 * len(self._last)) - len(self._last), -1, dtype=np.int64)
            self._last = np.concatenate((self._last, more))

    def curve(self) -> MissCurve:
        """Budgets that are known, not rising; ``steps`` is what the first point has."""
        known = self._steps >= LEAST
        if not known.any():
            return MissCurve()
        misses = self._misses[known] / self._steps[known]
        # Points of different steps need not fall; a larger budget never misses more.
        misses = np.minimum.accumulate(misses)
        return MissCurve(
            tuple(self._grid[known].tolist()), tuple(misses.tolist()), float(self._steps[known][0])
        )


def _grid(topk: int, entries: int) -> Entries:
    """Budgets: multiples of half a top-k, even steps up to EVEN x top-k, then by FACTOR."""
    half = max(1, topk // 2)
    rows = [half * i for i in range(2 * EVEN + 1)]
    while rows[-1] < entries:
        rows.append(max(rows[-1] + half, int(rows[-1] * FACTOR) // half * half))
    return np.array(rows, dtype=np.int64)
