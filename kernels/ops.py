"""The seam between a model and its kernels: what a backend computes, and the plain-torch one.

Every operation gives a row the same bits whatever rows stand beside it.

A backend computes in one dtype, float32 or bfloat16: that of weights and of what products read.
*Narrow* below means that dtype. In bfloat16 a product adds up in float32 and its result is rounded
once, where it enters the next product or attention; residual stream, norms, softmax, index scores
and logits are float32, and so are the rows and keys handed to the memory, which has a format of its own.
Cached rows and keys may also be 8-bit records (``fp8.py``); attention returns the queries' dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from . import draft_attention as drafting
from . import elementwise, indexer, latents
from . import sparse_mla as attention
from .backend import REFERENCE
from .indexer import KeyPages
from .latents import LatentNorms
from .packing import Packed
from .tiling import Tiling


class Ops(Protocol):
    """Operations of a sparse-attention decoder. n: rows of a step, of any number of segments."""

    @property
    def name(self) -> str:
        """The backend's name: ``reference`` or ``triton``."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """What "narrow" is: float32 or bfloat16."""
        ...

    def pack(self, *weights: Tensor) -> Packed:
        """Matrices [out, in] of one inner width, as ``products`` reads them."""
        ...

    def pack_heads(self, weight: Tensor) -> Tensor:
        """A weight [H, d, c] in the memory order that head products read; same shape and values."""
        ...

    def products(self, x: Tensor, weights: Packed, narrow: bool = False) -> tuple[Tensor, ...]:
        """``x @ weight.T`` of each weight: [n, out] each, any row stride. x: narrow [n, in].

        narrow: round the results to the narrow dtype; otherwise they are float32.
        """
        ...

    def linear(self, x: Tensor, weight: Packed, residual: Tensor | None = None) -> Tensor:
        """The product with one weight, float32 [n, out], added to ``residual`` if there is one."""
        ...

    def gated(self, x: Tensor, weights: Packed) -> Tensor:
        """``silu(x @ gate.T) * (x @ up.T)``, narrow [n, width]. weights: gate and up."""
        ...

    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """One product per head, narrow [n, H, c]. x: narrow [n, H, d]; weight: [H, d, c] from
        ``pack_heads``."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm of each row, narrow. x: [n, d], weight: [d], float32."""
        ...

    def latents(
        self, parts: Sequence[Tensor], norms: LatentNorms, table: Tensor, positions: Tensor
    ) -> tuple[Tensor, ...]:
        """See ``kernels.latents.latents``. The query latent is narrow, the others float32."""
        ...

    def queries(
        self,
        parts: Sequence[Tensor],
        key_up: Tensor,
        index_heads: int,
        table: Tensor,
        positions: Tensor,
    ) -> tuple[Tensor, ...]:
        """See ``kernels.latents.queries``. All narrow; ``key_up`` from ``pack_heads``."""
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

        q: narrow [n, H, d], weights: float32 [n, H]. row_segment: int64 [n], the row's segment in
        ``pages``, rows of a segment consecutive. visible: int64 [n], keys that a row sees; most: at
        least their maximum, known on the host. score = sum_h weights_h * relu(q_h . key * scale).
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
        """Attention over selected rows: [n, H, value_width], of the query's dtype.

        query: narrow [n, H, w]. view: [F, per, w], one layer's rows in the arena. locations: int64 [n, k],
        frame * per + place; valid: bool [n, k]. What lies where ``valid`` is False does not matter,
        NaN included; its location must be one of the arena. value_width: leading columns of a row
        that are the value.
        """
        ...

    def draft_attention(
        self,
        query: Tensor,
        context: Tensor,
        key: Tensor,
        value: Tensor,
        visible: Tensor,
        causal: bool,
    ) -> Tensor:
        """See ``kernels.draft_attention.draft_attention``. The result is narrow."""
        ...


@dataclass(frozen=True, slots=True)
class ReferenceOps:
    """Plain torch in fixed row tiles (``kernels/tiling.py``), on any device.

    In bfloat16 a product runs on widened values: each single product is then exact, and the sum is
    float32.
    """

    tiling: Tiling
    dtype: torch.dtype = torch.float32
    name: str = REFERENCE

    def pack(self, *weights: Tensor) -> Packed:
        return Packed(weights, tuple(weight.shape[0] for weight in weights))

    def pack_heads(self, weight: Tensor) -> Tensor:
        return weight.contiguous()

    def products(self, x: Tensor, weights: Packed, narrow: bool = False) -> tuple[Tensor, ...]:
        wide = [part.float() for part in weights.parts]
        dtype = self.dtype if narrow else torch.float32

        def fn(rows: Tensor) -> tuple[Tensor, ...]:
            return tuple(F.linear(rows, weight).to(dtype) for weight in wide)

        return self.tiling.map_rows(fn, x.float())

    def linear(self, x: Tensor, weight: Packed, residual: Tensor | None = None) -> Tensor:
        (out,) = self.products(x, weight)
        return out if residual is None else residual + out

    def gated(self, x: Tensor, weights: Packed) -> Tensor:
        gate, up = (part.float() for part in weights.parts)

        def fn(rows: Tensor) -> Tensor:
            return elementwise.swiglu(F.linear(rows, gate), F.linear(rows, up)).to(self.dtype)

        return self.tiling.map_rows(fn, x.float())

    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = weight.float()
        return self.tiling.map_rows(
            lambda rows: latents.head_product(rows, wide).to(self.dtype), x.float()
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.tiling.map_rows(
            lambda rows: elementwise.rms_norm(rows, weight, eps).to(self.dtype), x
        )

    def latents(
        self, parts: Sequence[Tensor], norms: LatentNorms, table: Tensor, positions: Tensor
    ) -> tuple[Tensor, ...]:
        def fn(at: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
            query, *others = latents.latents(rows, norms, table, at)
            return query.to(self.dtype), *others

        return self.tiling.map_rows(fn, positions, *parts)

    def queries(
        self,
        parts: Sequence[Tensor],
        key_up: Tensor,
        index_heads: int,
        table: Tensor,
        positions: Tensor,
    ) -> tuple[Tensor, ...]:
        wide = key_up.float()

        def fn(at: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
            found = latents.queries(rows, wide, index_heads, table, at)
            return tuple(x.to(self.dtype) for x in found)

        return self.tiling.map_rows(fn, positions, *(part.float() for part in parts))

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

    def draft_attention(
        self,
        query: Tensor,
        context: Tensor,
        key: Tensor,
        value: Tensor,
        visible: Tensor,
        causal: bool,
    ) -> Tensor:
        out = drafting.draft_attention(query, context, key, value, visible, causal)
        return out.to(self.dtype)


def segments(row_segment: Tensor) -> Iterator[tuple[int, slice]]:
    """Each segment's number and its rows. row_segment: int64 [n], equal numbers side by side."""
    start = 0
    for segment, rows in groupby(row_segment.tolist()):
        count = len(list(rows))
        yield segment, slice(start, start + count)
        start += count


def make_ops(backend: str, dtype: torch.dtype = torch.float32) -> Ops:
    """The operations of a backend that ``choose_backend`` returned. dtype: float32 or bfloat16."""
    if backend == REFERENCE:
        return ReferenceOps(Tiling(), dtype)
    if dtype == torch.bfloat16:
        from .triton.bf16_ops import Bf16Ops

        return Bf16Ops()
    from .triton.ops import TritonOps

    return TritonOps()
