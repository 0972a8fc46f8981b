"""How many proposed tokens of each request a step verifies, from what steps of this engine have cost.

The choice is that of :mod:`kvpolicy.speculative.schedule`; here are its prices: seconds of drafting and
of steps by their rows, measured as they run, and the time to fetch a record, from the link's calibration.
Where steps are the clock a step costs one whatever it computes, so that a run repeats exactly.
"""

from __future__ import annotations

from torch import Tensor

from kvpolicy.memory.hierarchy import Hierarchy
from kvpolicy.speculative.costs import StepCosts
from kvpolicy.speculative.scheduler import VerificationScheduler

# Weight of a new time in a running mean, and how many steps pass between two looks at the means.
NEW, EVERY = 0.1, 16
# One step in so many verifies another number of tokens than would be best, so that its cost is known.
EXPLORE = 16
_SECOND = 10**12
_BYTES = 5  # column of RetrievalCounters


class VerifySchedule:
    """Chooses lengths and learns from steps. seats, width: requests at a time, and K."""

    def __init__(self, memory: Hierarchy, width: int, wall: bool) -> None:
        seats, device = memory.reserve.seats, memory.arena.device
        self._counts, self._width, self._wall = memory.counters.retrieval.by_seat, width, wall
        self._record = sum(s.record.bytes for s in memory.layout.stores) / len(memory.layout.stores)
        self.costs = StepCosts.empty(seats, width, device)
        # All alike: until something else is known, everything is worth verifying.
        self.costs.verify.fill_(_SECOND // 1000)
        if wall and memory.link is not None:
            size = int(self._record)
            self.costs.set_record(memory.link.seconds(1024, size, size) / 1024)
        self._scheduler = VerificationScheduler(seats, width, self.costs, device)
        self._draft: dict[int, float] = {}
        self._verify: dict[int, float] = {}
        self._steps = 0
        self._fetched: Tensor | None = None

    def lengths(
        self, seats: Tensor, numbers: Tensor, limits: Tensor, confidence: Tensor | None
    ) -> Tensor:
        """Verified tokens of each request: int64 [r]. seats, numbers: of the requests, int64 [r]; limits:
        most tokens of each, int64 [r]; confidence: of their proposals, or None."""
        self._fetched = self._counts[seats, _BYTES]
        return self._scheduler.lengths(seats, numbers, limits, confidence)

    def explored(self, cap: int) -> int:
        """Most tokens to verify in the next step: the cap, in one of EXPLORE steps another number."""
        if self._wall and self._steps % EXPLORE == EXPLORE - 1:
            return min(cap, self._steps // EXPLORE % (self._width + 1))
        return cap

    def note(self, seats: Tensor, lengths: Tensor, accepted: Tensor) -> None:
        """What the step brought: int64 [r] each."""
        assert self._fetched is not None
        misses = (self._counts[seats, _BYTES] - self._fetched).double() / self._record
        self._scheduler.note(seats, lengths, accepted, misses.long())

    def timed(self, requests: int, rows: int, draft: float, verify: float) -> None:
        """Seconds that a step has taken: to draft for ``requests`` (0: nobody), and for ``rows`` rows."""
        self._steps += 1
        if not self._wall:
            return
        for means, size, seconds in ((self._draft, requests, draft), (self._verify, rows, verify)):
            if size:
                old = means.get(size, seconds)
                means[size] = old + NEW * (max(seconds, 1e-9) - old)
        if self._steps % EVERY == 0:
            for means, put in (
                (self._draft, self.costs.set_draft),
                (self._verify, self.costs.set_verify),
            ):
                if means:
                    put(means)
