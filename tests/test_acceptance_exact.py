"""The law of every acceptance rule, by enumeration: all proposals of a 3-token vocabulary, all ways in which
the uniform numbers can fall, all tokens behind them. No sampling, so no tolerance but rounding."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from toy_speculation import LAWS, Toy, draft_law, target_law, toy

from kvpolicy.kernels import acceptance as rules
from kvpolicy.speculative.costs import StepCosts
from kvpolicy.speculative.schedule import Bounds, best_budget, survivals, verify_lengths

WIDTH, K, START = 3, 3, 5
# (temperature, top-k, top-p) of the target
HOW = [(1.0, 0, 1.0), (0.6, 2, 1.0), (1.5, 0, 0.8)]
CUTS = ("none", "confidence", "older budget")
WRONG = ("own token", "own budget")
SEEDS = (0, 3)  # tables where every cut cuts
ROUNDING = 1e-9  # weights are whole numbers of 2^-40


def states_along(toy: Toy, tokens: Tensor) -> Tensor:
    """The state that decides each token and the one behind the last: int64 [n, K + 1]."""
    found = [torch.full((tokens.shape[0],), START)]
    for k in range(tokens.shape[1]):
        found.append(toy.after(found[-1], tokens[:, k]))
    return torch.stack(found, dim=1)


def lengths_of(cut: str, toy: Toy, states: Tensor, own: Tensor) -> Tensor:
    """How many tokens are verified. own: q of each proposed token."""
    if cut == "none":
        return torch.full((states.shape[0],), K)
    if "budget" in cut:
        return scheduled(toy.confidence[states[:, :K]], cut == "own budget")
    certain = toy.confidence[states[:, :K]] > 0.45 if cut == "confidence" else own > 0.4
    return certain.long().cumprod(dim=1).sum(dim=1)


def scheduled(confidence: Tensor, own: bool) -> Tensor:
    """Lengths by the schedule, where verifying one token costs as much as verifying three: each proposal
    beside another request whose confidences are known. own: the budget is the best for this step's
    tokens, instead of two of a step before."""
    stairs = torch.tensor([0, 10, 10, 16, 16, 16, 16, 16, 16], dtype=torch.int64)
    costs = StepCosts(
        torch.zeros(3, dtype=torch.int64), stairs, torch.zeros((), dtype=torch.float64)
    )
    none = torch.zeros(2, dtype=torch.int64)
    bounds = Bounds(torch.tensor([True, True]), torch.tensor([K, K]), none, none)
    rate, found = torch.zeros((), dtype=torch.float64), []
    for row in confidence:
        now = survivals(torch.stack([row, torch.tensor([0.3, 0.2, 0.2])]))
        budget = best_budget(now, bounds, costs, rate)[0] if own else torch.tensor(2)
        found.append(verify_lengths(now, budget, bounds, rate)[0])
    return torch.stack(found)


class Cycle:
    """One cycle over all V^K proposals at once: each is a request of its own."""

    def __init__(self, law: str, cut: str, how: tuple[float, int, float], seed: int = 0) -> None:
        self.toy = toy(WIDTH, seed)
        self.tokens = torch.tensor(list(itertools.product(range(WIDTH), repeat=K)))
        states = states_along(self.toy, self.tokens)
        self.law = target_law(self.toy, *how)
        self.target = self.law[states]
        ids, chance = draft_law(self.toy, law, 1.0)
        self.candidates = None if ids is None else ids[states[:, :K]]
        self.proposed = chance[states[:, :K]]
        self.own = rules.proposed_probability(self.tokens, self.candidates, self.proposed)
        self.weight = self.own.prod(dim=1)
        self.lengths = lengths_of(cut, self.toy, states, self.own)

    def chances(self, block: bool) -> Tensor:
        ratio = rules.ratios(self.target, self.tokens, self.own)
        if not block:
            return rules.standard_chances(ratio)
        args = (self.target[:, :K], ratio, self.lengths, self.candidates, self.proposed)
        return rules.block_chances(*args)[0]

    def outcomes(self, block: bool) -> tuple[dict[tuple[int, ...], float], float]:
        """Probability of every committed prefix, and the mean number of tokens kept."""
        chances, found, kept = self.chances(block), {}, 0.0
        for passes in itertools.product([True, False], repeat=K):
            falls = torch.tensor(passes)
            uniform = torch.where(falls, chances / 2, (chances + 1) / 2)
            likely = torch.where(falls, chances, 1 - chances).prod(dim=1) * self.weight
            accepted, left, own = rules.accept(
                self.target[:, :K],
                self.tokens,
                self.candidates,
                self.proposed,
                self.lengths,
                uniform,
                block,
            )
            rows = zip(likely.tolist(), accepted.tolist(), strict=True)
            for i, (mass, a) in enumerate(rows):
                if mass == 0.0:
                    continue
                kept += mass * a
                law = left[i] / left[i].sum() if left[i].sum() > 0 else own[i]
                law = self.target[i, a] if a == self.lengths[i] else law
                for y in range(WIDTH):
                    path = (*self.tokens[i, :a].tolist(), y)
                    found[path] = found.get(path, 0.0) + mass * float(law[y])
        return found, kept

    def sequence_law(self, path: tuple[int, ...]) -> dict[tuple[int, ...], float]:
        """The target's law of all sequences of K + 1 tokens that begin with ``path``."""
        state = torch.tensor([START])
        for token in path:
            state = self.toy.after(state, torch.tensor([token]))
        found = {path: (1.0, int(state))}
        for _ in range(K + 1 - len(path)):
            found = {
                (*before, y): (mass * float(self.law[at, y]), at % WIDTH * WIDTH + y)
                for before, (mass, at) in found.items()
                for y in range(WIDTH)
            }
        return {before: mass for before, (mass, _) in found.items()}

    def distance(self, block: bool) -> float:
        """Total variation between what is committed, continued by plain decoding, and plain decoding."""
        said: dict[tuple[int, ...], float] = {}
        for path, mass in self.outcomes(block)[0].items():
            for sequence, rest in self.sequence_law(path).items():
                said[sequence] = said.get(sequence, 0.0) + mass * rest
        plain = self.sequence_law(())
        assert abs(sum(said.values()) - 1.0) < ROUNDING
        return sum(abs(said.get(s, 0.0) - mass) for s, mass in plain.items()) / 2


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("block", [False, True], ids=["standard", "block"])
def test_the_law_is_the_targets(
    block: bool, law: str, cut: str, how: tuple[float, int, float]
) -> None:
    for seed in SEEDS:
        cycle = Cycle(law, cut, how, seed)
        assert cycle.weight.sum() == pytest.approx(1.0)
        assert cycle.distance(block) < ROUNDING


def test_the_cuts_really_cut() -> None:
    """Lengths from 1 to K occur, so the enumeration above sees bonus rows in every place."""
    seen = set()
    for seed in SEEDS:
        for law in LAWS:
            for cut in CUTS[1:]:
                cycle = Cycle(law, cut, HOW[0], seed)
                seen |= set(cycle.lengths[cycle.weight > 0].tolist())
    assert seen == {1, 2, 3}


@pytest.mark.parametrize("cut", WRONG)
@pytest.mark.parametrize("block", [False, True], ids=["standard", "block"])
def test_a_cut_that_looks_at_its_own_token_is_not_exact(block: bool, cut: str) -> None:
    """Stopping before a token because of what it is; or because of what stands behind it, which it
    decides. Of a token that is certain both are harmless."""
    cycles = [Cycle(law, cut, HOW[0], seed) for law in LAWS[:2] for seed in SEEDS]
    assert max(cycle.distance(block) for cycle in cycles) > 0.02
    assert Cycle("onehot", cut, HOW[0], 3).distance(block) < ROUNDING


@pytest.mark.parametrize("law", LAWS)
def test_how_many_tokens_are_kept(law: str) -> None:
    """Standard: the sum over prefixes of the product of min(p, q). Block: never fewer."""
    cycle = Cycle(law, "none", HOW[0])
    picked = cycle.target[:, :K].gather(-1, cycle.tokens[..., None])[..., 0]
    both = torch.minimum(picked, cycle.own)
    # A prefix of j tokens appears once for each of its V^(K - j) continuations.
    wanted = sum(float(both[:, :j].prod(1).sum()) / WIDTH ** (K - j) for j in range(1, K + 1))
    standard, block = cycle.outcomes(False)[1], cycle.outcomes(True)[1]
    assert standard == pytest.approx(wanted, abs=1e-9)
    assert block >= standard - 1e-9
    if law == "dense":
        assert block > standard + 0.01


def test_a_candidate_that_is_named_twice_counts_twice() -> None:
    """Padding with an id that is there already, or a law in two parts."""
    tokens, ids = torch.tensor([[2]]), torch.tensor([[[2, 0, 2]]])
    drawn = torch.tensor([[[0.25, 0.5, 0.25]]])
    assert rules.proposed_probability(tokens, ids, drawn).item() == 0.5
    own = torch.tensor([[0.3, 0.3, 0.4]], dtype=torch.float64)
    left = rules.excess(own, torch.ones(1, dtype=torch.float64), ids[:, 0], drawn[:, 0])
    torch.testing.assert_close(left, torch.tensor([[0.0, 0.3, 0.0]], dtype=torch.float64))


def test_equal_laws_keep_everything() -> None:
    """Also where the excess has no mass at all, and its quotient no value."""
    own = target_law(toy(4, 3), 1.0, 0, 1.0)[:2][None]
    tokens, length = torch.tensor([[2, 1]]), torch.tensor([2])
    for block in (False, True):
        uniform = torch.full((1, 2), 1 - 2.0**-33, dtype=torch.float64)
        accepted, _, _ = rules.accept(own, tokens, None, own, length, uniform, block)
        assert accepted.tolist() == [2]


def test_greedy_targets_under_the_sampling_rules() -> None:
    """All mass on one token: it is kept when proposed, and follows when not, whatever the numbers."""
    own = torch.zeros(1, 3, 4, dtype=torch.float64)
    own[0, torch.arange(3), torch.tensor([1, 3, 0])] = 1.0
    drawn = torch.full((1, 3, 4), 0.25)
    for tokens, kept in (([1, 3, 0], 3), ([1, 3, 2], 2), ([1, 0, 0], 1), ([0, 3, 0], 0)):
        for u in (2.0**-33, 0.5, 1 - 2.0**-33):
            for block in (False, True):
                uniform = torch.full((1, 3), u, dtype=torch.float64)
                found, weight, _ = rules.accept(
                    own, torch.tensor([tokens]), None, drawn, torch.tensor([3]), uniform, block
                )
                assert found.tolist() == [kept]
                if kept < 3:
                    assert weight[0].argmax() == own[0, kept].argmax()
                    assert int((weight[0] > 0).sum()) == 1
