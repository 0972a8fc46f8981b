"""Token choice: greedy, restricted, and drawn from the softmax with counter-based noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvpolicy.config import SamplingParams
from kvpolicy.kernels.philox import uniforms
from kvpolicy.sampling import Role, allowed, choose_token, gumbel

ROWS = st.lists(st.sampled_from([-3.0, -0.5, 0.0, 0.25, 1.0, 2.5]), min_size=1, max_size=12)


def row_of(values: list[float]) -> NDArray[np.float32]:
    return np.array(values, dtype=np.float32)


def params(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0
) -> SamplingParams:
    return SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)


# --- greedy --------------------------------------------------------------------------------------


@given(values=ROWS, position=st.integers(0, 1000), seed=st.integers(0, 2**63 - 1))
def test_greedy_takes_the_lowest_of_equal_maxima(
    values: list[float], position: int, seed: int
) -> None:
    """Whatever the seed, the position, top-k and top-p."""
    wanted = values.index(max(values))
    for top_k, top_p in ((0, 1.0), (1, 1.0), (3, 0.5)):
        chosen = choose_token(row_of(values), params(0.0, top_k, top_p, seed), position)
        assert chosen == wanted


@given(values=ROWS, position=st.integers(0, 1000))
def test_top_1_is_greedy(values: list[float], position: int) -> None:
    """Also with ties: the lowest id is kept."""
    greedy = choose_token(row_of(values), params(0.0), position)
    assert choose_token(row_of(values), params(1.0, top_k=1), position) == greedy
    assert choose_token(row_of(values), params(1.0, top_p=1e-9), position) == greedy


# --- top-k and top-p -----------------------------------------------------------------------------


def brute_force(values: list[float], top_k: int, top_p: float) -> set[int]:
    """Walk down the sorted tokens until top_p of the top-k's probability is reached."""
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if 0 < top_k < len(values):
        order = order[:top_k]
    if top_p >= 1.0:
        return set(order)
    total = math.fsum(math.exp(values[token]) for token in order)
    kept: list[int] = []
    for token in order:
        kept.append(token)
        if math.fsum(math.exp(values[t]) for t in kept) >= top_p * total:
            break
    return set(kept)


@given(
    values=ROWS,
    top_k=st.integers(0, 14),
    top_p=st.floats(0.01, 0.999).map(lambda p: p + 1e-7 * math.pi) | st.just(1.0),
)
def test_allowed_is_what_brute_force_keeps(values: list[float], top_k: int, top_p: float) -> None:
    """Ties at the k-th place go to the lowest id; the token that reaches top_p is kept."""
    top_p = min(top_p, 1.0)
    keep = allowed(np.array(values), params(top_k=top_k, top_p=top_p))
    assert set(np.flatnonzero(keep).tolist()) == brute_force(values, top_k, top_p)
    assert keep.any()


@given(values=ROWS, top_k=st.integers(0, 14), top_p=st.floats(0.01, 1.0), seed=st.integers(0, 99))
def test_only_allowed_tokens_are_drawn(
    values: list[float], top_k: int, top_p: float, seed: int
) -> None:
    chosen = params(0.7, top_k, top_p, seed)
    keep = allowed(row_of(values).astype(np.float64) / 0.7, chosen)
    for position in range(20):
        assert keep[choose_token(row_of(values), chosen, position)]


def test_top_p_reaches_but_does_not_pass() -> None:
    """Probabilities 1/2, 1/4, 1/8, 1/8."""
    logits = np.log(np.array([0.125, 0.5, 0.125, 0.25]))
    for top_p, kept in ((0.4, {1}), (0.51, {1, 3}), (0.74, {1, 3}), (0.76, {0, 1, 3})):
        assert set(np.flatnonzero(allowed(logits, params(top_p=top_p)))) == kept


# --- the distribution ----------------------------------------------------------------------------

# Upper 1e-4 points of the chi-square distribution by degrees of freedom.
CRITICAL = {2: 18.42, 4: 23.51, 7: 29.88, 9: 33.72}
LOGITS = row_of([0.3, -1.2, 2.0, 0.0, 1.1, -0.4, 0.9, -2.0])
DRAWS = 20_000


def chi_square(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    expected = probabilities * counts.sum()
    assert expected.min() > 5
    return float(((counts - expected) ** 2 / expected).sum())


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    weight = np.exp(logits - logits.max())
    return np.asarray(weight / weight.sum())


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_draws_over_positions_follow_the_softmax(temperature: float) -> None:
    own = params(temperature, seed=11)
    drawn = [choose_token(LOGITS, own, position) for position in range(DRAWS)]
    counts = np.bincount(drawn, minlength=8)
    assert chi_square(counts, softmax(LOGITS.astype(np.float64) / temperature)) < CRITICAL[7]


def test_draws_over_seeds_follow_the_softmax() -> None:
    drawn = [choose_token(LOGITS, params(seed=seed), 500) for seed in range(4000)]
    counts = np.bincount(drawn, minlength=8)
    assert chi_square(counts, softmax(LOGITS.astype(np.float64))) < CRITICAL[7]


def test_restricted_draws_follow_the_softmax_of_what_is_left() -> None:
    own = params(top_k=3, seed=5)
    drawn = [choose_token(LOGITS, own, position) for position in range(5000)]
    counts = np.bincount(drawn, minlength=8)
    kept = np.array([2, 4, 6])
    assert counts[kept].sum() == 5000
    assert chi_square(counts[kept], softmax(LOGITS[kept].astype(np.float64))) < CRITICAL[2]


# --- the noise -----------------------------------------------------------------------------------


@given(
    values=ROWS,
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 2**33),
    others=st.lists(st.integers(0, 2**33), max_size=4),
)
def test_a_draw_depends_on_seed_and_position_only(
    values: list[float], seed: int, position: int, others: list[int]
) -> None:
    """The same token whatever was drawn in between, by whom and where."""
    own = params(0.8, seed=seed)
    first = choose_token(row_of(values), own, position)
    for other in others:
        choose_token(row_of(values), params(0.8, seed=other), other)
    again = SamplingParams(temperature=0.8, seed=seed, max_new_tokens=999, stop=("x",))
    assert choose_token(row_of(values).copy(), again, position) == first


@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**33))
def test_a_draw_is_the_largest_noisy_logit(seed: int, position: int) -> None:
    """With the noise of exactly this position and this seed."""
    for at in range(position, position + 4):
        noisy = LOGITS.astype(np.float64) / 1.7 + gumbel(seed, at, Role.TARGET, 8)
        assert choose_token(LOGITS, params(1.7, seed=seed), at) == int(noisy.argmax())


@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**33), extra=st.integers(1, 50))
def test_a_tokens_noise_does_not_depend_on_the_vocabulary(
    seed: int, position: int, extra: int
) -> None:
    short = gumbel(seed, position, Role.TARGET, 9)
    assert np.array_equal(short, gumbel(seed, position, Role.TARGET, 9 + extra)[:9])
    assert np.isfinite(short).all()


def streams() -> dict[str, NDArray[np.float64]]:
    """Neighbours of one stream in each of its three coordinates, 4096 numbers each."""
    found = {role.name: uniforms(7, 100, role, 4096) for role in Role}
    found["next position"] = uniforms(7, 101, Role.TARGET, 4096)
    found["far position"] = uniforms(7, 100 + 2**32, Role.TARGET, 4096)
    found["next seed"] = uniforms(8, 100, Role.TARGET, 4096)
    found["far seed"] = uniforms(7 + 2**32, 100, Role.TARGET, 4096)
    return found


def test_streams_share_no_number_and_do_not_correlate() -> None:
    """|r| below 5 sigma for every pair, also shifted by one; no number in common."""
    named = list(streams().items())
    for i, (name, first) in enumerate(named):
        for other, second in named[i + 1 :]:
            assert not np.intersect1d(first, second).size, (name, other)
            for shift in (0, 1):
                r = np.corrcoef(first, np.roll(second, shift))[0, 1]
                assert abs(r) < 5 / math.sqrt(4096), (name, other, shift)


def test_every_stream_is_uniform() -> None:
    for name, values in streams().items():
        assert values.min() > 0.0 and values.max() < 1.0
        counts = np.histogram(values, bins=10, range=(0.0, 1.0))[0]
        assert chi_square(counts, np.full(10, 0.1)) < CRITICAL[9], name


def test_two_roles_are_independent_together() -> None:
    """Counts of (target, draft) pairs in a 3 x 3 grid: (3 - 1)^2 degrees of freedom."""
    pairs = [
        [int(uniforms(3, position, role, 1)[0] * 3) for role in (Role.TARGET, Role.DRAFT)]
        for position in range(4000)
    ]
    grid = np.zeros((3, 3))
    for first, second in pairs:
        grid[first, second] += 1
    expected = grid.sum(1, keepdims=True) * grid.sum(0, keepdims=True) / grid.sum()
    assert float(((grid - expected) ** 2 / expected).sum()) < CRITICAL[4]
