"""How many proposed tokens of each request a step verifies, from what steps of this engine have cost.

First a width for all requests (:mod:`kvpolicy.engine.widths`), then within it tokens one by one, as
:mod:`kvpolicy.speculative.schedule` chooses; here are its prices: seconds of steps, measured as they run, and
the time to fetch a record, from the link's calibration.
Where steps are the clock a step costs one whatever it computes, so that a run repeats exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.engine.widths import Widths
from kvpolicy.memory.counters import NAMES
from kvpolicy.memory.hierarchy import Hierarchy
from kvpolicy.speculative.costs import StepCosts
from kvpolicy.speculative.scheduler import VerificationScheduler

# Weight of a new time in a running mean, and how many steps pass between two looks at the means.
NEW, EVERY = 0.1, 16
_SECOND = 10**12
_BYTES = NAMES.index("host_to_device_bytes")


class VerifySchedule:
    """Chooses lengths and learns from steps. seats, width: requests at a time, and K."""

    def __init__(self, memory: Hierarchy, width: int, wall: bool) -> None:
        seats, device = memory.reserve.seats, memory.arena.device
        self._width = width
        self._counts, self._wall = memory.counters.retrieval.by_seat, wall
        self._record = sum(s.record.bytes for s in memory.layout.stores) / len(memory.layout.stores)
        self.costs = StepCosts.empty(seats, width, device)
        # All alike: until something else is known, everything is worth verifying.
        self.costs.verify.fill_(_SECOND // 1000)
        if wall and memory.link is not None:
            size = int(self._record)
            self.costs.set_record(memory.link.seconds(1024, size, size) / 1024)
        self._scheduler = VerificationScheduler(seats, width, self.costs, device)
        self._widths = Widths(width)
        self._verify: dict[int, float] = {}
        self._steps = 0
        self._fetched: Tensor | None = None

    def lengths(
        self, seats: Tensor, numbers: Tensor, limits: Tensor, confidence: Tensor | None
    ) -> Tensor:
        """Verified tokens of each request: int64 [r]. seats, numbers: of the requests, int64 [r]; limits:
        most tokens of each, int64 [r]; confidence: of their proposals, or None."""
        self._fetched = self._counts[seats, _BYTES]
        if confidence is not None:  # of a narrower step: the further tokens are not proposed
            missing = self._width - confidence.shape[1]
            confidence = torch.nn.functional.pad(confidence, (0, missing))
        return self._scheduler.lengths(seats, numbers, limits, confidence)

    def cap(self, requests: int, most: int) -> int:
        """Most tokens to propose for each of so many requests in the next step, up to ``most``."""
        return self._widths.choose(requests, most) if self._wall else most

    def note(self, seats: Tensor, lengths: Tensor, accepted: Tensor) -> None:
        """What the step brought: int64 [r] each."""
        assert self._fetched is not None
        misses = (self._counts[seats, _BYTES] - self._fetched).double() / self._record
        self._scheduler.note(seats, lengths, accepted, misses.long())

    def timed(
        self, requests: int, width: int, rows: int, tokens: int, seconds: float, ragged: bool
    ) -> None:
        """A step of so many requests, proposed tokens each at most, rows in all and committed tokens has
        taken so many seconds, drafting included. ragged: it computed the verified rows
        only: its time follows them."""
        self._steps += 1
        if not self._wall:
            return
        self._widths.note(requests, width, tokens, seconds)
        size = rows if ragged else 0
        old = self._verify.get(size, seconds)
        self._verify[size] = old + NEW * (max(seconds, 1e-9) - old)
        if self._steps % EVERY:
            return
        if ragged:
            self.costs.set_verify({n: t for n, t in self._verify.items() if n})
        else:
            self.costs.verify.fill_(int(self._verify[0] * _SECOND))
