"""Lightning indexer: scores and exact top-k, in chunks of rows whose scores fit a fixed scratch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..indexer import KeyPages
from .index_scores import index_scores
from .top_k import top_k

# Bytes of scores in flight: 2,048 rows at 32,768 entries, 64 rows at a million.
SCRATCH_BYTES = 256 << 20


def index_top_k(
    q: Tensor,
    weights: Tensor,
    pages: KeyPages,
    row_segment: Tensor,
    visible: Tensor,
    most: int,
    k: int,
    scale: float,
    scratch_bytes: int = SCRATCH_BYTES,
) -> Tensor:
    """The k best entries of each row: int64 [n, k], ascending, -1 after the last.

    Arguments as in ``index_scores``; ties go to the lowest entry. Rows that see at most k entries
    take them all and are not scored.
    """
    n = q.shape[0]
    chunk = max(1, scratch_bytes // (4 * most)) if most > k else n
    if chunk >= n:
        return _chunk(q, weights, pages, row_segment, visible, most, k, scale)
    parts = []
    for start in range(0, n, chunk):
        own = slice(start, start + chunk)
        part = _chunk(q[own], weights[own], pages, row_segment[own], visible[own], most, k, scale)
        parts.append(part)
    return torch.cat(parts)


def _chunk(
    q: Tensor,
    weights: Tensor,
    pages: KeyPages,
    row_segment: Tensor,
    visible: Tensor,
    most: int,
    k: int,
    scale: float,
) -> Tensor:
    if most > k:
        scores = index_scores(q, weights, pages, row_segment, visible, most, scale, above=k)
    else:
        scores = q.new_empty(
            q.shape[0], 0, dtype=torch.float32
        )  # not those of q: top_k compiles for it
    return top_k(scores, visible, k)
