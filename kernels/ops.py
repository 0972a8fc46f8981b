"""The seam between a model and its kernels: what a backend computes, and the plain-torch one.

Every operation gives a row the same bits whatever rows stand beside it. Weights, inputs and results
are float32; cached rows and keys may be bf16 or 8-bit records (``fp8.py``). Attention and scoring
take bf16 queries too: attention then returns bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from . import elementwise, indexer
from . import sparse_mla as attention
from .backend import REFERENCE
from .indexer import KeyPages
from .tiling import Tiling


class Ops(Protocol):
    """Operations of a sparse-attention decoder. n: rows of a step, of any number of segments.

    Norms and products (linear, head_linear) are called inside ``map_rows`` only, so that a backend
    may fix the row counts they see; the others take a whole step.
    """

    @property
    def name(self) -> str:
        """The backend's name: ``reference`` or ``triton``."""
        ...

    def map_rows(self, fn: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """``fn`` over the leading dimension of the inputs: [n, ...] each -> [n, ...]."""
        ...

    def pack(self, weight: Tensor) -> Tensor:
        """A weight [out, in] in the memory order that ``linear`` reads best; same shape and values."""
        ...

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x @ weight.T``. x: [n, in], weight: [out, in] -> [n, out]."""
        ...

    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """One product per head. x: [n, H, d], weight: [H, d, c] -> [n, H, c]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm of each row. x: [n, d], weight: [d] -> [n, d]."""
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Layer norm of each row. x: [n, d], weight, bias: [d] -> [n, d]."""
        ...

    def index_scores(
        self,
        q: Tensor,
        weights: Tensor,
        pages: KeyPages,
        row_segment: Tensor,
        visible: Tensor,
        most: int,
        scale: float,
    ) -> Tensor:
        """Scores of every row against the keys of its segment: [n, most], undefined beyond
        ``visible``. A score's bits depend on its row and key only.

        q: [n, H, d], weights: [n, H]. row_segment: int64 [n], the row's segment in ``pages``, rows
        of a segment consecutive. visible: int64 [n], keys that a row sees; most: at least their
        maximum, known on the host. score = sum_h weights_h * relu(q_h . key * scale).
        """
        ...

    def index_top_k(
        self,
        q: Tensor,
        weights: Tensor,
        pages: KeyPages,
        row_segment: Tensor,
        visible: Tensor,
        most: int,
        k: int,
        scale: float,
    ) -> Tensor:
        """The k highest-scored entries of each row, ties to the lowest: int64 [n, k], ascending, -1
        after the last. Arguments as in ``index_scores``."""
        ...

    def sparse_mla(
        self,
        query: Tensor,
        view: Tensor,
        locations: Tensor,
        valid: Tensor,
        value_width: int,
        scale: float,
    ) -> Tensor:
        """Attention over selected rows: [n, H, value_width].

        query: [n, H, w]. view: [F, per, w], one layer's rows in the arena. locations: int64 [n, k],
        frame * per + place; valid: bool [n, k]. What lies where ``valid`` is False does not matter,
        NaN included; its location must be one of the arena. value_width: leading columns of a row
        that are the value.
        """
        ...


@dataclass(frozen=True, slots=True)
class ReferenceOps:
    """Plain torch in fixed row tiles (``kernels/tiling.py``), on any device."""

    tiling: Tiling
    name: str = REFERENCE

    def map_rows(self, fn: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        return self.tiling.map_rows(fn, *inputs)

    def pack(self, weight: Tensor) -> Tensor:
        return weight

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("nhd,hdc->nhc", x, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return elementwise.rms_norm(x, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return elementwise.layer_norm(x, weight, bias, eps)

    def index_scores(
        self,
        q: Tensor,
        weights: Tensor,
        pages: KeyPages,
        row_segment: Tensor,
        visible: Tensor,
        most: int,
        scale: float,
    ) -> Tensor:
        scores = q.new_zeros(q.shape[0], most, dtype=torch.float32)
        for segment, own in segments(row_segment):
            seen = int(visible[own].max())
            keys = pages.keys(segment, seen).float()
            scores[own, :seen] = indexer.index_scores(
                pages.queries(q[own]), weights[own].float(), keys, scale, self.tiling
            )
        return scores

    def index_top_k(
        self,
        q: Tensor,
        weights: Tensor,
        pages: KeyPages,
        row_segment: Tensor,
        visible: Tensor,
        most: int,
        k: int,
        scale: float,
    ) -> Tensor:
        chosen = indexer.all_visible(visible, k)
        if most <= k:
            return chosen
        for segment, own in segments(row_segment):
            seen = int(visible[own].max())
            if seen <= k:
                continue  # every row sees at most k entries: it takes them all
            keys = pages.keys(segment, seen).float()
            queries, own_weights = pages.queries(q[own]), weights[own].float()
            scores = indexer.index_scores(queries, own_weights, keys, scale, self.tiling)
            chosen[own] = indexer.top_k(scores, visible[own], k)
        return chosen

    def sparse_mla(
        self,
        query: Tensor,
        view: Tensor,
        locations: Tensor,
        valid: Tensor,
        value_width: int,
        scale: float,
    ) -> Tensor:
        rows = attention.rows_at(view, locations, value_width)
        if not bool(valid.all()):  # a weight of 0 does not cover NaN
            rows = rows.masked_fill(~valid[..., None], 0.0)
        summed = attention.sparse_mla(query.float(), rows, valid, value_width, scale, self.tiling)
        return summed.to(query.dtype)


def segments(row_segment: Tensor) -> Iterator[tuple[int, slice]]:
    """Each segment's number and its rows. row_segment: int64 [n], equal numbers side by side."""
    start = 0
    for segment, rows in groupby(row_segment.tolist()):
        count = len(list(rows))
        yield segment, slice(start, start + count)
        start += count


def make_ops(backend: str) -> Ops:
    """The operations of a backend that ``choose_backend`` returned."""
    if backend == REFERENCE:
        return ReferenceOps(Tiling())
    from .triton.ops import TritonOps

    return TritonOps()
