"""The Triton backend of a bfloat16 model: products on tensor cores, and what lies between them fused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..indexer import KeyPages
from ..latents import LatentNorms
from ..packing import Packed
from .index_scores import index_scores
from .indexer import index_top_k
from .latents import latents, turn_queries
from .norms import rms_norm
from .ops import TritonOps
from .sparse_mla import sparse_mla
from .tensor_core import padded, product


@dataclass(frozen=True, slots=True)
class Bf16Ops(TritonOps):
    """``kvpolicy.kernels.ops.Ops`` in bfloat16. Index scores and attention run on tensor cores too,
    except over keys and rows that are kept in float32: those take widened queries."""

    dtype: torch.dtype = torch.bfloat16

    def pack(self, *weights: Tensor) -> Packed:
        """All joined: one launch computes them."""
        joined = weights[0] if len(weights) == 1 else torch.cat(weights)
        return Packed((padded(joined),), tuple(weight.shape[0] for weight in weights))

    def pack_heads(self, weight: Tensor) -> Tensor:
        """Inner values of an output side by side in memory."""
        return padded(weight.transpose(1, 2).contiguous()).transpose(1, 2)

    def products(self, x: Tensor, weights: Packed, narrow: bool = False) -> tuple[Tensor, ...]:
        dtype = torch.bfloat16 if narrow else torch.float32
        joined = product(x[:, None], weights.parts[0][None], dtype)[:, 0]
        return tuple(joined.split(weights.widths, dim=1))

    def linear(self, x: Tensor, weight: Packed, residual: Tensor | None = None) -> Tensor:
        added = None if residual is None else residual[:, None]
        return product(x[:, None], weight.parts[0][None], torch.float32, residual=added)[:, 0]

    def gated(self, x: Tensor, weights: Packed) -> Tensor:
        both = weights.parts[0].unflatten(0, (2, -1))
        return product(x[:, None], both, torch.bfloat16, gated=True)[:, 0]

    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return product(x, weight.transpose(1, 2), torch.bfloat16)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps, torch.bfloat16)

    def latents(
        self, parts: Sequence[Tensor], norms: LatentNorms, table: Tensor, positions: Tensor
    ) -> tuple[Tensor, ...]:
        return latents(parts, norms, table, positions)

    def queries(
        self,
        parts: Sequence[Tensor],
        key_up: Tensor,
        index_heads: int,
        table: Tensor,
        positions: Tensor,
    ) -> tuple[Tensor, ...]:
        n, (heads, nope, rank) = parts[0].shape[0], key_up.shape
        query = parts[0].new_empty(n, heads, rank + 2 * table.shape[2])
        q = parts[0].unflatten(1, (heads, -1))[..., :nope]
        product(q, key_up.transpose(1, 2), torch.bfloat16, out=query[..., :rank])
        return turn_queries(parts, query, nope, index_heads, table, positions)

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
        q = _beside(q, pages.view)
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
        q = _beside(q, pages.view)
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
        query = _beside(query, view)
        return sparse_mla(query, view, locations, valid, value_width, scale).to(torch.bfloat16)


def _beside(query: Tensor, view: Tensor) -> Tensor:
    """The query as the kernels for rows or keys of this format read it."""
    return query.float() if view.dtype == torch.float32 else query
