"""What speculation says over many cycles follows the target's law: chi-square with the production random
numbers, draws and acceptance of whole requests, and coupled tokens against plain ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from toy_speculation import LAWS, Toy, target_law, toy

from kvpolicy.kernels import noise
from kvpolicy.kernels.sampling import choose
from kvpolicy.sampling import Role
from kvpolicy.speculative import streams
from kvpolicy.speculative.acceptance import (
    Rule,
    accept,
    accept_chosen,
    choose_greedy,
    choose_on_host,
)
from kvpolicy.speculative.drawing import RowSampling, draw
from kvpolicy.speculative.proposal import Dense, Law, OneHot, Proposal, Sparse

WIDTH, K, LENGTH, START = 5, 3, 5, 7
# (temperature, top-k, top-p): the rows of a batch are mixed.
HOW = [(0.5, 0, 1.0), (1.0, 3, 1.0), (1.5, 0, 0.85), (1.0, 4, 0.9)]


def plain(logits: Tensor, sampling: RowSampling, positions: Tensor) -> Tensor:
    """Plain sampling of many rows at once, with the numbers of the host's."""
    role = torch.zeros_like(positions)
    drawn = noise.gumbel(sampling.seeds, positions, role, logits.shape[-1])
    return choose(logits, drawn, sampling.temperature, sampling.top_k, sampling.top_p)


def requests_of(how: tuple[float, int, float], count: int, seed: int = 0) -> RowSampling:
    heat, top_k, top_p = how
    return RowSampling(
        torch.arange(count) * 0x9E3779B97F4A7C1 % 2**62 + seed,
        torch.full((count,), heat, dtype=torch.float64),
        torch.full((count,), top_k),
        torch.full((count,), top_p, dtype=torch.float64),
    )


def propose(
    own: Toy, law: str, state: Tensor, sampling: RowSampling, anchors: Tensor, coupled: bool
) -> tuple[Proposal, Tensor]:
    """K tokens of each request in turn, and the states that they pass: int64 [r, K + 1]."""
    states, tokens, candidates, chances = [state], [], [], []
    if law == "onehot":
        heat = torch.zeros_like(sampling.temperature)
        sampling = RowSampling(sampling.seeds, heat, sampling.top_k, sampling.top_p)
    for k in range(K):
        at = states[-1]
        ids = own.candidates(at) if law == "sparse" else None
        scores = own.draft[at] if ids is None else own.draft[at].gather(1, ids)
        token, chance = draw(scores, ids, sampling, anchors, k + 1, coupled)
        tokens.append(token)
        chances.append(chance)
        candidates.append(token if ids is None else ids)
        states.append(own.after(at, token))
    passed = torch.stack(states, dim=1)
    drawn: Law = OneHot()
    if law == "dense":
        drawn = Dense(torch.stack(chances, dim=1))
    elif law == "sparse":
        drawn = Sparse(torch.stack(candidates, dim=1), torch.stack(chances, dim=1).float())
    confidence = own.confidence[passed[:, :K]]
    return Proposal(torch.stack(tokens, dim=1), drawn, confidence), passed


def generate(
    own: Toy, law: str, rule: Rule, cut: bool, sampling: RowSampling, length: int = LENGTH
) -> tuple[Tensor, float]:
    """The first tokens of every request: int64 [r, length]; and tokens per cycle, bonus counted."""
    count = sampling.seeds.shape[0]
    said = torch.zeros(count, length + K + 1, dtype=torch.int64)
    anchors, state = torch.full((count,), 99), torch.full((count,), START)
    cycles, rows = 0, torch.arange(count)
    while int(anchors.min()) < 99 + length:
        proposal, states = propose(own, law, state, sampling, anchors, rule is Rule.COUPLED)
        certain = proposal.confidence > (0.4 if cut else -1.0)
        lengths = certain.long().cumprod(dim=1).sum(dim=1)
        target = own.target[states]
        kept, after = accept(target, proposal, lengths, sampling, anchors, rule, plain)
        assert bool((kept <= lengths).all())
        for k in range(K + 1):
            at = (anchors - 99 + k).clamp_max(length + K)
            new = after if k == K else torch.where(kept == k, after, proposal.tokens[:, k])
            said[rows, at] = torch.where(k <= kept, new, said[rows, at])
        state = own.after(states[rows, kept], after)
        anchors = anchors + kept + 1
        cycles += count
    return said[:, :length], float((anchors - 99).sum()) / cycles


def exact(own: Toy, how: tuple[float, int, float], length: int = LENGTH) -> list[Tensor]:
    """The law of each pair of neighbours, by states: [V, V] float64 for positions (i, i + 1)."""
    law = target_law(own, *how)
    at = torch.zeros(WIDTH * WIDTH, dtype=torch.float64)
    at[START] = 1.0
    found = []
    for _ in range(length):
        joint = at[:, None] * law
        at = joint.view(WIDTH, WIDTH, WIDTH).sum(0).reshape(-1)  # (before last, last, next)
        found.append(at.view(WIDTH, WIDTH))
    return found


def excess_of(counts: Tensor, wanted: Tensor) -> float:
    """Chi-square in standard deviations above its mean, cells below 5 expected counts pooled."""
    total = counts.sum()
    expected = (wanted * total).reshape(-1)
    counts = counts.reshape(-1).double()
    assert not bool(counts[expected == 0].any()), "a token outside the law"
    few = expected < 5
    cells = torch.cat([expected[~few], expected[few].sum()[None]])
    seen = torch.cat([counts[~few], counts[few].sum()[None]])
    seen, cells = seen[cells > 0], cells[cells > 0]
    freedom = max(cells.numel() - 1, 1)
    statistic = float(((seen - cells) ** 2 / cells).sum())
    # Wilson and Hilferty (1931): the cube root is nearly normal.
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - 1 + spread) / math.sqrt(spread)


def worst(said: Tensor, own: Toy, how: tuple[float, int, float]) -> float:
    """Over the marginals of all positions and all pairs of neighbours."""
    pairs = exact(own, how, said.shape[1])
    found = []
    for i, wanted in enumerate(pairs):
        counts = torch.bincount(said[:, i], minlength=WIDTH)
        found.append(excess_of(counts, wanted.sum(0)))
        if i:
            both = torch.bincount(said[:, i - 1] * WIDTH + said[:, i], minlength=WIDTH**2)
            found.append(excess_of(both, wanted))
    return max(found)


def check(law: str, rule: Rule, cut: bool, count: int, seed: int) -> None:
    """Four settings of 9 statistics each: one in 10,000 runs of a right rule would pass 4.9 sigma."""
    own = toy(WIDTH, seed)
    for how in HOW:
        said, _ = generate(own, law, rule, cut, requests_of(how, count, seed))
        assert worst(said, own, how) < 4.9, how


@pytest.mark.parametrize("cut", [False, True], ids=["all", "cut"])
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("rule", [Rule.STANDARD, Rule.BLOCK])
def test_marginals_and_pairs(rule: Rule, law: str, cut: bool) -> None:
    check(law, rule, cut, 3000, 1)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cut", [False, True], ids=["all", "cut"])
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("rule", [Rule.STANDARD, Rule.BLOCK])
def test_marginals_and_pairs_of_many(rule: Rule, law: str, cut: bool, seed: int) -> None:
    check(law, rule, cut, 100_000, 10 + seed)


def shared(role: Role, distances: Tensor) -> Tensor:
    """All roles from one stream."""
    return torch.zeros_like(distances)


def reused(role: Role, distances: Tensor) -> Tensor:
    """A position's numbers whatever the cycle."""
    return torch.full_like(distances, int(role))


@pytest.mark.parametrize(
    ("words", "rule"), [(shared, Rule.STANDARD), (shared, Rule.BLOCK), (reused, Rule.BLOCK)]
)
def test_wrong_streams_are_seen(
    words: Callable[[Role, Tensor], Tensor], rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stream for draft, acceptance and residual; and numbers that a position keeps when it is
    proposed again, although block verification has looked at them."""
    own, sampling = toy(WIDTH, 2), requests_of(HOW[0], 30_000, 2)
    said, _ = generate(own, "sparse", rule, False, sampling)
    assert worst(said, own, HOW[0]) < 4.9
    monkeypatch.setattr(streams, "role_words", words)
    said, _ = generate(own, "sparse", rule, False, sampling)
    assert worst(said, own, HOW[0]) > 7.0


@pytest.mark.parametrize("cut", [False, True], ids=["all", "cut"])
@pytest.mark.parametrize("law", LAWS)
def test_coupled_tokens_are_the_plain_ones(law: str, cut: bool) -> None:
    """Bit for bit, and the shared noise makes the two agree more often than separate noise does."""
    own = toy(WIDTH, 4)
    for how in HOW:
        sampling = requests_of(how, 200)
        said, kept = generate(own, law, Rule.COUPLED, cut, sampling)
        state, wanted = torch.full((200,), START), []
        for i in range(LENGTH):
            token = plain(own.target[state], sampling, torch.full((200,), 100 + i))
            wanted.append(token)
            state = own.after(state, token)
        assert torch.equal(said, torch.stack(wanted, dim=1))
        assert kept > 1.2


def logits_of(count: int, width: int, seed: int) -> Tensor:
    return torch.randn(count, K + 1, width, generator=torch.Generator().manual_seed(seed)) * 2


def mixed(count: int) -> RowSampling:
    """Requests of different settings, greedy ones among them."""
    how = [*HOW, (0.0, 0, 1.0), (0.0, 2, 0.5)]
    heat, top_k, top_p = zip(*(how[i % len(how)] for i in range(count)), strict=True)
    return RowSampling(
        torch.arange(count) * 77,
        torch.tensor(heat, dtype=torch.float64),
        torch.tensor(top_k),
        torch.tensor(top_p, dtype=torch.float64),
    )


def taken(sampling: RowSampling, rows: Tensor) -> RowSampling:
    parts = (sampling.seeds, sampling.temperature, sampling.top_k, sampling.top_p)
    return RowSampling(*(part[rows] for part in parts))


def a_proposal(count: int, width: int, law: str, sampling: RowSampling) -> Proposal:
    source = torch.Generator().manual_seed(width)
    scores = torch.randn(count, K, width, generator=source)
    ids = scores.topk(min(4, width), dim=-1).indices
    anchors = torch.arange(count) + 50
    tokens, chances = [], []
    for k in range(K):
        only = ids[:, k] if law == "sparse" else None
        own = scores[:, k] if only is None else scores[:, k].gather(1, only)
        token, chance = draw(own, only, sampling, anchors, k + 1, False)
        tokens.append(token)
        chances.append(chance)
    drawn: Law = OneHot()
    if law != "onehot":
        chance = torch.stack(chances, dim=1)
        drawn = Sparse(ids, chance) if law == "sparse" else Dense(chance)
    return Proposal(torch.stack(tokens, dim=1), drawn)


def part_of(proposal: Proposal, rows: Tensor) -> Proposal:
    match proposal.law:
        case Dense(chance):
            law: Law = Dense(chance[rows])
        case Sparse(ids, chance):
            law = Sparse(ids[rows], chance[rows])
        case _:
            law = OneHot()
    return Proposal(proposal.tokens[rows], law)


@pytest.mark.parametrize("width", [5, 263])
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("rule", list(Rule))
def test_a_request_does_not_depend_on_the_batch(rule: Rule, law: str, width: int) -> None:
    """Alone, permuted and all together, to the last token; the host chooses plain tokens."""
    count = 13
    sampling, logits = mixed(count), logits_of(count, width, 5)
    proposal, anchors = a_proposal(count, width, law, sampling), torch.arange(count) + 50
    lengths = torch.arange(count) % (K + 1)
    numbers = (logits, lengths, anchors)

    def run(rows: Tensor) -> Tensor:
        own, cut, at = (x[rows] for x in numbers)
        how = taken(sampling, rows)
        pair = accept(own, part_of(proposal, rows), cut, how, at, rule, choose_on_host)
        return torch.stack(pair, dim=1)

    every = run(torch.arange(count))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    assert torch.equal(run(order), every[order])
    for i in range(count):
        assert torch.equal(run(torch.tensor([i])), every[i : i + 1])


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("rule", list(Rule))
def test_greedy_requests_are_greedy_under_every_rule(rule: Rule, law: str) -> None:
    count = 24
    sampling, logits = mixed(count), logits_of(count, 3, 6)
    proposal, anchors = a_proposal(count, 3, law, sampling), torch.arange(count) + 50
    lengths = torch.arange(count) % (K + 1)
    found = accept(logits, proposal, lengths, sampling, anchors, rule, choose_on_host)
    tokens = proposal.tokens
    wanted = accept_chosen(logits, tokens, lengths, sampling, anchors, choose_greedy)
    greedy = sampling.temperature == 0.0
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one[greedy], other[greedy])
    assert int(wanted[0][greedy].max()) > 0


@pytest.mark.parametrize("rule", list(Rule))
def test_nothing_verified_is_plain_decoding(rule: Rule) -> None:
    """Also with no proposal at all. The rows behind are not looked at."""
    count = 12
    sampling, logits = mixed(count), logits_of(count, 9, 7)
    anchors, none = torch.arange(count) + 3, torch.zeros(count, dtype=torch.int64)
    wanted = choose_on_host(logits[:, 0], sampling, anchors + 1)
    for proposal in (
        a_proposal(count, 9, "dense", sampling),
        Proposal(torch.zeros(count, 0, dtype=torch.int64), OneHot()),
    ):
        rows = logits[:, : proposal.width + 1]
        kept, after = accept(rows, proposal, none, sampling, anchors, rule, choose_on_host)
        assert not kept.any()
        assert torch.equal(after, wanted)


def test_the_host_and_the_tensors_choose_alike() -> None:
    """So what holds for one chooser here holds for the other."""
    sampling, logits = mixed(60), logits_of(60, 31, 8)[:, 0]
    positions = torch.arange(60) * 999
    found = choose_on_host(logits, sampling, positions)
    assert torch.equal(found, plain(logits, sampling, positions))
