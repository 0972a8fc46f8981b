"""Tensor-core attention and scoring of bf16 and 8-bit rows and keys, and the search for the top k.

One file for both forms: interpreted on the CPU, compiled on a GPU.
"""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import AttentionCase, IndexCase, paged_keys, randn
from torch import Tensor

from kvpolicy.kernels import fp8
from kvpolicy.kernels import indexer as reference
from kvpolicy.kernels.indexer import KeyPages
from kvpolicy.kernels.ops import Ops, ReferenceOps, make_ops
from kvpolicy.kernels.tiling import Tiling

FORMATS = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=["bf16", "fp8"])


@pytest.fixture(scope="module")
def ops(device: torch.device) -> Ops:
    return make_ops("triton")


def off(ours: Tensor, exact: Tensor) -> float:
    """Distance relative to the norm of what is exact."""
    return float((ours.double() - exact.double()).norm() / exact.double().norm())


# --- attention ------------------------------------------------------------------------------------

# Weights are rounded to bf16 (2^-9) beside bf16 rows, to float16 beside 8-bit ones, whose codes times
# the ratio of scales are rounded to float16 too. Seen: 7e-4 and 4e-4.
ATTENTION_OFF = {torch.bfloat16: 1.2e-3, torch.uint8: 8e-4}


def rounded(case: AttentionCase) -> AttentionCase:
    case.query = case.query.bfloat16()
    return case


def exact(case: AttentionCase) -> Tensor:
    """Dense soft-max in float64 over the rows that the cache holds."""
    from kvpolicy.kernels.sparse_mla import rows_at

    rows = rows_at(case.view, case.locations, case.value).double()
    rows = rows.masked_fill(~case.valid[..., None], 0.0)
    scores = torch.einsum("nhw,nkw->nhk", case.query.double(), rows) * case.scale
    weight = scores.masked_fill(~case.valid[:, None], -math.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("nhk,nkv->nhv", weight, rows[..., : case.value])


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3, 33, 21, 40), torch.bfloat16),
        ((17, 80, 64, 70), torch.bfloat16),
        ((1, 16, 16, 3), torch.bfloat16),
        ((3, 144, 128, 40), torch.uint8),
        ((17, 262, 256, 35), torch.uint8),
        ((1, 128, 128, 3), torch.uint8),
    ],
)
def test_attention_is_dense_softmax(
    device: torch.device, ops: Ops, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    case = rounded(AttentionCase(device, n=2, shape=shape, dtype=dtype))
    wanted = exact(case)
    narrow = case.run(ops)
    assert narrow.dtype == torch.bfloat16
    plain = case.run(ReferenceOps(Tiling()))
    assert off(plain, wanted) < 3e-3  # bf16 itself
    case.query = case.query.float()
    if dtype == torch.uint8:  # float32 queries are rounded to bf16, results are not
        wide = case.run(ops)
        assert torch.equal(wide.bfloat16(), narrow)
        assert off(wide, wanted) < ATTENTION_OFF[dtype]
        assert off(case.run(ReferenceOps(Tiling())), wanted) < 1e-5
    else:
        assert off(narrow, wanted) < 3e-3


@FORMATS
@pytest.mark.parametrize("parts", [1, 3])
def test_attention_in_parts(device: torch.device, dtype: torch.dtype, parts: int) -> None:
    """Any number of parts, some of them empty, in one tile or several; no valid row: zeros."""
    from kvpolicy.kernels.triton.sparse_mla_tensor import Shape, sparse_mla

    case = rounded(AttentionCase(device, n=3, shape=(2, 144, 128, 70), dtype=dtype))
    case.valid[1, 20:] = False
    wanted = exact(case)
    case.valid[2] = False
    rows = (case.query.float(), case.view, case.locations, case.valid, case.value, case.scale)
    ours = sparse_mla(*rows, shape=Shape(rows=16, parts=parts, warps=4, stages=2))
    assert off(ours[:2], wanted[:2]) < ATTENTION_OFF[dtype]
    assert torch.equal(ours[2], torch.zeros_like(ours[2]))
    narrow = (*rows[:2], case.locations.int(), *rows[3:])
    assert torch.equal(ours, sparse_mla(*narrow, shape=Shape(16, parts, 4, 2)))


@FORMATS
def test_an_attended_row_has_the_same_bits_in_any_batch(
    device: torch.device, ops: Ops, dtype: torch.dtype
) -> None:
    case = rounded(AttentionCase(device, n=6, shape=(2, 144, 128, 48), dtype=dtype))
    whole = case.run(ops)
    for start, stop in ((0, 1), (4, 5), (1, 6)):
        assert torch.equal(case.run(ops, slice(start, stop)), whole[start:stop])
    assert case.run(ops, slice(0, 0)).shape == (0, 2, 128)


@FORMATS
def test_what_is_not_valid_contributes_nothing(
    device: torch.device, ops: Ops, dtype: torch.dtype
) -> None:
    case = rounded(AttentionCase(device, n=3, shape=(2, 144, 128, 40), dtype=dtype))
    first = case.run(ops)
    assert bool(first.isfinite().all())
    used = case.locations[case.valid].unique()
    kept = case.view[used // 11, used % 11].clone()
    case.view.fill_(3)
    case.view[used // 11, used % 11] = kept
    assert torch.equal(case.run(ops), first)


@pytest.mark.parametrize("magnitude", [1e-3, 1e6])
def test_8_bit_rows_of_any_magnitude(device: torch.device, ops: Ops, magnitude: float) -> None:
    """Values and queries far outside the range of float16, groups of very different size."""
    case = AttentionCase(device, n=2, shape=(2, 264, 256, 32), dtype=torch.uint8)
    g = torch.Generator().manual_seed(1)
    rows = torch.randn(330, 264, generator=g) * magnitude
    rows[:, :128] *= 0.01
    case.view.copy_(fp8.quantize_rows(rows, 256).view(30, 11, -1))
    case.query = (case.query / magnitude).bfloat16().float()
    wanted = exact(case)
    ours = case.run(ops)
    assert off(ours, wanted) < ATTENTION_OFF[torch.uint8]
    assert off(ours[..., :128], wanted[..., :128]) < ATTENTION_OFF[torch.uint8]


# --- scores ---------------------------------------------------------------------------------------


class TensorIndexCase(IndexCase):
    """bf16 queries, keys of 32 values."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device)
        self.dim = 32
        self.pages = paged_keys(device, [200, 9, 131], self.dim, dtype)
        self.q = randn(device, 6, self.heads, self.dim).bfloat16()


@FORMATS
def test_scores_are_the_formula(device: torch.device, ops: Ops, dtype: torch.dtype) -> None:
    """Hopper adds 8-bit products with fewer bits than float32 has: 2^-11 is allowed there."""
    case = TensorIndexCase(device, dtype)
    ours, plain = case.scores(ops), case.scores(ReferenceOps(Tiling()))
    assert ours.dtype == torch.float32
    for row, seen in enumerate(case.visible.tolist()):
        assert off(ours[row, :seen], plain[row, :seen]) < (1e-5 if device.type == "cpu" else 5e-4)
    q = case.pages.queries(case.q)[0].double()
    keys = case.pages.keys(0, 130).double()
    dots = ((q @ keys.T) * 0.3).clamp_min(0)
    assert off(plain[0, :130], (dots * case.weights[0].double()[:, None]).sum(0)) < 1e-5
    if dtype == torch.uint8:
        assert off(q, case.q[0]) < 0.04


@FORMATS
def test_a_tensor_score_depends_on_its_row_and_key_only(
    device: torch.device, ops: Ops, dtype: torch.dtype
) -> None:
    case = TensorIndexCase(device, dtype)
    whole = case.scores(ops)
    for start, stop in ((0, 1), (2, 5)):
        part = case.scores(ops, slice(start, stop), most=300)
        for row in range(start, stop):
            seen = int(case.visible[row])
            assert torch.equal(part[row - start, :seen], whole[row, :seen])
    case.visible = case.visible.clamp_max(100)
    assert torch.equal(case.scores(ops)[:3, :100], whole[:3, :100])
    assert case.scores(ops, slice(0, 0)).shape == (0, 200)


def test_programs_share_all_tiles(device: torch.device) -> None:
    """More rows than the plan counts at a time; rows that see nothing, or too little to be scored."""
    from kvpolicy.kernels.triton.index_scores_tensor import index_scores

    n, above = 133, 3
    pages = paged_keys(device, [40], 32, torch.uint8)
    q, weights = randn(device, n, 1, 32), randn(device, n, 1, seed=1)
    visible = torch.arange(n, device=device) % 3 * 20 * (torch.arange(n, device=device) % 9 == 1)
    visible[[0, 128, 132]] = 40
    visible[[4, 129]] = above
    segment = torch.zeros_like(visible)
    rows = (q, weights, pages, segment, visible, 40)
    ours = index_scores(*rows, 1.0, above, shape=(16, 4, 1, 3))
    plain = ReferenceOps(Tiling()).index_scores(*rows, 1.0)
    seen = torch.arange(40, device=device) < torch.where(visible > above, visible, 0)[:, None]
    assert off(ours[seen], plain[seen]) < (1e-5 if device.type == "cpu" else 5e-4)


@FORMATS
def test_rows_of_a_segment_share_its_keys(device: torch.device, dtype: torch.dtype) -> None:
    """Runs of three rows that see different numbers of entries: the bits of rows on their own."""
    from kvpolicy.kernels.triton.index_scores_tensor import index_scores

    case = TensorIndexCase(device, dtype)
    segment = torch.tensor([0, 0, 0, 2, 2, 2], device=device)
    visible = torch.tensor([20, 199, 200, 131, 5, 130], device=device)
    rows = (case.q, case.weights, case.pages, segment, visible, 200, 0.3, 10)
    ours, alone = index_scores(*rows, rows_per_segment=3), index_scores(*rows)
    for row, seen in enumerate(visible.tolist()):
        if seen > 10:
            assert torch.equal(ours[row, :seen], alone[row, :seen])
    with pytest.raises(ValueError, match="rows_per_segment = 4: must divide the 6 rows"):
        index_scores(*rows, rows_per_segment=4)


def test_a_scale_that_is_not_positive_is_refused(device: torch.device, ops: Ops) -> None:
    case = TensorIndexCase(device, torch.bfloat16)
    with pytest.raises(ValueError, match=r"scale = -1\.0: must be positive"):
        ops.index_scores(case.q, case.weights, case.pages, case.segment, case.visible, 200, -1.0)


@FORMATS
@pytest.mark.parametrize("k", [1, 50])
def test_top_k_of_tensor_scores(device: torch.device, ops: Ops, dtype: torch.dtype, k: int) -> None:
    case = TensorIndexCase(device, dtype)
    wanted = reference.top_k(case.scores(ops).nan_to_num(0.0), case.visible, k)
    assert torch.equal(case.top_k(ops, k), wanted)
    assert torch.equal(case.top_k(ops, k, slice(1, 3), most=300), wanted[1:3])


# --- the search -----------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 4])
def test_storms_of_ties(device: torch.device, parts: int) -> None:
    """All equal, two values, equal but for one: more candidates than fit, so the row is searched."""
    from kvpolicy.kernels.triton.top_k import top_k

    count, k = 3000, 20
    scores = torch.zeros(4, count)
    scores[1] = (torch.arange(count) % 7 == 3).float()
    scores[2, 2999] = 1.0
    scores[3] = -torch.arange(count).float()  # the best stand side by side
    scores = scores.to(device)
    visible = torch.tensor([count, count - 1, count, count], device=device)
    wanted = reference.top_k(scores, visible, k)
    assert torch.equal(top_k(scores, visible, k, parts), wanted)


def test_neighbours_that_are_all_better(device: torch.device) -> None:
    """The best 3 k entries fill one part of the row: its list of candidates overflows."""
    from kvpolicy.kernels.triton.top_k import top_k

    scores = randn(device, 1, 1200)
    scores[0, 400:640] += 100.0
    visible = torch.tensor([1200], device=device)
    for k, parts in ((64, 4), (64, 1), (16, 4)):
        wanted = reference.top_k(scores, visible, k)
        assert torch.equal(top_k(scores, visible, k, parts), wanted)


# --- true sizes, on a GPU only --------------------------------------------------------------------


@pytest.mark.gpu
@FORMATS
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_attention_at_true_sizes(dtype: torch.dtype, heads: int) -> None:
    """2,048 of 600,000 rows of 576 values each; the same bits alone and in a batch."""
    cuda, ops = torch.device("cuda"), make_ops("triton")
    rows = randn(cuda, 1 << 12, 576).repeat(147, 1)
    records = fp8.quantize_rows(rows, 512) if dtype == torch.uint8 else rows.bfloat16()
    view = records.view(-1, 64, records.shape[1])
    g = torch.Generator().manual_seed(0)
    picked = torch.stack([torch.randperm(len(rows), generator=g)[:2048] for _ in range(20)])
    locations = picked.sort().values.to(cuda)
    valid = torch.ones_like(locations, dtype=torch.bool)
    valid[1, 1500:] = False
    query = randn(cuda, 20, heads, 576).bfloat16()
    ours = ops.sparse_mla(query, view, locations, valid, 512, 576**-0.5)
    plain = ReferenceOps(Tiling(128, 512))
    wanted = plain.sparse_mla(query[:3].float(), view, locations[:3], valid[:3], 512, 576**-0.5)
    assert off(ours[:3], wanted) < 4e-3
    for row in (0, 1, 19):
        own = slice(row, row + 1)
        alone = ops.sparse_mla(query[own], view, locations[own], valid[own], 512, 576**-0.5)
        assert torch.equal(alone, ours[own])


@pytest.mark.gpu
@FORMATS
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_hand_placed_attention(dtype: torch.dtype, parts: int) -> None:
    """The other form's results within rounding: rows with gaps, short, empty, alone and in a batch."""
    from kvpolicy.kernels.triton.sparse_mla_tensor import Shape, sparse_mla

    cuda, shape = torch.device("cuda"), Shape(64, parts, 8, 2, placed=True)
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("made for Hopper")
    rows = randn(cuda, 1 << 14, 576)
    records = fp8.quantize_rows(rows, 512) if dtype == torch.uint8 else rows.bfloat16()
    view = records.view(-1, 64, records.shape[1])
    g = torch.Generator().manual_seed(0)
    locations = torch.stack([torch.randperm(len(rows), generator=g)[:2048] for _ in range(20)])
    locations = locations.sort().values.to(cuda)
    valid = torch.ones_like(locations, dtype=torch.bool)
    valid[1, 1500:], valid[2, 3:], valid[3], valid[4, ::3] = False, False, False, False
    query = randn(cuda, 20, 128, 576).bfloat16()
    ours = sparse_mla(query, view, locations, valid, 512, 576**-0.5, shape)
    plain = sparse_mla(query, view, locations, valid, 512, 576**-0.5, Shape(32, 4, 8, 5))
    assert off(ours, plain) < 4e-3
    assert torch.equal(ours[3], torch.zeros_like(ours[3]))
    for row in (0, 1, 2, 4, 19):
        own = slice(row, row + 1)
        part = (query[own], view, locations[own], valid[own])
        assert torch.equal(sparse_mla(*part, 512, 576**-0.5, shape), ours[own])
    poisoned = view.clone().view(torch.uint8)
    unused = torch.ones(len(rows), dtype=torch.bool, device=cuda)
    unused[locations[valid]] = False
    poisoned.flatten(0, 1)[unused] = 255
    same = sparse_mla(query, poisoned.view(view.dtype), locations, valid, 512, 576**-0.5, shape)
    assert torch.equal(same, ours)


@pytest.mark.gpu
@FORMATS
def test_the_indexer_in_a_graph(dtype: torch.dtype) -> None:
    """One capture serves every length: 100,000 entries, few, none; as many as ``most``."""
    cuda, ops, k, most = torch.device("cuda"), make_ops("triton"), 2048, 100_000
    per = 496
    frames = -(-most // per)
    keys = randn(cuda, 2 * frames * per, 128)
    records = fp8.quantize_keys(keys) if dtype == torch.uint8 else keys.bfloat16()
    order = torch.randperm(2 * frames, generator=torch.Generator().manual_seed(1)).to(cuda)
    pages = KeyPages(records.view(2 * frames, per, -1), order.view(2, frames))
    q, weights = randn(cuda, 5, 32, 128).bfloat16(), randn(cuda, 5, 32, seed=1)
    segment = torch.tensor([0, 0, 1, 1, 1], device=cuda)
    visible = torch.tensor([5000, 5000, 5000, 5000, 5000], device=cuda)
    rows = (q, weights, pages, segment, visible, most)
    ops.index_top_k(*rows, k, 128**-0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen = ops.index_top_k(*rows, k, 128**-0.5)
    for lengths in ([most, most - 1, 70_001, 3, 0], [2048, 2049, most, 50_000, 8193]):
        visible.copy_(torch.tensor(lengths))
        graph.replay()
        scores = ops.index_scores(*rows, 128**-0.5)
        there = torch.arange(most, device=cuda) < visible[:, None]
        wanted = reference.top_k(scores.masked_fill(~there, -math.inf), visible, k)
        assert torch.equal(chosen, wanted)


@pytest.mark.gpu
def test_top_k_of_a_million() -> None:
    from kvpolicy.kernels.triton.top_k import top_k

    scores = randn(torch.device("cuda"), 3, 1_000_000)
    scores[1] = scores[1].round()
    scores[2] = 0.0
    visible = torch.tensor([1_000_000, 999_999, 1_000_000], device="cuda")
    assert torch.equal(top_k(scores, visible, 2048), reference.top_k(scores, visible, 2048))


@pytest.mark.gpu
def test_8_bit_records_beyond_two_gib() -> None:
    """Rows and keys at the far end of an arena of more than 2^31 bytes are found."""
    cuda, ops, frames = torch.device("cuda"), make_ops("triton"), 40_000
    arena = torch.full((frames, 65536), 255, dtype=torch.uint8, device=cuda)
    rows, keys = (
        arena[:, : 99 * 656].view(frames, 99, 656),
        arena[:, : 496 * 132].view(-1, 496, 132),
    )
    far = torch.arange(frames - 16, frames, device=cuda)
    rows[far] = fp8.quantize_rows(randn(cuda, 16 * 99, 576), 512).view(16, 99, 656)
    near = rows[far].clone()
    locations, valid = (far * 99 + 98)[None], torch.ones(1, 16, dtype=torch.bool, device=cuda)
    query = randn(cuda, 1, 8, 576).bfloat16()
    at = (torch.arange(16, device=cuda) * 99 + 98)[None]
    ours = ops.sparse_mla(query, rows, locations, valid, 512, 0.1)
    assert torch.equal(ours, ops.sparse_mla(query, near, at, valid, 512, 0.1))
    assert bool((ours != 0).any())
    keys[far] = fp8.quantize_keys(randn(cuda, 16 * 496, 128)).view(16, 496, 132)
    q, weights, own = randn(cuda, 1, 32, 128), randn(cuda, 1, 32, seed=1), far[:1] * 0
    rest = (own, own + 16 * 496, 16 * 496, 1.0)
    moved = KeyPages(keys[far].clone(), torch.arange(16, device=cuda)[None])
    ours = ops.index_scores(q, weights, KeyPages(keys, far[None]), *rest)
    assert torch.equal(ours, ops.index_scores(q, weights, moved, *rest))
