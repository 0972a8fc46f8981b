"""The Triton kernels: against formulas in float64 and the plain-torch reference, bit for bit against
themselves in other batches, and blind to memory that they have no business reading.

One file for both forms: interpreted on the CPU, compiled on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from kernel_cases import AttentionCase, IndexCase, randn
from torch import Tensor
from torch.nn import functional as F

from kvpolicy.kernels import indexer as reference
from kvpolicy.kernels.indexer import KeyPages
from kvpolicy.kernels.ops import Ops, ReferenceOps, make_ops
from kvpolicy.kernels.tiling import Tiling

# Products of unit-size values, 130 of them at most, in IEEE float32: 6e-6 off as seen in the interpreter.
# Inputs rounded to TF32 would be 6e-3 off.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


@pytest.fixture(scope="module")
def ops(device: torch.device) -> Ops:
    return make_ops("triton")


def close(ours: Tensor, exact: Tensor) -> None:
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), exact, **CLOSE)


# --- products and norms ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(33, 17), (64, 80), (7, 1), (1, 5), (130, 65)])
def test_linear_is_the_product(device: torch.device, ops: Ops, shape: tuple[int, int]) -> None:
    """Any widths; rows with a stride, at an odd address; alone, beside another weight, added."""
    n_in, n_out = shape
    wide, weight = randn(device, 19, n_in + 6), randn(device, n_out, n_in, seed=1)
    x = wide[:, 3 : 3 + n_in]
    exact = x.double() @ weight.double().T
    packed = ops.pack(weight, weight[:1])
    assert torch.equal(packed.parts[0], weight)
    for out, width in zip(ops.products(x, packed), (n_out, 1), strict=True):
        close(out, exact[:, :width])
    residual = randn(device, 19, n_out, seed=2)
    close(ops.linear(x, ops.pack(weight), residual), residual + exact)


@pytest.mark.parametrize("shape", [(2, 8, 16), (3, 33, 21)])
def test_head_linear_is_a_product_per_head(
    device: torch.device, ops: Ops, shape: tuple[int, int, int]
) -> None:
    heads, n_in, n_out = shape
    x = randn(device, 18, heads, n_in + 8)[..., :n_in]
    weight = randn(device, heads, n_in, n_out, seed=1)
    exact = torch.einsum("nhd,hdc->nhc", x.double(), weight.double())
    close(ops.head_linear(x, weight), exact)


@pytest.mark.parametrize("width", [16, 33, 80, 3000])
def test_norms_are_torchs(device: torch.device, ops: Ops, width: int) -> None:
    from kvpolicy.kernels.triton.norms import layer_norm

    x = (randn(device, 5, width + 7) * 3 + 1)[:, 2 : 2 + width]
    weight, bias = randn(device, width, seed=1), randn(device, width, seed=2)
    exact = F.rms_norm(x.double(), (width,), weight.double(), 1e-3)
    close(ops.rms_norm(x, weight, 1e-3), exact)
    exact = F.layer_norm(x.double(), (width,), weight.double(), bias.double(), 1e-3)
    close(layer_norm(x, weight, bias, 1e-3), exact)


def test_norms_use_eps(device: torch.device, ops: Ops) -> None:
    """An all-zero row has no scale of its own."""
    from kvpolicy.kernels.triton.norms import layer_norm

    zero, one = torch.zeros(1, 8, device=device), torch.ones(8, device=device)
    assert torch.equal(ops.rms_norm(zero, one, 1e-5), zero)
    assert torch.equal(layer_norm(zero, one, one, 1e-5), one[None])


# --- indexer --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_index_scores_are_the_formula(device: torch.device, ops: Ops, dtype: torch.dtype) -> None:
    """sum over heads of weight * relu(q . key * scale), from keys in scattered frames amid NaN."""
    case = IndexCase(device, dtype)
    scores = case.scores(ops)
    for row, (segment, seen) in enumerate(
        zip(case.segment.tolist(), case.visible.tolist(), strict=True)
    ):
        keys = case.pages.keys(segment, seen).double()
        dots = (case.q[row].double() @ keys.T * 0.3).clamp_min(0)
        close(scores[row, :seen], (dots * case.weights[row].double()[:, None]).sum(0))


def test_a_score_depends_on_its_row_and_key_only(device: torch.device, ops: Ops) -> None:
    case = IndexCase(device)
    whole = case.scores(ops)
    for start, stop in ((0, 1), (2, 3), (1, 5), (4, 6)):
        part = case.scores(ops, slice(start, stop), most=257)
        for row in range(start, stop):
            seen = int(case.visible[row])
            assert torch.equal(part[row - start, :seen], whole[row, :seen])
    fewer = IndexCase(device)
    fewer.visible = fewer.visible.clamp_max(100)
    assert torch.equal(fewer.scores(ops)[:3, :100], whole[:3, :100])


@pytest.mark.parametrize("k", [1, 16, 50, 250])
def test_index_top_k_is_the_top_k_of_its_scores(device: torch.device, ops: Ops, k: int) -> None:
    case = IndexCase(device)
    wanted = reference.top_k(case.scores(ops).nan_to_num(0.0), case.visible, k)
    assert torch.equal(case.top_k(ops, k), wanted)
    for start, stop in ((2, 3), (1, 5)):
        own = slice(start, stop)
        assert torch.equal(case.top_k(ops, k, own, most=300), wanted[own])


def test_index_top_k_in_chunks_of_rows(device: torch.device, ops: Ops) -> None:
    """Scratch for two rows at a time gives what one chunk gives."""
    from kvpolicy.kernels.triton.indexer import index_top_k

    case = IndexCase(device)
    rows = (case.q, case.weights, case.pages, case.segment, case.visible, case.most)
    small = index_top_k(*rows, 20, 0.3, scratch_bytes=2 * 4 * case.most)
    assert torch.equal(small, case.top_k(ops, 20))


def test_both_backends_choose_the_same_where_scores_are_far_apart(
    device: torch.device, ops: Ops
) -> None:
    """Keys 0, 1, 2, ... times one direction: no two scores are near."""
    case = IndexCase(device)
    direction = torch.arange(1.0, 8.0, device=device)[:, None].expand(7, case.dim) / 7
    case.pages.view[:] = torch.arange(len(case.pages.view), device=device)[:, None, None] + 0.0
    case.pages.view[:] += direction
    case.q[:], case.weights[:] = 1.0, 1.0
    plain = case.top_k(ReferenceOps(Tiling()), 16)
    assert torch.equal(case.top_k(ops, 16), plain)


# --- top-k ----------------------------------------------------------------------------------------


def test_top_k_finds_what_sorting_finds(device: torch.device) -> None:
    """Ties, signed zeros, infinities, numbers too small to be normal, few visible entries."""
    from kvpolicy.kernels.triton.top_k import top_k

    few = torch.tensor([0.0, -0.0, 1.5, -1.5, 3e38, -3e38, 1e-45, -1e-45, math.inf, -math.inf])
    g = torch.Generator().manual_seed(0)
    scores = few[torch.randint(len(few), (6, 70), generator=g)].to(device)
    scores[3] = 0.0
    scores[4] = randn(device, 70)
    visible = torch.tensor([70, 69, 30, 70, 64, 5], device=device)
    for k in (1, 5, 29, 70, 90):
        wanted = reference.top_k(scores, visible, k)
        poisoned = scores.masked_fill(torch.arange(70, device=device) >= visible[:, None], math.inf)
        assert torch.equal(top_k(poisoned, visible, k), wanted)


def test_top_k_at_length(device: torch.device) -> None:
    """Thousands of entries, so several blocks, with many ties across them."""
    from kvpolicy.kernels.triton.top_k import BLOCK, top_k

    count = 2 * BLOCK + 77
    g = torch.Generator().manual_seed(0)
    scores = torch.randint(-3, 4, (3, count), generator=g).float().to(device)
    scores[2] = randn(device, count)
    visible = torch.tensor([count, BLOCK + 1, count - 5], device=device)
    for k in (128, BLOCK):
        assert torch.equal(top_k(scores, visible, k), reference.top_k(scores, visible, k))


# --- attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(3, 33, 21, 40), (2, 24, 16, 16), (17, 80, 64, 70), (1, 9, 9, 3)]
)
def test_sparse_mla_is_dense_softmax(
    device: torch.device, ops: Ops, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    case = AttentionCase(device, n=3, shape=shape, dtype=dtype)
    rows = case.view[case.locations // 11, case.locations % 11].double()
    rows = rows.masked_fill(~case.valid[..., None], 0.0)
    scores = torch.einsum("nhw,nkw->nhk", case.query.double(), rows) * case.scale
    weight = scores.masked_fill(~case.valid[:, None], -math.inf).softmax(-1)
    close(case.run(ops), torch.einsum("nhk,nkv->nhv", weight, rows[..., : case.value]))


def test_padding_contributes_exactly_nothing(device: torch.device, ops: Ops) -> None:
    """NaN or numbers in rows that are not valid: the same bits. Nothing valid: zeros."""
    case = AttentionCase(device)
    first = case.run(ops)
    assert bool(first.isfinite().all())
    case.view.copy_(case.view.nan_to_num(7.0))
    assert torch.equal(case.run(ops), first)
    case.valid[1] = False
    assert torch.equal(case.run(ops)[1], torch.zeros_like(first[1]))


# --- every operation ------------------------------------------------------------------------------


def row_functions(device: torch.device, ops: Ops) -> dict[str, Callable[[slice], Tensor]]:
    """Each operation as a function of which of 37 rows it is given."""
    x, weight = randn(device, 37, 45), randn(device, 70, 45, seed=1)
    wide, heads = randn(device, 37, 2, 45, seed=2), randn(device, 2, 45, 19, seed=3)
    attention, packed = AttentionCase(device, n=37, shape=(2, 24, 16, 16)), ops.pack(weight)
    from kvpolicy.kernels.triton.norms import layer_norm

    return {
        "linear": lambda own: ops.linear(x[own], packed),
        "head_linear": lambda own: ops.head_linear(wide[own], heads),
        "rms_norm": lambda own: ops.rms_norm(x[own], weight[0], 1e-5),
        "layer_norm": lambda own: layer_norm(x[own], weight[0], weight[1], 1e-5),
        "sparse_mla": lambda own: attention.run(ops, own),
    }


NAMES = ["linear", "head_linear", "rms_norm", "layer_norm", "sparse_mla"]


@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_same_bits_in_any_batch(device: torch.device, ops: Ops, name: str) -> None:
    """Alone, at another place, among more or fewer rows, at an address of other alignment."""
    function = row_functions(device, ops)[name]
    whole = function(slice(None))
    for start, stop in ((0, 1), (20, 21), (3, 8), (1, 17), (15, 32), (5, 37)):
        assert torch.equal(function(slice(start, stop)), whole[start:stop])


@pytest.mark.parametrize("name", NAMES)
def test_no_rows_give_no_rows(device: torch.device, ops: Ops, name: str) -> None:
    function = row_functions(device, ops)[name]
    none = function(slice(0, 0))
    assert none.shape == (0, *function(slice(0, 1)).shape[1:])


def test_no_rows_choose_nothing(device: torch.device, ops: Ops) -> None:
    case = IndexCase(device)
    assert case.scores(ops, slice(0, 0)).shape == (0, 200)
    assert case.top_k(ops, 16, slice(0, 0)).shape == (0, 16)


# --- sizes of a real step, on a GPU only ----------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "requests"), [(16, 16), (1024, 1)])
def test_a_step_at_32k_entries(rows: int, requests: int) -> None:
    """Selection and attention of 16 decoding requests, and of a prompt chunk of 1,024 rows."""
    cuda, ops, entries, k = torch.device("cuda"), make_ops("triton"), 32768, 128
    view = randn(cuda, requests * entries // 512, 512, 32)
    frames = torch.randperm(len(view), generator=torch.Generator().manual_seed(1)).to(cuda)
    pages = KeyPages(view, frames.view(requests, -1))
    segment = torch.arange(requests, device=cuda).repeat_interleave(rows // requests)
    visible = torch.full((rows,), entries, device=cuda) - torch.arange(rows, device=cuda).flip(0)
    q, weights = randn(cuda, rows, 8, 32), randn(cuda, rows, 8, seed=1)
    scores = ops.index_scores(q, weights, pages, segment, visible, entries, 32**-0.5)
    chosen = ops.index_top_k(q, weights, pages, segment, visible, entries, k, 32**-0.5)
    assert torch.equal(chosen, reference.top_k(scores, visible, k))
    last = slice(rows - 1, rows)
    one = (q[last], weights[last], pages, segment[last], visible[last], entries, k, 32**-0.5)
    assert torch.equal(ops.index_top_k(*one), chosen[last])
    kv, valid = randn(cuda, 400, 100, 80), torch.ones(rows, k, dtype=torch.bool, device=cuda)
    query = randn(cuda, rows, 8, 80)
    ours = ops.sparse_mla(query, kv, chosen, valid, 64, 80**-0.5)
    plain = ReferenceOps(Tiling(128, 512)).sparse_mla(query, kv, chosen, valid, 64, 80**-0.5)
    close(ours, plain.double())
    assert torch.equal(
        ops.sparse_mla(query[last], kv, chosen[last], valid[last], 64, 80**-0.5), ours[last]
    )


@pytest.mark.gpu
def test_an_arena_of_more_than_two_to_the_31_values() -> None:
    """Offsets into it are 64-bit: rows and keys at its far end are found."""
    cuda, ops, frames = torch.device("cuda"), make_ops("triton"), 70_000
    arena = torch.zeros(frames, 32768, dtype=torch.bfloat16, device=cuda)
    assert arena.numel() > 2**31
    rows, keys = arena[:, :32000].view(frames, 400, 80), arena.view(frames, 1024, 32)
    far = torch.arange(frames - 16, frames, device=cuda)
    rows[far] = randn(cuda, 16, 400, 80).bfloat16()
    locations, valid = (far * 400 + 399)[None], torch.ones(1, 16, dtype=torch.bool, device=cuda)
    query = randn(cuda, 1, 8, 80)
    near = rows[far].clone()
    at = (torch.arange(16, device=cuda) * 400 + 399)[None]
    ours = ops.sparse_mla(query, rows, locations, valid, 64, 0.1)
    assert torch.equal(ours, ops.sparse_mla(query, near, at, valid, 64, 0.1))
    assert bool((ours != 0).any())
    q, weights, own = randn(cuda, 1, 8, 32), randn(cuda, 1, 8, seed=1), far[:1] * 0
    seen = own + 16 * 1024
    scored = (q, weights, KeyPages(keys, far[None]), own, seen, 16 * 1024, 1.0)
    moved = KeyPages(keys[far].clone(), torch.arange(16, device=cuda)[None])
    assert torch.equal(ops.index_scores(*scored), ops.index_scores(q, weights, moved, *scored[3:]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_at_true_widths(dtype: torch.dtype) -> None:
    """64 heads over 2,048 rows of 576 values, of which 512 are the value."""
    cuda, ops = torch.device("cuda"), make_ops("triton")
    g = torch.Generator().manual_seed(0)
    view = torch.randn(64, 64, 576, generator=g).to(cuda, dtype)
    locations = torch.stack([torch.randperm(4096, generator=g)[:2048] for _ in range(3)]).to(cuda)
    valid, query = torch.ones_like(locations, dtype=torch.bool), randn(cuda, 3, 64, 576)
    valid[1, 1500:] = False
    ours = ops.sparse_mla(query, view, locations, valid, 512, 576**-0.5)
    rows = view.flatten(0, 1)[locations].double()
    scores = torch.einsum("nhw,nkw->nhk", query.double(), rows) * 576**-0.5
    weight = scores.masked_fill(~valid[:, None], -math.inf).softmax(-1)
    close(ours, torch.einsum("nhk,nkv->nhv", weight, rows[..., :512]))
    alone = ops.sparse_mla(query[2:], view, locations[2:], valid[2:], 512, 576**-0.5)
    assert torch.equal(alone, ours[2:])
