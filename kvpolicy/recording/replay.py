"""Misses that a policy would have had on recorded selections: the runtime's bookkeeping, replayed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpolicy.recording.caches import Rule
from kvpolicy.recording.lane_cache import LaneCache
from kvpolicy.recording.lanes import FULL, Lane

__all__ = ["Outcome", "replay"]

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was fetched for one lane, in records. missed: int64 [n], per step. promoted: copied because
    the cache came to hold every entry (at its growth, or at the return of a preempted request)."""

    missed: Numbers
    promoted: int = 0


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
    state = LaneCache(rule, lane.entries + 1, int(lane.seats[0]))
    read(state, lane.prior if budgets is lane.budgets else budgets[:1], int(budgets[0]))
    state.seed(lane.seed, int(lane.committed[0]), int(steps[lane.seeded_at]), seed)
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
        after = int(lane.committed[i + 1])
        missed[i] = state.step(lane.calls[i], committed, after, step, admit_newest)
        recent = lane.recent[i]
    return Outcome(missed, state.promoted)


def read(state: LaneCache, budgets: Numbers, last: int) -> None:
    """The budgets of an empty cache while its prompt is read: they leave the hand somewhere."""
    for budget in (*budgets.tolist(), last):
        state.full = budget >= FULL
        if state.full:
            state.cache.clear()
        else:
            state.cache.resize(budget)
