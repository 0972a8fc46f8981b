"""The plain-torch kernels against formulas in float64, and bit for bit against themselves."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from kvpolicy.kernels import tiling as tiling_module
from kvpolicy.kernels.elementwise import apply_rope, layer_norm, rms_norm, rope_table, swiglu
from kvpolicy.kernels.indexer import all_visible, index_scores, top_k
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
