"""The plain-torch kernels against formulas in float64, and bit for bit against themselves."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from kvpolicy.kernels import tiling as tiling_module
from kvpolicy.kernels.elementwise import apply_rope, layer_norm, rms_norm, rope_table, swiglu
from kvpolicy.kernels.eviction import RULES, SweepState, stamp_of
from kvpolicy.kernels.indexer import all_visible, index_scores, top_k
from kvpolicy.kernels.philox import philox, uniforms
from kvpolicy.kernels.sparse_mla import sparse_mla
from kvpolicy.kernels.tiling import Tiling, choose_tiling, linear

CPU = torch.device("cpu")
# (in, out) of linear layers and (heads, head_dim) of indexers, as in the embedded model and odd.
LINEAR = ((256, 80), (256, 264), (64, 256), (80, 33))
SCORES = ((8, 32), (2, 4))


def probe(tiling: Tiling, shift: int) -> list[Tensor]:
    """The products of these tests, as a model hands them to choose_tiling."""
    found = []
    for n_in, n_out in LINEAR:
        x = randn(140, n_in, seed=8).roll(shift, 0)
        found.append(linear(x, randn(n_out, n_in, seed=9), tiling))
    for heads, dim in SCORES:
        q, w = randn(140, heads, dim, seed=10), randn(140, heads, seed=11)
        keys = randn(300, dim, seed=12)
        found.append(index_scores(q.roll(shift, 0), w.roll(shift, 0), keys, 1.0, tiling))
    return [y.roll(-shift, 0) for y in found]


@cache
def tiling() -> Tiling:
    return choose_tiling(probe, CPU)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- tiling --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "padded"), [(0, 16), (1, 16), (15, 16), (16, 16), (17, 32), (70, 80)]
)
def test_pad_is_whole_tiles(n: int, padded: int) -> None:
    assert Tiling().pad(n) == padded


@given(n=st.integers(0, 70), rows=st.integers(1, 20), fused=st.booleans())
def test_map_rows_maps_every_row_once(n: int, rows: int, fused: bool) -> None:
    """Whole tiles only, equal rows of all inputs together, padding dropped: integers, so exact."""
    seen: list[int] = []

    def fn(x: Tensor, y: Tensor) -> Tensor:
        seen.append(x.shape[0])
        return x * 3 + y[:, 0, 1:3]

    x = torch.arange(n * 2).view(n, 2)
    y = torch.arange(n * 8).view(n, 2, 4) * 1000
    out = Tiling(rows=rows, fused=fused).map_rows(fn, x, y)
    assert torch.equal(out, x * 3 + y[:, 0, 1:3])
    assert all(count % rows == 0 for count in seen)
    assert len(seen) == 1 if fused else set(seen) == {rows}


@pytest.mark.parametrize("shape", LINEAR)
def test_fused_and_unfused_products_have_the_same_bits(shape: tuple[int, int]) -> None:
    """What choose_tiling promises for this machine, whichever form it chose."""
    n_in, n_out = shape
    weight = randn(n_out, n_in, seed=1)
    for n in (1, 16, 17, 48, 70):
        x = randn(n, n_in, seed=2)
        unfused = linear(x, weight, Tiling(fused=False))
        assert torch.equal(linear(x, weight, tiling()), unfused)


@given(n=st.integers(1, 70), start=st.integers(0, 69), shape=st.sampled_from(LINEAR))
def test_linear_does_not_depend_on_the_batch(n: int, start: int, shape: tuple[int, int]) -> None:
    """A row's bits are the same alone, in any batch, at any place in it."""
    n_in, n_out = shape
    weight, x = randn(n_out, n_in, seed=3) / 8, randn(140, n_in, seed=4)
    whole = linear(x, weight, tiling())
    assert torch.equal(linear(x[start : start + n], weight, tiling()), whole[start : start + n])


@pytest.mark.parametrize("shape", LINEAR)
def test_linear_is_the_product(shape: tuple[int, int]) -> None:
    n_in, n_out = shape
    weight, x = randn(n_out, n_in, seed=5), randn(19, n_in, seed=6)
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(linear(x, weight, tiling()).double(), exact, rtol=1e-4, atol=1e-4)


def test_choose_tiling_falls_back_where_the_library_varies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A product whose bits depend on the row count is run one tile a call."""
    real = F.linear

    def varying(x: Tensor, weight: Tensor) -> Tensor:
        return real(x, weight) + (x.shape[0] > 48)

    monkeypatch.setattr(tiling_module.F, "linear", varying)
    with caplog.at_level("WARNING"):
        assert choose_tiling(probe, CPU) == Tiling(fused=False)
    assert "tile by tile" in caplog.text


def test_rows_run_one_by_one_where_their_place_matters(caplog: pytest.LogCaptureFixture) -> None:
    """A call of one row cannot depend on the others."""

    def placed(tiling: Tiling, shift: int) -> list[Tensor]:
        return [torch.full((3,), float(shift))]

    with caplog.at_level("WARNING"):
        assert choose_tiling(placed, CPU) == Tiling(rows=1)
    assert "row by row" in caplog.text


def test_choose_tiling_runs_unfused_off_the_cpu() -> None:
    chosen = choose_tiling(probe, torch.device("cuda"))
    assert (chosen.rows, chosen.keys, chosen.fused) == (128, 512, False)


# --- indexer -------------------------------------------------------------------------------------


def best_of(row: list[float], visible: int, k: int) -> list[int]:
    """Top-k by sorting: higher score, then lower entry; -0.0 equals 0.0."""
    order = sorted(range(min(visible, len(row))), key=lambda e: (-row[e], e))[:k]
    return sorted(order) + [-1] * (k - len(order))


FEW_SCORES = st.sampled_from(
    [0.0, -0.0, 1.5, -1.5, 3e38, -3e38, 1e-45, -1e-45, math.inf, -math.inf]
)
ANY_SCORES = st.floats(width=32, allow_nan=False)


@given(data=st.data(), count=st.integers(0, 24), k=st.integers(1, 30), rows=st.integers(1, 4))
def test_top_k_is_what_sorting_finds(data: st.DataObject, count: int, k: int, rows: int) -> None:
    """Ties, signed zeros, negative and infinite scores, few visible entries, k above the count."""
    kind = data.draw(st.sampled_from([FEW_SCORES, ANY_SCORES]))
    row = st.lists(kind, min_size=count, max_size=count)
    scores = data.draw(st.lists(row, min_size=rows, max_size=rows))
    visible = data.draw(st.lists(st.integers(0, count), min_size=rows, max_size=rows))
    table = torch.tensor(scores, dtype=torch.float32).view(rows, count)
    chosen = top_k(table, torch.tensor(visible), k)
    assert chosen.dtype == torch.int64
    wanted = [best_of(r, v, k) for r, v in zip(table.tolist(), visible, strict=True)]
    assert chosen.tolist() == wanted


def test_top_k_at_length() -> None:
    """Thousands of entries with many ties."""
    scores = torch.randint(-3, 4, (3, 3000), generator=torch.Generator().manual_seed(0)).float()
    visible = torch.tensor([3000, 2999, 130])
    chosen = top_k(scores, visible, 128)
    for row, seen, got in zip(scores.tolist(), visible.tolist(), chosen.tolist(), strict=True):
        assert got == best_of(row, seen, 128)


@given(visible=st.lists(st.integers(0, 9), min_size=1, max_size=5), k=st.integers(1, 9))
def test_all_visible_is_top_k_where_nothing_is_left_out(visible: list[int], k: int) -> None:
    seen = torch.tensor(visible).clamp_max(k)
    assert torch.equal(all_visible(seen, k), top_k(randn(len(visible), k), seen, k))


def test_index_scores_are_the_formula() -> None:
    """sum over heads of weight * relu(q . key * scale), in float64."""
    q, weights, keys = randn(5, 8, 32), randn(5, 8, seed=1), randn(77, 32, seed=2)
    scores = index_scores(q, weights, keys, 0.25, tiling())
    dots = torch.einsum("nhd,td->nht", q.double(), keys.double()) * 0.25
    exact = (dots.clamp_min(0) * weights.double()[..., None]).sum(1)
    torch.testing.assert_close(scores.double(), exact, rtol=1e-4, atol=1e-4)
    assert bool((scores < 0).any()) and bool((scores > 0).any())


@cache
def score_case(shape: tuple[int, int], fused: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, weights and keys, and all their scores at once."""
    heads, dim = shape
    q, weights, keys = randn(60, heads, dim), randn(60, heads, seed=1), randn(330, dim, seed=2)
    tiles = tiling() if fused else Tiling(fused=False)
    return q, weights, keys, index_scores(q, weights, keys, dim**-0.5, tiles)


@given(
    n=st.integers(1, 40),
    count=st.integers(1, 330),
    start=st.integers(0, 19),
    shape=st.sampled_from(SCORES),
    fused=st.booleans(),
)
def test_index_scores_do_not_depend_on_the_batch_or_later_keys(
    n: int, count: int, start: int, shape: tuple[int, int], fused: bool
) -> None:
    """A score's bits are a function of its query row and its key."""
    q, weights, keys, whole = score_case(shape, fused)
    tiles = tiling() if fused else Tiling(fused=False)
    own = slice(start, start + n)
    part = index_scores(q[own], weights[own], keys[:count], shape[1] ** -0.5, tiles)
    assert torch.equal(part, whole[own, :count])


def test_index_scores_without_keys() -> None:
    assert index_scores(randn(3, 2, 4), randn(3, 2), randn(0, 4), 1.0, tiling()).shape == (3, 0)


# --- attention -----------------------------------------------------------------------------------

HEADS, WIDTH, VALUE, K = 4, 80, 64, 24
SCALE = WIDTH**-0.5


def attention_case(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, rows and a validity mask with 1..K valid rows each, padding last."""
    query, rows = randn(n, HEADS, WIDTH), randn(n, K, WIDTH, seed=1)
    lengths = torch.arange(n) % K + 1
    return query, rows, torch.arange(K) < lengths[:, None]


def test_sparse_mla_is_dense_softmax() -> None:
    query, rows, valid = attention_case(50)
    out = sparse_mla(query, rows, valid, VALUE, SCALE, tiling())
    scores = torch.einsum("nhw,nkw->nhk", query.double(), rows.double()) * SCALE
    weight = scores.masked_fill(~valid[:, None], -math.inf).softmax(-1)
    exact = torch.einsum("nhk,nkv->nhv", weight, rows.double()[..., :VALUE])
    assert out.shape == (50, HEADS, VALUE)
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)


@given(garbage=st.floats(-1e18, 1e18), seed=st.integers(0, 3))
def test_padding_rows_do_not_matter(garbage: float, seed: int) -> None:
    """Any finite content of rows that are not valid gives the same bits."""
    query, rows, valid = attention_case(20)
    other = torch.where(valid[..., None], rows, garbage * randn(20, K, WIDTH, seed=seed).abs())
    first = sparse_mla(query, rows, valid, VALUE, SCALE, tiling())
    assert torch.equal(sparse_mla(query, other, valid, VALUE, SCALE, tiling()), first)


@given(n=st.integers(1, 40), start=st.integers(0, 30), fused=st.booleans())
def test_sparse_mla_does_not_depend_on_the_batch(n: int, start: int, fused: bool) -> None:
    tiles = tiling() if fused else Tiling(fused=False)
    query, rows, valid = attention_case(70)
    whole = sparse_mla(query, rows, valid, VALUE, SCALE, tiles)
    own = slice(start, start + n)
    assert torch.equal(
        sparse_mla(query[own], rows[own], valid[own], VALUE, SCALE, tiles), whole[own]
    )


def test_a_row_without_valid_entries_is_finite() -> None:
    query, rows, valid = attention_case(3)
    valid[1] = False
    out = sparse_mla(query, rows, valid, VALUE, SCALE, tiling())
    assert bool(out.isfinite().all())


# --- element-wise --------------------------------------------------------------------------------


def test_norms_are_torchs() -> None:
    x, weight, bias = randn(9, 256) * 3 + 1, randn(256, seed=1), randn(256, seed=2)
    ours, theirs = rms_norm(x, weight, 1e-5), F.rms_norm(x, (256,), weight, 1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    ours, theirs = layer_norm(x, weight, bias, 1e-6), F.layer_norm(x, (256,), weight, bias, 1e-6)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_norms_use_eps() -> None:
    """An all-zero row has no scale of its own."""
    zero, one = torch.zeros(1, 8), torch.ones(8)
    assert torch.equal(rms_norm(zero, one, 1e-5), zero)
    assert torch.equal(layer_norm(zero, one, one, 1e-5), one[None])
    small = torch.full((1, 8), 1e-3)
    torch.testing.assert_close(rms_norm(small, one, 1e-2), F.rms_norm(small, (8,), one, 1e-2))


def test_swiglu_is_silu_times_up() -> None:
    gate, up = randn(7, 33) * 20, randn(7, 33, seed=1)
    torch.testing.assert_close(swiglu(gate, up), F.silu(gate) * up, rtol=1e-5, atol=1e-6)
    extreme = swiglu(torch.tensor([-200.0, 200.0]), torch.ones(2))
    assert extreme.tolist() == [0.0, 200.0]


@given(n=st.integers(1, 70), start=st.integers(0, 60))
def test_row_functions_do_not_depend_on_the_batch(n: int, start: int) -> None:
    """Norms, activation and rotary embedding: a row alone has the bits it has in a batch."""
    x, weight, bias = randn(130, 80), randn(80, seed=1), randn(80, seed=2)
    table, positions = rope_table(200, 80, 1e6, CPU), torch.arange(130) + 17
    functions = (
        lambda own: rms_norm(x[own], weight, 1e-5),
        lambda own: layer_norm(x[own], weight, bias, 1e-5),
        lambda own: swiglu(x[own], x[own] * 2),
        lambda own: apply_rope(x[own].view(-1, 1, 80), table, positions[own]),
    )
    for function in functions:
        assert torch.equal(
            function(slice(start, start + n)), function(slice(None))[start : start + n]
        )


@pytest.mark.parametrize("shape", [(6, 16), (6, 3, 16)])
def test_rope_turns_complex_pairs(shape: tuple[int, ...]) -> None:
    """(x[2i] + i x[2i+1]) * exp(i * position * theta^(-2i/d)), first components first."""
    theta, x = 10000.0, randn(*shape)
    positions = torch.tensor([0, 1, 5, 100, 4095, 17])
    out = apply_rope(x, rope_table(4096, 16, theta, CPU), positions)
    pairs = torch.view_as_complex(x.double().view(*shape[:-1], 8, 2))
    angle = positions.double()[:, None] * theta ** (-torch.arange(0, 16, 2).double() / 16)
    turn = torch.polar(torch.ones_like(angle), angle).view(6, *[1] * (len(shape) - 2), 8)
    exact = pairs * turn
    # Angles are rounded to float32: up to 4095 * 2^-24 apart.
    torch.testing.assert_close(out[..., :8].double(), exact.real, rtol=0, atol=2e-3)
    torch.testing.assert_close(out[..., 8:].double(), exact.imag, rtol=0, atol=2e-3)
    torch.testing.assert_close(out[:3, ..., :8].double(), exact.real[:3], rtol=0, atol=1e-5)
    assert torch.equal(out[0], torch.cat([x[0, ..., 0::2], x[0, ..., 1::2]], dim=-1))


def test_a_rope_table_keeps_its_bits_when_it_grows() -> None:
    assert torch.equal(rope_table(5000, 16, 1e6, CPU)[:, :77], rope_table(77, 16, 1e6, CPU))


# --- eviction ------------------------------------------------------------------------------------

SLOTS = st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=1, max_size=40)


def slots_of(slots: list[tuple[int, bool]]) -> tuple[Tensor, Tensor]:
    stamp = torch.tensor([s for s, _ in slots], dtype=torch.int32)
    return stamp, torch.tensor([c for _, c in slots])


@pytest.mark.parametrize("name", sorted(RULES))
@given(slots=SLOTS, count=st.integers(0, 45), hand=st.integers(0, 39), step=st.integers(6, 20))
def test_victims_are_distinct_candidates(
    name: str, slots: list[tuple[int, bool]], count: int, hand: int, step: int
) -> None:
    """As many as asked for, as far as there are candidates; the same again from the same state."""
    stamp, candidate = slots_of(slots)
    before = stamp.clone(), candidate.clone()
    states = [SweepState(hand=hand % len(slots), draws=3) for _ in range(2)]
    first, second = (
        RULES[name].victims(stamp, candidate, count, step, state).tolist() for state in states
    )
    assert first == second and states[0] == states[1]
    assert len(set(first)) == len(first) == min(count, int(candidate.sum()))
    assert all(candidate[slot] for slot in first)
    assert 0 <= states[0].hand < len(slots)
    assert torch.equal(stamp, before[0]) and torch.equal(candidate, before[1])


@pytest.mark.parametrize("name", ["lru", "fifo"])
@given(slots=SLOTS, count=st.integers(0, 45))
def test_lru_and_fifo_take_the_oldest(name: str, slots: list[tuple[int, bool]], count: int) -> None:
    """By stamp, ties to the lowest slot; given out in ascending slot order."""
    stamp, candidate = slots_of(slots)
    order = sorted((s, i) for i, (s, c) in enumerate(slots) if c)
    victims = RULES[name].victims(stamp, candidate, count, 20, SweepState())
    assert victims.tolist() == sorted([i for _, i in order][:count])


@given(
    slots=SLOTS,
    count=st.integers(1, 45),
    hand=st.integers(0, 39),
    step=st.integers(6, 20),
    age=st.integers(1, 9),
)
def test_clock_sweeps_from_the_hand(
    slots: list[tuple[int, bool]], count: int, hand: int, step: int, age: int
) -> None:
    """Lap 1 takes slots unused for ``age`` steps, lap 2 for half of it, lap 3 any, in the order of the sweep;
    the hand stops after the last. A second lap lowers the age, victims within a third of the slots raise it.
    """
    stamp, candidate = slots_of(slots)
    hand %= len(slots)
    lap = [(hand + i) % len(slots) for i in range(len(slots))]
    lap = [slot for slot in lap if slots[slot][1]]
    old = [slot for slot in lap if step - slots[slot][0] // 2 >= age]
    half = [s for s in lap if s not in old and (step - slots[s][0] // 2) * 2 >= age]
    wanted = (old + half + [slot for slot in lap if slot not in old + half])[:count]
    state = SweepState(hand=hand, age=age)
    victims = RULES["clock"].victims(stamp, candidate, count, step, state)
    assert victims.tolist() == wanted
    assert state.hand == ((wanted[-1] + 1) % len(slots) if wanted else hand)
    early = len(old) >= count and ((wanted[-1] - hand) % len(slots) + 1) * 3 < len(slots)
    assert state.age == (max(1, age - 2) if len(old) < count else age + early)
    still = SweepState(hand=hand, age=age)
    assert (
        RULES["clock"].victims(stamp, candidate, count, step, still, tune=False).tolist() == wanted
    )
    assert still.age == age


def test_random_draws_differ_and_cover() -> None:
    """Every slot comes first at times: 4000 draws from 8 slots, within 5 sigma of 500 each."""
    stamp, candidate = torch.zeros(8, dtype=torch.int32), torch.ones(8, dtype=torch.bool)
    state = SweepState()
    first = [
        int(RULES["random"].victims(stamp, candidate, 1, step // 10, state)[0])
        for step in range(4000)
    ]
    counts = np.bincount(first, minlength=8)
    assert counts.min() > 395 and counts.max() < 605
    assert state.draws == 4000


def test_stamps_rank_hits_above_loads_above_the_step_before() -> None:
    stamps = [stamp_of(3, True), stamp_of(4, False), stamp_of(4, True), stamp_of(5, False)]
    assert stamps == sorted(set(stamps))
    assert {name: rule.touch for name, rule in RULES.items()} == {
        "clock": True, "lru": True, "fifo": False, "random": True,
    }  # fmt: skip


# --- philox --------------------------------------------------------------------------------------

ALL = 0xFFFFFFFF
# Random123, tests/kat_vectors, philox4x32-10: counter, key (word 0 first), result.
KNOWN = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL, ALL, ALL, ALL), (ALL, ALL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], result: tuple[int, ...]
) -> None:
    words = tuple(np.array([word, 1], dtype=np.uint64) for word in counter)
    out = philox(key[0] | key[1] << 32, words)  # type: ignore[arg-type]
    assert tuple(int(word[0]) for word in out) == result


@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**40), count=st.integers(1, 40))
def test_uniforms_are_in_the_open_interval_and_do_not_depend_on_the_count(
    seed: int, position: int, count: int
) -> None:
    values = uniforms(seed, position, 0, count)
    assert values.shape == (count,) and values.dtype == np.float64
    assert bool(((values > 0) & (values < 1)).all())
    assert np.array_equal(values, uniforms(seed, position, 0, 64)[:count])


@pytest.mark.parametrize("word", [0, ALL])
def test_uniforms_at_the_ends(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest and the largest word give numbers strictly inside (0, 1)."""

    def constant(key: int, counter: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        return tuple(np.full_like(counter[0], word) for _ in range(4))

    monkeypatch.setattr("kvpolicy.kernels.philox.philox", constant)
    assert all(0.0 < value < 1.0 for value in uniforms(1, 2, 0, 4).tolist())
