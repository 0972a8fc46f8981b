"""The Triton backend of a float32 model: rows untouched by their neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import latents
from ..backend import TRITON
from ..elementwise import swiglu
from ..indexer import KeyPages
from ..latents import LatentNorms, Primitives
from ..packing import Packed
from .draft_attention import draft_attention
from .index_scores import index_scores
from .indexer import index_top_k
from .linear import head_linear, linear
from .norms import layer_norm, rms_norm
from .sparse_mla import sparse_mla

_KERNELS = Primitives(rms_norm, layer_norm, head_linear)


@dataclass(frozen=True, slots=True)
class TritonOps:
    """``kvpolicy.kernels.ops.Ops`` in float32, with IEEE dots."""

    dtype: torch.dtype = torch.float32
    name: str = TRITON

    def pack(self, *weights: Tensor) -> Packed:
        """Each weight with its columns of outputs side by side in memory (same shape): threads of a
        tile then read neighbours, in shared memory too."""
        parts = tuple(weight.T.contiguous().T for weight in weights)
        return Packed(parts, tuple(weight.shape[0] for weight in weights))

    def pack_heads(self, weight: Tensor) -> Tensor:
        return weight.contiguous()

    def products(self, x: Tensor, weights: Packed, narrow: bool = False) -> tuple[Tensor, ...]:
        return tuple(linear(x, weight) for weight in weights.parts)

    def linear(self, x: Tensor, weight: Packed, residual: Tensor | None = None) -> Tensor:
        out = linear(x, weight.parts[0])
        return out if residual is None else residual + out

    def gated(self, x: Tensor, weights: Packed) -> Tensor:
        gate, up = weights.parts
        return swiglu(linear(x, gate), linear(x, up))

    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return head_linear(x, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def latents(
        self, parts: Sequence[Tensor], norms: LatentNorms, table: Tensor, positions: Tensor
    ) -> tuple[Tensor, ...]:
        return latents.latents(parts, norms, table, positions, _KERNELS)

    def queries(
        self,
        parts: Sequence[Tensor],
        key_up: Tensor,
        index_heads: int,
        table: Tensor,
        positions: Tensor,
    ) -> tuple[Tensor, ...]:
        return latents.queries(parts, key_up, index_heads, table, positions, _KERNELS)

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
        return index_scores(q, weights, pages, row_segment, visible, most, scale)

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
        return index_top_k(q, weights, pages, row_segment, visible, most, k, scale)

    def sparse_mla(
        self,
        query: Tensor,
        view: Tensor,
        locations: Tensor,
        valid: Tensor,
        value_width: int,
        scale: float,
    ) -> Tensor:
        return sparse_mla(query, view, locations, valid, value_width, scale)

    def draft_attention(
        self,
        query: Tensor,
        context: Tensor,
        key: Tensor,
        value: Tensor,
        visible: Tensor,
        causal: bool,
    ) -> Tensor:
        return draft_attention(query, context, key, value, visible, causal).to(self.dtype)
