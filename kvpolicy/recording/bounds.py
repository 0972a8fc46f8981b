"""Lower bounds of misses, known in hindsight: what no policy can beat on these selections.

Belady's rule (1966): of what could stay, keep what is used again soonest. Rows may pass through without
staying, all rows of a step are wanted at once, and a budget may change at every step; keeping the
soonest stays optimal under all of that, since giving up a later use for a sooner one never costs a
fetch (exchange argument; the tests compare with brute force). Entries with the same next use are
interchangeable, so a cache is only a count per next use: no sets, no sorting.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvpolicy.recording.lanes import FULL, Lane
from kvpolicy.recording.replay import Outcome

__all__ = ["NextUses", "Pool", "belady"]

Numbers = NDArray[np.int64]


class NextUses:
    """When each entry of a lane is used next; steps count from 0 in the lane, ``never`` = their number.

    first: int64 [entries], the first use of every entry. selected: per step, of what it wanted.
    new: per step, of the entries that came with it.
    """

    def __init__(self, lane: Lane) -> None:
        self.never = len(lane.at)
        seen = np.full(lane.entries + 1, self.never, dtype=np.int64)
        self.selected: list[Numbers] = [seen] * self.never
        self.new: list[Numbers] = [seen] * self.never
        for i in range(self.never - 1, -1, -1):
            wanted = lane.wanted[i]
            self.selected[i] = seen[wanted]
            self.new[i] = seen[lane.committed[i] : lane.committed[i + 1]].copy()
            seen[wanted] = i
        self.first = seen


def belady(lane: Lane, budgets: Numbers) -> Outcome:
    """The fewest misses of one lane under budgets, int64 [n + 1], see ``lane.budgets``.

    As in the runtime, what a cache holds when the prompt ends is not fetched, nor is what it holds
    when a preempted request returns; here it is the best choice. A cache that grows to FULL copies all
    of the history, which counts as promoted.
    """
    uses = NextUses(lane)
    never, after = uses.never, uses.first.copy()
    kept = np.zeros(never + 1, dtype=np.int64)  # records held, by step of their next use
    missed, promoted = np.zeros(never, dtype=np.int64), 0

    def fill(committed: int, room: int) -> None:
        """Anything committed may be held."""
        kept[:] = np.bincount(after[:committed], minlength=never + 1)
        keep_soonest(kept, room)

    full = True  # the prompt's rows are all there when it ends
    for i, budget in enumerate(budgets.tolist()):
        step = i - 1  # the first budget is that of the end of the prompt
        committed, back = int(lane.committed[max(step, 0)]), bool(i and lane.back[step])
        if budget >= FULL:
            promoted += committed * (back or not full)
            full = True
        elif full or back:
            fill(committed, budget)
            full = False
        else:
            keep_soonest(kept, budget)
        if i == 0:
            continue
        after[lane.wanted[step]] = uses.selected[step]
        if not full:
            missed[step] = lane.wanted[step].size - kept[step]
            kept[step] = 0
            for found in (uses.selected[step], uses.new[step]):
                kept += np.bincount(found, minlength=never + 1)
            keep_soonest(kept, budget)
    return Outcome(missed, promoted)


def keep_soonest(kept: Numbers, room: int) -> None:
    """Cut the counts by next use to ``room`` in all, from the far end; the last count, of what is never
    used again, goes whatever the room."""
    kept[-1] = 0
    excess = int(kept.sum()) - room
    if excess > 0:
        far = np.cumsum(kept[::-1])
        place = int(np.searchsorted(far, excess))
        at = len(kept) - 1 - place
        kept[at] = far[place] - excess
        kept[at + 1 :] = 0


class Pool:
    """All lanes in one memory that is split anew at every step, in the best way: no controller that
    chooses budgets and evictions, even one that knows the load to come, fetches less.

    Memory is counted in rows, and a record of n rows may be held in part, so a record costs what it
    saves whatever its store, and keeping the soonest is optimal for the pool too. Every row that comes
    from the host after a prompt has ended counts, promoted ones as well.

    lanes: of the whole recording, added once each. steps: of the recording.
    """

    def __init__(self, lanes: Iterable[Lane], steps: int) -> None:
        lanes = list(lanes)
        span = max((int(lane.at[-1]) - lane.seeded_at for lane in lanes), default=0)
        self.needed = np.zeros(steps, dtype=np.int64)
        # Row t, column d: rows that may be kept after step t and are used again at t + 1 + d.
        self._uses = np.zeros((steps, max(span, 1)), dtype=np.int32)
        for lane in lanes:
            self._add(lane)

    def _add(self, lane: Lane) -> None:
        uses = NextUses(lane)
        table, at = self._uses, np.append(lane.at, -1)

        def note(step: int, found: Numbers) -> None:
            found = found[found < uses.never]
            ahead = np.bincount(at[found] - step - 1, minlength=1) * lane.weight
            table[step, : ahead.size] += ahead.astype(np.int32)

        note(lane.seeded_at, uses.first[: lane.committed[0]])
        for i, step in enumerate(lane.at.tolist()):
            self.needed[step] += lane.wanted[i].size * lane.weight
            note(step, uses.selected[i])
            note(step, uses.new[i])

    def misses(self, room: Numbers) -> Numbers:
        """The fewest rows fetched at each step, int64 [steps]. room: int64 [steps], rows that fit."""
        steps, span = self._uses.shape
        kept = np.zeros(steps + span + 1, dtype=np.int64)
        missed = np.zeros(steps, dtype=np.int64)
        for step in range(steps):
            missed[step] = self.needed[step] - kept[step]
            ahead = kept[
                step + 1 : step + 2 + span
            ]  # one more than any use: the cut clears its last
            ahead[:span] += self._uses[step]
            keep_soonest(ahead, int(min(room[step], room[min(step + 1, steps - 1)])))
        return missed
