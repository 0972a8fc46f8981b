"""How many proposed tokens of each request are verified: confidence-scheduled verification (DSpark,
arXiv 2607.05147, section 3), with the cost of fetching in it.

r requests, K proposed tokens each. A token's survival is the chance that it and all before it are kept.
A step that verifies a set of tokens commits tau = requests + sum of survivals, bonus tokens included,
in T seconds; what it is after is tokens per second, tau / T. Verifying one more token costs the target's
time for a row, and the time to fetch the records that this row misses: at a cold cache or a slow link the
second is the larger.

Two steps, because of what each may look at:

* the **budget**, a number of tokens, is the best over all numbers. It takes the survivals of *older*
  steps, so the tokens of this step have no part in it;
* the **filling** takes the tokens of this step with the highest value. Whether token k is among them
  depends on tokens 0..k-1: its value looks at confidences 0..k, which are functions of those, and the
  values of later tokens are never higher, so they never take its place.

A choice that looked at token k itself would change the law of what is said. All tensors have fixed
shapes and nothing visits the host. Sums are of whole numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicy.kernels.sampling import first_of_highest
from kvpolicy.speculative.costs import PICOSECONDS, StepCosts

# Survivals in whole units; less than one unit is never worth a row.
UNIT = 2**20


def survivals(confidence: Tensor) -> Tensor:
    """Chance that token k and all before it are kept, in units of 2^-20: int64 [r, K], never rising in
    k. confidence: float [r, K]; not a number counts as 0."""
    sure = confidence.double().nan_to_num(0.0, 0.0, 0.0).clamp(0.0, 1.0)
    found, running = [], torch.ones_like(sure[:, :1])
    for k in range(sure.shape[1]):
        running = running * sure[:, k : k + 1]
        found.append(running)
    return (torch.cat([sure[:, :0], *found], dim=1) * UNIT).long()


@dataclass(frozen=True, slots=True)
class Bounds:
    """What limits a step, known before it drafts. live: bool [r], False where a row of the batch is
    nobody's. caps: int64 [r], most tokens to verify (a controller's cap, what the request may still
    say). first, fetch: int64 [r], picoseconds to fetch what the request's first row misses, which is
    there anyway, and what each further verify row adds."""

    live: Tensor
    caps: Tensor
    first: Tensor
    fetch: Tensor


def _eligible(survival: Tensor, bounds: Bounds) -> Tensor:
    index = torch.arange(survival.shape[1], device=survival.device)
    within = (index < bounds.caps[:, None]) & bounds.live[:, None]
    return within & (survival > 0)


def _values(survival: Tensor, bounds: Bounds, rate: Tensor) -> Tensor:
    """Survival less what a token's fetches cost at ``rate``: float64 [r, K], never rising in k."""
    return survival.double() / UNIT - rate * bounds.fetch.double()[:, None]


def _order(value: Tensor, eligible: Tensor) -> Tensor:
    """All tokens from the most valuable down: int64 [r K], indices k r + i. Ties: the earlier token, then
    the earlier request."""
    value = torch.where(eligible, value, -torch.inf)
    return torch.sort(value.t().reshape(-1), descending=True, stable=True).indices


def _entries(table: Tensor, at: Tensor) -> Tensor:
    """Entries of a table, the last one beyond its end. at: int64 [n]; a number as an index would be
    read by the host."""
    return table.gather(0, at.clamp_max(table.numel() - 1))


def best_budget(
    survival: Tensor, bounds: Bounds, costs: StepCosts, rate: Tensor
) -> tuple[Tensor, Tensor]:
    """The number of tokens that makes tau / T largest, the lowest of equals: (int64 [], and that rate,
    float64 [], tokens per picosecond). survival: int64 [r, K], of older steps. rate: of the step before.

    An argmax over all numbers, not a walk that stops where it gets worse: T is a staircase.
    """
    requests = bounds.live.sum()
    eligible = _eligible(survival, bounds)
    order = _order(_values(survival, bounds, rate), eligible)
    eligible = eligible.t().reshape(-1)[order]
    zero = torch.zeros(1, dtype=torch.int64, device=order.device)
    gain = torch.where(eligible, survival.t().reshape(-1)[order], 0)
    fetch = torch.where(eligible, bounds.fetch.repeat(survival.shape[1])[order], 0)
    said = requests * UNIT + torch.cat([zero, gain.cumsum(0)])
    rows = requests + torch.cat([zero, eligible.long().cumsum(0)])
    spent = (
        _entries(costs.draft, requests[None])
        + _entries(costs.verify, rows)
        + torch.where(bounds.live, bounds.first, 0).sum()
        + torch.cat([zero, fetch.cumsum(0)])
    )
    rates = said.double() / UNIT / spent.clamp_min(1).double()
    best = first_of_highest(rates[None])
    return best[0], rates.gather(0, best)[0]


def verify_lengths(survival: Tensor, budget: Tensor, bounds: Bounds, rate: Tensor) -> Tensor:
    """Verified tokens of each request: int64 [r], the ``budget`` tokens of highest value, without those
    whose fetches alone cost more than they are worth. survival: int64 [r, K], of this step. budget,
    rate: of :func:`best_budget`, from older steps."""
    value = _values(survival, bounds, rate)
    eligible = _eligible(survival, bounds) & (value > 0.0)
    order = _order(value, eligible)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    taken = (place < budget).view(survival.shape[1], -1).t() & eligible
    return taken.sum(dim=1)


def sure_tokens(confidence: Tensor, threshold: float) -> Tensor:
    """The fixed rule beside the schedule: tokens before the first whose confidence is below
    ``threshold``: int64 [r]."""
    return (confidence >= threshold).long().cumprod(dim=1).sum(dim=1)


def rows_to_time(records: Tensor, costs: StepCosts) -> Tensor:
    """Picoseconds to fetch that many records: int64 [r], at most a second each. records: float64 [r]."""
    return (records * costs.record).clamp(0.0, PICOSECONDS).long()
