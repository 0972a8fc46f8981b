"""Misses that a policy would have had on recorded selections: the runtime's bookkeeping, replayed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpolicy.recording.caches import Rule, SlotCache, keep_order
from kvpolicy.recording.lanes import FULL, Entries, Lane

__all__ = ["Outcome", "replay"]

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was fetched for one lane, in records. missed: int64 [n], per step. promoted: copied because
    the cache came to hold every entry (at its growth, or at the return of a preempted request)."""

    missed: Numbers
    promoted: int = 0


@dataclass(slots=True)
class _State:
    """A lane's cache: mapped, or full (then the mapped one has no slots)."""

    cache: SlotCache
    full: bool = False
    promoted: int = 0

    def read(self, budgets: Numbers, last: int) -> None:
        """The budgets of an empty cache while its prompt is read: they leave the hand somewhere."""
        for budget in (*budgets.tolist(), last):
            self.full = budget >= FULL
            if self.full:
                self.cache.clear()
            else:
                self.cache.resize(budget)

    def start(self, budget: int, entries: Entries, seat: int) -> None:
        """A new cache of this budget that holds ``entries``, of a request that comes back."""
        self.cache = SlotCache(self.cache.rule, self.cache.entries, seat)
        self.full = budget >= FULL
        if not self.full:
            self.cache.resize(budget)
            self.cache.seed(entries, step=0)

    def resize(self, budget: int, committed: int, recent: Entries) -> None:
        """Another budget, with what the runtime does when a cache becomes full or ceases to be."""
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


def replay(
    lane: Lane,
    budgets: Numbers,
    rule: Rule,
    steps: Numbers,
    seed: str = "selection",
    admit_newest: bool = True,
) -> Outcome:
    """Misses of one lane under a rule and budgets (int64 [n + 1], as ``lane.budgets``).

    steps: engine step of every step of the recording. seed, admit_newest: see ``CacheRule``. Equal to what
    the engine counts, as long as a budget is set once between two steps.
    """
    state = _State(SlotCache(rule, lane.entries + 1, int(lane.seats[0])))
    state.read(lane.prior if budgets is lane.budgets else budgets[:1], int(budgets[0]))
    if not state.full:
        state.cache.seed(_seed(lane, int(budgets[0]), seed), int(steps[lane.seeded_at]))
    missed = np.zeros(len(lane.at), dtype=np.int64)
    recent = lane.seed
    for i, at in enumerate(lane.at.tolist()):
        budget, committed, step = int(budgets[i + 1]), int(lane.committed[i]), int(steps[at])
        if lane.back[i]:  # it was preempted, and comes back with its last selection
            held = recent[recent < committed]
            state.start(budget, held[max(held.size - budget, 0) :], int(lane.seats[i + 1]))
            state.promoted += committed * state.full
        else:
            state.resize(budget, committed, recent)
        if not state.full:
            for call in lane.calls[i]:
                missed[i] += state.cache.resolve(call, step).size
            new = np.arange(committed, lane.committed[i + 1])
            state.cache.offer(new, step, admit_newest)
        recent = lane.recent[i]
    return Outcome(missed, state.promoted)


def _seed(lane: Lane, budget: int, seed: str) -> Entries:
    """What a mapped cache holds when the prompt has ended."""
    committed = int(lane.committed[0])
    rows = min(budget, committed)
    if seed == "first":
        return np.arange(rows)
    return keep_order(lane.seed[lane.seed < committed], committed, rows)
