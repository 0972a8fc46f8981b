"""The drafters against a second implementation, and what the engine may rely on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafting import (
    METHODS,
    drafter_of,
    propose,
    sampling,
    small_config,
    some_taps,
    weights_of,
    window_of,
)
from micro import micro_model
from plain_drafters import PlainDrafter
from watched import Watched

from kvpolicy.models.glm_dsa import GlmDsa
from kvpolicy.speculative.drafters.blockwise import Blockwise
from kvpolicy.speculative.drafters.config import DrafterConfig
from kvpolicy.speculative.drafters.dflash2 import DFlash2
from kvpolicy.speculative.drafters.dspark import DSpark
from kvpolicy.speculative.drawing import RowSampling, draw
from kvpolicy.speculative.proposal import Dense, Proposal, Sparse

TAPS = 40


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> GlmDsa:
    return micro_model(tmp_path_factory.mktemp("micro"))


def plain(config: DrafterConfig, target: GlmDsa) -> PlainDrafter:
    head = target.head.parts[0]
    return PlainDrafter(config.to_json(), weights_of(config), target.embedding, head)


def dense_law(proposal: Proposal, vocab: int) -> torch.Tensor:
    law = proposal.law
    if isinstance(law, Dense):
        return law.probabilities.double()
    assert isinstance(law, Sparse)
    out = torch.zeros(*law.candidates.shape[:2], vocab, dtype=torch.float64)
    return out.scatter_(2, law.candidates, law.probabilities.double())


CASES = [
    *((method, {}) for method in METHODS),
    *((method, {"causal": True}) for method in METHODS),
    ("dflash", {"shift": True, "block": 4}),
    ("dspark", {"shift": False, "block": 5}),
    ("dflash2", {"conv_taps": 3, "kv_heads": 4}),
    ("dspark", {"window": 4, "kv_heads": 1}),
]


@pytest.mark.parametrize(("method", "changes"), CASES)
@pytest.mark.parametrize("anchor", [0, 1, 11, 30])
def test_forward_equals_the_formulas(
    target: GlmDsa, method: str, changes: dict[str, object], anchor: int
) -> None:
    """Hidden states, tokens, laws and confidences, from an empty past to one longer than the window."""
    config = small_config(method, **changes)
    drafter, second = drafter_of(config, target), plain(config, target)
    taps, token = some_taps(TAPS, config), 65 + anchor
    context, where = window_of(drafter, taps, anchor, config.window - 1)
    hidden = drafter.body.block(torch.tensor([token]), torch.tensor([anchor]), context, where)
    wanted = torch.stack(second.hidden(taps[:anchor], token))
    torch.testing.assert_close(hidden[0].double(), wanted, rtol=1e-4, atol=1e-4)

    greedy = propose(drafter, taps, anchor, token)
    assert greedy.tokens[0].tolist() == second.greedy(taps[:anchor], token)
    warm = propose(drafter, taps, anchor, token, sampling(1, 0.7, seed=anchor))
    before = token
    for k, law in enumerate(dense_law(warm, config.vocab)[0]):
        torch.testing.assert_close(law, second.law(wanted[k], before, 0.7), rtol=1e-3, atol=1e-6)
        sure = second.logits(wanted[k], before)[2]
        if warm.confidence is not None and sure is not None:
            assert float(warm.confidence[0, k]) == pytest.approx(
                1 / (1 + 2.718281828**-sure), abs=1e-4
            )
        before = int(warm.tokens[0, k])


def test_a_fresh_head_changes_nothing(target: GlmDsa) -> None:
    """DFlash2 without convolution and selector is DFlash; DSpark without its bias is the body."""
    flash, second = small_config("dflash"), small_config("dflash2")
    weights = weights_of(second)
    for name, tensor in weights.items():
        if name.endswith("base_kernel"):
            tensor.zero_()[:, 0] = 1.0
        elif name.endswith(("kernel_projection.weight", "successor_codebook")):
            tensor.zero_()
    shared = {name: weights[name] for name in weights_of(flash)}
    taps = some_taps(TAPS, flash)
    one, two = drafter_of(flash, target, shared), drafter_of(second, target, weights)
    for anchor in (0, 7, 30):
        a, b = propose(one, taps, anchor, 66), propose(two, taps, anchor, 66)
        assert torch.equal(a.tokens, b.tokens)
        a, b = (propose(d, taps, anchor, 66, sampling(1, 0.8)) for d in (one, two))
        inside = dense_law(b, 264) > 0
        same = (
            dense_law(a, 264)[inside]
            / (dense_law(a, 264) * inside).sum(-1, keepdim=True).expand(inside.shape)[inside]
        )
        torch.testing.assert_close(dense_law(b, 264)[inside], same, rtol=1e-5, atol=1e-9)
    spark, shifted = small_config("dspark"), small_config("dflash", shift=True, block=4)
    weights = weights_of(spark)
    weights["markov_head.markov_w2.weight"].zero_()
    body = drafter_of(shifted, target, {name: weights[name] for name in weights_of(shifted)})
    for anchor in (0, 7, 30):
        a = propose(drafter_of(spark, target, weights), taps, anchor, 66, sampling(1, 0.8))
        b = propose(body, taps, anchor, 66, sampling(1, 0.8))
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(dense_law(a, 264), dense_law(b, 264))


@pytest.mark.parametrize("method", METHODS)
def test_a_ring_of_w_minus_1_rows_gives_the_proposals_of_the_whole_past(
    target: GlmDsa, method: str
) -> None:
    """Random accepted lengths over several wraps, only kept rows written; then a new request in the
    same places."""
    config = small_config(method)
    drafter, rows = drafter_of(config, target), config.window - 1
    ring, where = torch.full((rows, config.ring_width), torch.nan), torch.full((rows,), -1)
    generator = torch.Generator().manual_seed(3)
    for request in range(2):
        taps = some_taps(90, config, seed=request)
        where.fill_(-1)  # all that a new owner of the seat does
        anchor = 0
        while anchor < 80:
            kept = drafter.context(taps[anchor : anchor + 6], torch.arange(anchor, anchor + 6))
            count = int(torch.randint(1, config.tokens + 2, (1,), generator=generator))
            for i in range(count):
                ring[(anchor + i) % rows], where[(anchor + i) % rows] = kept[i], anchor + i
            anchor += count
            at = torch.arange(anchor - rows, anchor)
            place = at % rows
            seen = torch.where(at >= 0, where[place], -1)
            assert torch.equal(seen, at.clamp(min=-1))
            got = drafter.propose(
                torch.tensor([70]), torch.tensor([anchor]), ring[place][None], seen[None],
                sampling(1, 0.9, seed=anchor), False,
            )  # fmt: skip
            whole, all_of_it = window_of(drafter, taps, anchor, anchor)
            want = drafter.propose(
                torch.tensor([70]), torch.tensor([anchor]), whole, all_of_it,
                sampling(1, 0.9, seed=anchor), False,
            )  # fmt: skip
            assert torch.equal(got.tokens, want.tokens)
            torch.testing.assert_close(
                dense_law(got, 264), dense_law(want, 264), rtol=1e-4, atol=1e-8
            )
            near = propose(drafter, taps, anchor, 70, sampling(1, 0.9, seed=anchor))
            assert torch.equal(dense_law(got, 264), dense_law(near, 264)), (
                "ring and line: bit for bit"
            )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_request_drafts_alone_as_in_a_batch(
    target: GlmDsa, method: str, temperature: float
) -> None:
    """Bit for bit, at other places of the batch, beside requests with other pasts (conv included)."""
    config = small_config(method)
    drafter, count = drafter_of(config, target), 5
    taps = some_taps(TAPS, config)
    anchors, tokens = torch.tensor([0, 3, 12, 25, 39]), torch.tensor([65, 66, 67, 68, 69])
    pairs = [window_of(drafter, taps, int(a), config.window - 1) for a in anchors]
    context, where = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    how = sampling(count, temperature)
    together = drafter.propose(tokens, anchors, context, where, how, False)
    for i in range(count):
        own = RowSampling(
            *(x[i : i + 1] for x in (how.seeds, how.temperature, how.top_k, how.top_p))
        )
        one = slice(i, i + 1)
        alone = drafter.propose(tokens[one], anchors[one], context[one], where[one], own, False)
        assert torch.equal(alone.tokens, together.tokens[one])
        assert torch.equal(dense_law(alone, 264), dense_law(together, 264)[one])
        if alone.confidence is not None and together.confidence is not None:
            assert torch.equal(alone.confidence, together.confidence[one])


def test_confidence_does_not_look_at_its_own_token(target: GlmDsa) -> None:
    """Two draws of one request that part at token j agree in the confidences of tokens 0..j."""
    config = small_config("dspark")
    drafter, taps = drafter_of(config, target), some_taps(TAPS, config)
    runs = [propose(drafter, taps, 20, 65, sampling(1, 1.5, seed=s)) for s in range(12)]
    parted = 0
    for one in runs:
        for two in runs:
            differ = (one.tokens != two.tokens)[0].nonzero()
            if len(differ) == 0:
                continue
            j = int(differ[0])
            assert one.confidence is not None and two.confidence is not None
            assert torch.equal(one.confidence[0, : j + 1], two.confidence[0, : j + 1])
            if j + 1 < config.tokens:
                parted += not torch.equal(one.confidence[0, j + 1], two.confidence[0, j + 1])
    assert parted, "the next confidence does depend on the token"


@pytest.mark.parametrize("method", METHODS)
def test_drawn_tokens_follow_the_law_that_is_handed_over(target: GlmDsa, method: str) -> None:
    """Chi-square of the second token given the first, over 4,000 seeds."""
    config = small_config(method)
    drafter, many = drafter_of(config, target), 4000
    taps = some_taps(TAPS, config)
    context, where = window_of(drafter, taps, 20, config.window - 1)
    parts = []
    for start in range(0, many, 1000):
        how = sampling(1000, 0.5, seed=start)
        parts.append(
            drafter.propose(
                torch.full((1000,), 65), torch.full((1000,), 20), context.expand(1000, -1, -1),
                where.expand(1000, -1), how, False,
            )
        )  # fmt: skip
    first = torch.cat([p.tokens[:, 0] for p in parts])
    law = dense_law(parts[0], 264)[0, 0]
    expected = law * many
    likely = expected >= 8
    seen = torch.bincount(first, minlength=264).double()
    rest = (seen[~likely].sum() - expected[~likely].sum()) ** 2 / expected[~likely].sum().clamp(
        min=1
    )
    statistic = ((seen - expected)[likely] ** 2 / expected[likely]).sum() + rest
    freedom = float(likely.sum())
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5
    assert seen[law == 0].sum() == 0


@pytest.mark.parametrize("coupled", [False, True])
def test_a_block_is_drawn_as_tokens_one_by_one(target: GlmDsa, coupled: bool) -> None:
    """The rule of ``kvpolicy.speculative.drawing``, bit for bit, greedy requests beside sampled ones."""
    config = small_config("dspark")
    drafter, taps = drafter_of(config, target), some_taps(TAPS, config)
    assert isinstance(drafter, DSpark)
    context, where = window_of(drafter, taps, 20, config.window - 1)
    inputs = (torch.full((3,), 65), torch.full((3,), 20), context.expand(3, -1, -1))
    how = replace(sampling(3), temperature=torch.tensor([0.0, 0.5, 1.2], dtype=torch.float64))
    found = drafter.propose(*inputs, where.expand(3, -1), how, coupled)
    logits = drafter.body.logits(drafter.body.block(*inputs, where.expand(3, -1)))
    previous, law = inputs[0], dense_law(found, 264)
    for k in range(config.tokens):
        scores = drafter.corrected(logits[:, k], previous)
        previous, own = draw(scores, None, how, inputs[1], k + 1, coupled)
        assert torch.equal(found.tokens[:, k], previous)
        assert torch.equal(law[:, k], own)


@pytest.mark.parametrize("method", METHODS)
def test_coupled_drafts_take_the_highest_of_law_and_target_noise(
    target: GlmDsa, method: str
) -> None:
    from kvpolicy.sampling import Role, gumbel

    config = small_config(method)
    drafter, taps = drafter_of(config, target), some_taps(TAPS, config)
    how = sampling(1, 0.8, seed=4)
    found = propose(drafter, taps, 20, 65, how, coupled=True)
    for k, law in enumerate(dense_law(found, 264)[0]):
        noise = torch.from_numpy(gumbel(int(how.seeds[0]), 20 + k + 1, Role.TARGET, 264))
        assert int((law.log() + noise).argmax()) == int(found.tokens[0, k])


@pytest.mark.parametrize("method", METHODS)
def test_greedy_requests_of_a_mixed_batch_have_all_mass_on_their_token(
    target: GlmDsa, method: str
) -> None:
    config = small_config(method)
    drafter, taps = drafter_of(config, target), some_taps(TAPS, config)
    context, where = window_of(drafter, taps, 20, config.window - 1)
    how = replace(sampling(2), temperature=torch.tensor([0.0, 1.0], dtype=torch.float64))
    twice = (torch.full((2,), 65), torch.full((2,), 20), context.expand(2, -1, -1))
    found = drafter.propose(*twice, where.expand(2, -1), how, False)
    law = dense_law(found, 264)
    assert torch.equal(law[0].argmax(-1), found.tokens[0])
    assert bool((law[0].amax(-1) == 1).all()) and bool((law[1].amax(-1) < 1).any())
    assert torch.equal(found.tokens[0], propose(drafter, taps, 20, 65).tokens[0])


def test_calibration_divides_the_logits(target: GlmDsa) -> None:
    config = small_config("dspark")
    heats = {"greedy": (0.5, 1.0, 2.0, 1.0), "sampled": (1.0, 3.0, 1.0, 1.0)}
    taps = some_taps(TAPS, config)
    for temperature, name in ((0.0, "greedy"), (0.9, "sampled")):
        raw, scaled = (
            propose(drafter_of(c, target), taps, 20, 65, sampling(1, temperature)).confidence
            for c in (config, replace(config, calibration=heats))
        )
        assert raw is not None and scaled is not None
        torch.testing.assert_close(
            torch.logit(scaled), torch.logit(raw) / torch.tensor([heats[name]])
        )


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_waits_for_nothing(target: GlmDsa, method: str) -> None:
    """Nothing visits the host, no shape depends on a number: calls can be captured."""
    config = small_config(method)
    drafter, taps = drafter_of(config, target), some_taps(TAPS, config)
    context, where = window_of(drafter, taps, 20, config.window - 1)
    token, anchor, positions = torch.tensor([65]), torch.tensor([20]), torch.arange(TAPS)
    how = sampling(1, 0.8)
    assert drafter.capturable
    with Watched():
        drafter.context(taps, positions)
        for coupled in (False, True):
            drafter.propose(token, anchor, context, where, how, coupled)


def test_the_last_position_of_a_model_can_be_an_anchor(target: GlmDsa) -> None:
    config = small_config("dflash2", max_positions=64)
    drafter = drafter_of(config, target)
    taps = some_taps(64, config)
    assert torch.isfinite(dense_law(propose(drafter, taps, 63, 65), 264)).all()


def test_drafters_are_what_the_engine_asks_for(target: GlmDsa, tmp_path: Path) -> None:
    from kvpolicy.speculative.drafter import Drafter

    for method in METHODS:
        config = small_config(method)
        drafter: Blockwise = drafter_of(config, target)
        assert isinstance(drafter, Drafter)
        assert (drafter.name, drafter.tokens, drafter.window) == (method, 4, 12)
        assert drafter.ring_width == 2 * 2 * 2 * 8
        assert drafter.context(some_taps(3, config), torch.arange(3)).shape == (
            3,
            drafter.ring_width,
        )
    assert isinstance(drafter_of(small_config("dflash2"), target), DFlash2)
    assert isinstance(drafter_of(small_config("dspark"), target), DSpark)
