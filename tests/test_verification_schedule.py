"""The schedule of verification: best budgets against brute force, cuts that cannot see their own token,
seats that change hands, costs of fetching."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvpolicy.speculative.costs import StepCosts, staircase
from kvpolicy.speculative.schedule import (
    UNIT,
    Bounds,
    best_budget,
    sure_tokens,
    survivals,
    verify_lengths,
)
from kvpolicy.speculative.scheduler import VerificationScheduler

CPU = torch.device("cpu")
K = 4
CONFIDENCE = st.floats(0.0, 1.0, width=32)
ROW = st.lists(CONFIDENCE, min_size=K, max_size=K)
ROWS = st.lists(ROW, min_size=1, max_size=4)


def bounds_of(count: int, fetch: list[int] | None = None, cap: int = K) -> Bounds:
    each = torch.tensor(fetch or [0] * count)
    return Bounds(torch.ones(count, dtype=torch.bool), torch.full((count,), cap), 2 * each, each)


def costs_of(table: list[int], draft: int = 0) -> StepCosts:
    return StepCosts(
        torch.full((9,), draft), torch.tensor(table), torch.zeros((), dtype=torch.float64)
    )


ZERO = torch.zeros((), dtype=torch.float64)


def worth(lengths: tuple[int, ...], survival: Tensor, costs: StepCosts, fetch: list[int]) -> float:
    said = len(lengths) + sum(float(survival[i, :n].sum()) / UNIT for i, n in enumerate(lengths))
    rows = len(lengths) + sum(lengths)
    fetched = sum(f * (2 + n) for f, n in zip(fetch, lengths, strict=True))
    return said / float(costs.draft[len(lengths)] + costs.verify[rows] + fetched)


# --- survivals and the budget --------------------------------------------------------------------


@given(rows=ROWS)
def test_survivals_never_rise(rows: list[list[float]]) -> None:
    confidence = torch.tensor(rows)
    found = survivals(confidence)
    assert bool((found[:, 1:] <= found[:, :-1]).all())
    torch.testing.assert_close(
        found.double() / UNIT, confidence.double().cumprod(1), rtol=0, atol=1e-6
    )


def test_survivals_of_what_is_no_chance() -> None:
    found = survivals(torch.tensor([[torch.nan, 1.0], [2.0, -1.0], [torch.inf, 0.5]]))
    assert found.tolist() == [[0, 0], [UNIT, 0], [0, 0]]


@given(
    rows=ROWS,
    steps=st.lists(st.integers(0, 3_000_000), min_size=21, max_size=21),
    draft=st.integers(0, 5_000_000),
)
def test_the_budget_is_the_best_of_all(
    rows: list[list[float]], steps: list[int], draft: int
) -> None:
    """Against every choice of lengths, on staircases and slopes of any kind."""
    survival = survivals(torch.tensor(rows))
    table = list(itertools.accumulate(steps, initial=1_000_000))
    costs, own = costs_of(table, draft), bounds_of(len(rows))
    budget, rate = best_budget(survival, own, costs, ZERO)
    lengths = verify_lengths(survival, budget, own, ZERO)
    assert int(lengths.sum()) == int(budget)
    none = [0] * len(rows)
    found = worth(tuple(lengths.tolist()), survival, costs, none)
    assert found == pytest.approx(float(rate))
    every = itertools.product(range(K + 1), repeat=len(rows))
    assert found >= max(worth(way, survival, costs, none) for way in every) * (1 - 1e-12)


@given(
    rows=st.lists(ROW, min_size=2, max_size=3),
    fetch=st.lists(st.integers(0, 3_000_000), min_size=3, max_size=3),
)
def test_fetches_are_weighed_at_the_rate_that_they_lead_to(
    rows: list[list[float]], fetch: list[int]
) -> None:
    """Each step takes the rate of the step before: standing still, it is the best over all lengths."""
    survival, own = survivals(torch.tensor(rows)), bounds_of(len(rows), fetch[: len(rows)])
    costs, rate = costs_of([1_000_000 + 150_000 * n for n in range(20)]), ZERO
    for _ in range(30):
        budget, rate = best_budget(survival, own, costs, rate)
    lengths = verify_lengths(survival, budget, own, rate)
    found = worth(tuple(lengths.tolist()), survival, costs, fetch[: len(rows)])
    every = itertools.product(range(K + 1), repeat=len(rows))
    best = max(worth(way, survival, costs, fetch[: len(rows)]) for way in every)
    assert found == pytest.approx(best, rel=1e-5)


def test_a_staircase_is_climbed_over() -> None:
    """One more token is not worth a step of the stairs, four are: the walk that stops where it gets worse
    would stay at the foot."""
    costs = costs_of([0, 1_000_000] + [1_300_000] * 10)
    budget, _ = best_budget(survivals(torch.tensor([[0.25, 1, 1, 1.0]])), bounds_of(1), costs, ZERO)
    assert budget == 4
    sure = survivals(torch.tensor([[0.2, 0.2, 0.2, 0.2]]))
    assert best_budget(sure, bounds_of(1), costs, ZERO)[0] == 0


# --- what a cut may look at ----------------------------------------------------------------------


@given(data=st.data(), rows=ROWS, budget=st.integers(0, 16))
def test_a_cut_does_not_see_its_own_token(
    data: st.DataObject, rows: list[list[float]], budget: int
) -> None:
    """Token k decides the confidences behind k: change them as it may, k stays verified or not, and so do
    those before it."""
    confidence = torch.tensor(rows)
    request, k = data.draw(st.integers(0, len(rows) - 1)), data.draw(st.integers(0, K - 1))
    other = confidence.clone()
    other[request, k + 1 :] = torch.tensor(data.draw(ROW))[k + 1 :]
    fetch = data.draw(st.lists(st.integers(0, 10**6), min_size=len(rows), max_size=len(rows)))
    own, rate = bounds_of(len(rows), fetch), torch.tensor(1e-6, dtype=torch.float64)
    found = [
        int(verify_lengths(survivals(each), torch.tensor(budget), own, rate)[request])
        for each in (confidence, other)
    ]
    assert min(found[0], k + 1) == min(found[1], k + 1)


def scheduler(seats: int = 4, record: float = 0.0) -> VerificationScheduler:
    costs = StepCosts.empty(seats, K, CPU)
    costs.set_verify({1: 1e-3, 8: 1.2e-3, 20: 2e-3})
    costs.set_record(record)
    return VerificationScheduler(seats, K, costs, CPU)


def step(
    own: VerificationScheduler,
    rows: list[list[float]],
    seats: list[int] | None = None,
    generations: list[int] | None = None,
    misses: int = 0,
    cap: int = K,
) -> list[int]:
    at = torch.tensor(seats if seats is not None else list(range(len(rows))))
    stamps = torch.tensor(generations or [0] * len(rows))
    caps = torch.full((len(rows),), cap)
    lengths = own.lengths(at, stamps, caps, torch.tensor(rows))
    own.note(at, lengths, lengths, torch.full((len(rows),), misses) * (4 + lengths) // 4)
    return lengths.tolist()


@given(first=ROWS, data=st.data())
def test_the_budget_is_of_older_steps(first: list[list[float]], data: st.DataObject) -> None:
    """Two schedules that were fed alike and differ in this step only have the same budget in it."""
    one, other = scheduler(), scheduler()
    now = [data.draw(ROW) for _ in first]
    for own, rows in ((one, first), (other, now)):
        step(own, first)
        step(own, rows)
    assert one.budget == other.budget and one.rate == other.rate


# --- limits --------------------------------------------------------------------------------------


def test_caps_and_padding() -> None:
    sure = [[0.99] * K] * 3
    for cap in range(K + 1):
        own = scheduler()
        own.costs.set_verify({20: 1e-3})
        assert step(own, sure, cap=cap) == [cap] * 3
        padded = step(own, [*sure, *sure], [2, -1, 0, -1, 1, -1], [0] * 6, cap=cap)
        assert padded == [cap, 0] * 3
    assert step(scheduler(), sure, seats=[-1, -1, -1]) == [0, 0, 0]


@given(rows=st.lists(ROW, min_size=2, max_size=4), steps=st.integers(1, 3))
def test_padding_changes_nothing(rows: list[list[float]], steps: int) -> None:
    one, padded = scheduler(), scheduler()
    for _ in range(steps):
        found = step(one, rows, misses=3)
        seats = [seat for i in range(len(rows)) for seat in (-1, i)]
        wide = [row for own in rows for row in ([1.0] * K, own)]
        assert step(padded, wide, seats, [0] * len(seats), misses=3)[1::2] == found
    assert one.rate == padded.rate
    assert torch.equal(one.estimates.acceptance[:4], padded.estimates.acceptance[:4])
    assert torch.equal(one.estimates.misses[:4], padded.estimates.misses[:4])


def test_a_seat_that_changes_hands_is_fresh() -> None:
    """What the request before left there has no part; that of the others has."""
    used, fresh = scheduler(), scheduler()
    bad, good = [0.01] * K, [0.9] * K
    for _ in range(3):
        step(used, [bad, good], misses=9)
    known = used.estimates
    assert known.survival[0, 0] < UNIT // 50 and known.misses[0] > 0
    known.begin(torch.tensor([0, 1]), torch.tensor([1, 0]))
    assert torch.equal(known.survival[0], fresh.estimates.survival[0])
    assert torch.equal(known.acceptance[0], known.mean_acceptance)
    assert known.misses[0] == known.mean_misses
    assert known.survival[1, 0] < UNIT
    kept = known.survival.clone()
    known.begin(torch.tensor([0, 1]), torch.tensor([1, 0]))
    assert torch.equal(known.survival, kept)


# --- fetching ------------------------------------------------------------------------------------


def settled(record: float, misses: int, confidence: float = 0.8) -> int:
    own, rows = scheduler(record=record), [[confidence] * K] * 4
    for _ in range(40):
        lengths = step(own, rows, misses=misses)
    return sum(lengths)


def test_misses_shorten_what_is_verified() -> None:
    """Cold caches and slow links alike; where nothing is missed, or fetching costs nothing, neither does."""
    free = settled(0.0, 500)
    assert free == settled(1e-6, 0) == 4 * K
    by_misses = [settled(1e-6, misses) for misses in (0, 50, 200, 800, 3000)]
    by_link = [settled(record, 100) for record in (0.0, 1e-6, 4e-6, 2e-5)]
    for found in (by_misses, by_link):
        assert found == sorted(found, reverse=True)
        assert found[0] == 4 * K and found[-1] < 4 * K
    assert any(0 < found < 4 * K for found in by_misses + by_link)


def test_the_request_that_misses_is_cut() -> None:
    """Of two that are equally sure, the one whose cache is cold."""
    own = scheduler(record=1e-6)
    seats, stamps, caps = (
        torch.tensor([0, 1]),
        torch.zeros(2, dtype=torch.int64),
        torch.full((2,), K),
    )
    for _ in range(60):
        lengths = own.lengths(seats, stamps, caps, torch.full((2, K), 0.8))
        own.note(seats, lengths, lengths, torch.tensor([0, 900]) * (4 + lengths) // 4)
    assert lengths[0] == K and lengths[1] < K


def test_what_a_further_row_adds_is_learnt() -> None:
    """From steps of different lengths, whatever they are; and it is not learnt where nothing is verified."""
    for share in (0.05, 0.4, 0.9):
        own, source = scheduler(), torch.Generator().manual_seed(1)
        seats, first = torch.arange(4), torch.tensor([50, 200, 1000, 3000])
        for _ in range(400):
            lengths = torch.randint(0, K + 1, (4,), generator=source)
            own.note(seats, lengths, lengths, (first * (1 + share * lengths)).long())
        assert float(own.estimates.share) == pytest.approx(share, abs=0.03)
        torch.testing.assert_close(own.estimates.misses[:4], first.double(), rtol=0.05, atol=1)
        before = own.estimates.share.clone()
        own.note(seats, seats * 0, seats * 0, first)
        assert own.estimates.share == before


# --- drafters without a confidence head ----------------------------------------------------------


def run_without_head(chances: list[list[float]], steps: int) -> VerificationScheduler:
    """Tokens kept with the given chance at each position, per seat."""
    count, source = len(chances), torch.Generator().manual_seed(3)
    own, seats = scheduler(seats=count), torch.arange(count)
    for _ in range(steps):
        lengths = own.lengths(seats, seats * 0, torch.full((count,), K), None)
        passed = torch.rand(count, K, generator=source) < torch.tensor(chances)
        kept = torch.minimum(passed.long().cumprod(1).sum(1), lengths)
        own.note(seats, lengths, kept, torch.zeros(count, dtype=torch.int64))
    return own


def test_acceptance_is_learnt_by_position() -> None:
    own = run_without_head([[0.9, 0.8, 0.7, 0.6]] * 4, 600)
    found = own.estimates.mean_acceptance
    torch.testing.assert_close(
        found, torch.tensor([0.9, 0.8, 0.7, 0.6], dtype=torch.float64), rtol=0, atol=0.12
    )


def test_a_drafter_that_fails_is_not_verified_and_tried_again() -> None:
    """Rarely, so that it is noticed when it gets better."""
    own, seats = scheduler(seats=1), torch.tensor([0])
    lengths = []
    for i in range(400):
        found = own.lengths(seats, seats * 0, torch.tensor([K]), None)
        own.note(seats, found, found * (i >= 200), seats * 0)
        lengths.append(int(found))
    assert sum(n > 0 for n in lengths[100:200]) < 30
    assert sum(n > 0 for n in lengths[300:]) > 90


# --- costs and the fixed rule --------------------------------------------------------------------


def test_staircase() -> None:
    found = staircase({2: 1.0, 4: 0.9, 8: 3.0}, 16)
    assert found[:9] == [0.0, 1.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 3.0]
    assert found[16] == 6.0
    for wrong in ({}, {0: 1.0}, {1: 0.0}):
        with pytest.raises(ValueError, match="measured"):
            staircase(wrong, 3)
    with pytest.raises(ValueError, match="seconds"):
        StepCosts.empty(1, 1, CPU).set_record(float("nan"))


def test_sure_tokens() -> None:
    rows = torch.tensor([[0.9, 0.4, 0.9], [0.9, 0.9, 0.9], [0.1, 0.9, 0.9]])
    assert sure_tokens(rows, 0.5).tolist() == [1, 3, 0]
