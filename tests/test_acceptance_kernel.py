"""Fused acceptance against its reference. One file for both forms: interpreted, compiled."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kvpolicy.kernels import acceptance as rules
from kvpolicy.kernels.sampling import normalised, probabilities
from kvpolicy.kernels.triton.acceptance import accept_and_draw
from kvpolicy.sampling import Role
from kvpolicy.speculative import streams
from kvpolicy.speculative.acceptance import Rule, accept, choose_on_device, choose_on_host
from kvpolicy.speculative.drawing import RowSampling
from kvpolicy.speculative.proposal import Dense, Proposal

R, K = 12, 3
ROLES = (int(Role.ACCEPT), int(Role.RESIDUAL))


@pytest.mark.parametrize("vocabulary", [263, pytest.param(1500, marks=pytest.mark.full)])
@pytest.mark.parametrize("law", ["dense", "sparse", "onehot"])
@pytest.mark.parametrize("block", [False, True], ids=["standard", "block"])
def test_equals_the_reference(block: bool, law: str, vocabulary: int, device: torch.device) -> None:
    """Requests of all lengths, greedy and sampled, near the law of the draft and far from it."""
    source = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(R * K, vocabulary, generator=source) * 5
    heat = torch.where(torch.arange(R * K) // K % 6 == 0, 0.0, 0.9).double()
    top_k = torch.arange(R * K) // K % 3 * 20
    top_p = torch.full((R * K,), 0.95, dtype=torch.float64)
    target = probabilities(logits, heat, top_k, top_p).view(R, K, vocabulary)
    apart = (torch.arange(R * K) // K % 4)[:, None] * 0.4
    near = logits + torch.randn(R * K, vocabulary, generator=source) * apart
    drawn = normalised((near - near.max(-1, keepdim=True).values).double().exp())
    ids, proposed = None, drawn.view(R, K, vocabulary)
    tokens = torch.multinomial(drawn, 1, generator=source).view(R, K)
    if law == "sparse":
        ids = near.topk(min(6, vocabulary), dim=-1).indices.view(R, K, -1)
        proposed = (
            normalised(drawn.view(R, K, -1).gather(-1, ids).view(R * K, -1)).view_as(ids).float()
        )
        pick = torch.multinomial(proposed.reshape(R * K, -1), 1, generator=source).view(R, K, 1)
        tokens = ids.gather(-1, pick)[..., 0]
    elif law == "onehot":
        tokens = near.argmax(-1).view(R, K)
        ids, proposed = tokens[..., None], torch.ones(R, K, 1, dtype=torch.float64)
    lengths, seeds = torch.arange(R) % (K + 1), torch.arange(R) * 2**40 + 3
    anchors, bonus = torch.arange(R) * 2**28, torch.arange(R) % vocabulary
    parts = (target, tokens, ids, proposed, lengths, seeds, anchors, bonus)
    there = [None if part is None else part.to(device) for part in parts]
    found = accept_and_draw(*there, roles=ROLES, shift=streams.ROLE_BITS, block=block)
    uniform = streams.uniforms(seeds, anchors, K, Role.ACCEPT)
    kept, weight, own = rules.accept(target, tokens, ids, proposed, lengths, uniform, block)
    noise = streams.gumbel(seeds, anchors, kept + 1, Role.RESIDUAL, vocabulary)
    following = torch.where(kept == lengths, bonus, rules.draw(weight, own, noise))
    assert found[0].tolist() == kept.tolist()
    assert found[1].tolist() == following.tolist()
    assert int(kept.max()) > 1 and bool((kept < lengths).any())


@pytest.mark.parametrize("rule", [Rule.STANDARD, Rule.BLOCK])
def test_the_engine_call_gives_the_same_tokens(rule: Rule, device: torch.device) -> None:
    """Of whole logits, with the Triton chooser and with the host's."""
    source = torch.Generator().manual_seed(2)
    logits = torch.randn(6, 3, 21, generator=source) * 2
    how = RowSampling(
        torch.arange(6) * 99,
        torch.tensor([0.0, 0.5, 1.0, 1.0, 1.5, 0.0], dtype=torch.float64),
        torch.tensor([0, 0, 5, 0, 0, 3]),
        torch.tensor([1.0, 1.0, 1.0, 0.8, 1.0, 0.5], dtype=torch.float64),
    )
    law = normalised(torch.rand(12, 21, generator=source).double()).view(6, 2, 21)
    tokens = logits[:, :2].argmax(-1)
    lengths, anchors = torch.tensor([2, 2, 1, 2, 0, 2]), torch.arange(6) + 40
    wanted = accept(
        logits, Proposal(tokens, Dense(law)), lengths, how, anchors, rule, choose_on_host
    )
    moved = [x.to(device) for x in (how.seeds, how.temperature, how.top_k, how.top_p)]
    logits, tokens, law, lengths, anchors = (
        x.to(device) for x in (logits, tokens, law, lengths, anchors)
    )
    there = RowSampling(*moved)
    proposal = Proposal(tokens, Dense(law))
    found = accept(logits, proposal, lengths, there, anchors, rule, choose_on_device)
    assert [x.tolist() for x in found] == [x.tolist() for x in wanted]


def test_nobody(device: torch.device) -> None:
    none = torch.zeros(0, dtype=torch.int64, device=device)
    target = torch.zeros(0, K, 4, dtype=torch.float64, device=device)
    tokens = torch.zeros(0, K, dtype=torch.int64, device=device)
    found = accept_and_draw(
        target, tokens, None, target, none, none, none, none, roles=ROLES, shift=8, block=True
    )
    assert [part.shape for part in found] == [(0,), (0,)]
