"""Acceptance and schedule run inside a captured step: nothing visits the host, no shape depends on a
number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from watched import Watched

from kvpolicy.kernels import noise
from kvpolicy.kernels.sampling import choose
from kvpolicy.speculative.acceptance import Rule, accept
from kvpolicy.speculative.costs import StepCosts
from kvpolicy.speculative.drawing import RowSampling, draw
from kvpolicy.speculative.proposal import Dense, Proposal, Sparse
from kvpolicy.speculative.scheduler import VerificationScheduler

R, K, V = 6, 3, 40


def plain(logits: Tensor, how: RowSampling, positions: Tensor) -> Tensor:
    drawn = noise.gumbel(how.seeds, positions, positions * 0, logits.shape[-1])
    return choose(logits, drawn, how.temperature, how.top_k, how.top_p)


HOW = RowSampling(
    torch.arange(R),
    torch.linspace(0, 1, R, dtype=torch.float64),
    torch.arange(R) * 3,
    torch.linspace(0.5, 1, R, dtype=torch.float64),
)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("rule", list(Rule))
def test_a_cycle_waits_for_nothing(rule: Rule, sparse: bool) -> None:
    source = torch.Generator().manual_seed(0)
    scores = torch.randn(R, K, V, generator=source)
    logits = torch.randn(R, K + 1, V, generator=source)
    seats, anchors = torch.tensor([3, 0, -1, 1, 2, 4]), torch.arange(R) + 10
    costs = StepCosts.empty(R, K, torch.device("cpu"))
    own = VerificationScheduler(R, K, costs, torch.device("cpu"))
    with Watched():
        ids = scores.topk(5, dim=-1).indices if sparse else None
        tokens, laws = [], []
        for k in range(K):
            only = None if ids is None else ids[:, k]
            row = scores[:, k] if only is None else scores[:, k].gather(1, only)
            token, law = draw(row, only, HOW, anchors, k + 1, rule is Rule.COUPLED)
            tokens.append(token)
            laws.append(law)
        drawn = torch.stack(laws, dim=1)
        law = Dense(drawn) if ids is None else Sparse(ids, drawn)
        proposal = Proposal(torch.stack(tokens, dim=1), law, torch.rand(R, K, generator=source))
        lengths = own.lengths(seats, seats * 0, torch.full((R,), K), proposal.confidence)
        kept, after = accept(logits, proposal, lengths, HOW, anchors, rule, plain)
        own.note(seats, lengths, kept, lengths)
    assert kept.shape == after.shape == (R,)
    assert bool((kept <= lengths).all()) and lengths[2] == 0


def test_the_watch_sees() -> None:
    table, at = torch.arange(5), torch.tensor(3)
    for read in (lambda: table[at], lambda: int(at), lambda: table[table > 2]):
        with pytest.raises(AssertionError), Watched():
            read()
