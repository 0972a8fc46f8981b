"""The schedule of verification as an engine calls it: once before a step verifies, once after it accepted."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.speculative.costs import StepCosts
from kvpolicy.speculative.estimates import Estimates
from kvpolicy.speculative.schedule import (
    Bounds,
    best_budget,
    rows_to_time,
    survivals,
    verify_lengths,
)


class VerificationScheduler:
    """Chooses how many proposed tokens of each request are verified. All on the device, in fixed shapes.

    budget: int64 [], tokens of the last step. rate: float64 [], tokens per picosecond that the last
    budget promised. Neither reads the tokens of the step that it serves.
    """

    def __init__(self, seats: int, width: int, costs: StepCosts, device: torch.device) -> None:
        self.costs = costs
        self.estimates = Estimates(seats, width, device)
        self.budget = torch.zeros((), dtype=torch.int64, device=device)
        self.rate = torch.zeros((), dtype=torch.float64, device=device)

    def lengths(
        self, seats: Tensor, generations: Tensor, caps: Tensor, confidence: Tensor | None
    ) -> Tensor:
        """Verified tokens of each row of the batch: int64 [r], 0 for nobody.

        seats: int64 [r], -1 for nobody. generations: see :meth:`Estimates.begin`. caps: int64 [r], most
        tokens to verify. confidence: of this step's proposal, float32 [r, K]; None where a drafter
        has none: then what was kept at each position before stands for it.
        """
        known = self.estimates
        known.begin(seats, generations)
        first = rows_to_time(known.misses[seats], self.costs)
        fetch = rows_to_time(known.misses[seats] * known.share, self.costs)
        bounds = Bounds(seats >= 0, caps, first, fetch)
        if confidence is None:
            older = now = survivals(known.acceptance[seats])
        else:
            older, now = known.survival[seats], survivals(confidence)
        budget, rate = best_budget(older, bounds, self.costs, self.rate)
        found = verify_lengths(now, budget, bounds, rate)
        self.budget.copy_(budget)
        self.rate.copy_(rate)
        known.survival[seats] = now
        return found

    def note(self, seats: Tensor, lengths: Tensor, accepted: Tensor, misses: Tensor) -> None:
        """What the step brought, see :meth:`Estimates.note`."""
        self.estimates.note(seats, lengths, accepted, misses)
