"""The plain-torch operations as a model calls them: paged keys, rows of many segments, NaN padding.

What they compute is in test_kernels_reference.py.
"""

from __future__ import annotations

import pytest
import torch
from kernel_cases import AttentionCase, IndexCase

from kvpolicy.kernels.ops import ReferenceOps, segments
from kvpolicy.kernels.tiling import Tiling

CPU = torch.device("cpu")
OPS = ReferenceOps(Tiling())


def test_segments_are_runs_of_equal_numbers() -> None:
    found = list(segments(torch.tensor([2, 2, 0, 1, 1, 1])))
    assert found == [(2, slice(0, 2)), (0, slice(2, 3)), (1, slice(3, 6))]
    assert list(segments(torch.zeros(0, dtype=torch.int64))) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 16, 50, 250])
def test_index_top_k_reads_each_rows_own_keys(k: int, dtype: torch.dtype) -> None:
    """By sorting the formula in float64, a row at a time; no two scores are near."""
    case = IndexCase(CPU, dtype)
    chosen = case.top_k(OPS, k)
    for row, (segment, seen) in enumerate(
        zip(case.segment.tolist(), case.visible.tolist(), strict=True)
    ):
        keys = case.pages.keys(segment, seen).double()
        dots = (case.q[row].double() @ keys.T * 0.3).clamp_min(0)
        scores = (dots * case.weights[row].double()[:, None]).sum(0)
        best = scores.argsort(descending=True, stable=True)[:k].sort().values.tolist()
        assert chosen[row].tolist() == best + [-1] * (k - len(best))


def test_a_selection_is_the_top_k_of_the_scores() -> None:
    case = IndexCase(CPU)
    scores = case.scores(OPS)
    for row, seen in enumerate(case.visible.tolist()):
        taken = case.top_k(OPS, 20)[row]
        taken = taken[taken >= 0]
        left = torch.ones(seen, dtype=torch.bool).index_fill(0, taken, False)
        assert len(taken) == min(20, seen)
        assert not left.any() or scores[row, taken].min() >= scores[row, :seen][left].max()


def test_what_lies_in_padding_does_not_matter() -> None:
    """NaN or numbers: the same bits."""
    case = AttentionCase(CPU)
    first = case.run(OPS)
    assert bool(first.isfinite().all())
    case.view.copy_(case.view.nan_to_num(7.0))
    assert torch.equal(case.run(OPS), first)
