"""Between the products of a layer: norms and rotary embedding, row by row (multi-head latent attention,
DeepSeek-V2, section 2.1.2; lightning indexer, DeepSeek-V3.2).

Composed of a backend's primitives; a backend may fuse each function into one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import elementwise
from .elementwise import apply_rope


def head_product(x: Tensor, weight: Tensor) -> Tensor:
    """One product per head. x: [n, H, d], weight: [H, d, c] -> [n, H, c]."""
    return torch.einsum("nhd,hdc->nhc", x, weight)


@dataclass(frozen=True, slots=True)
class Primitives:
    """The parts that a backend has kernels for."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    head_product: Callable[[Tensor, Tensor], Tensor]


PLAIN = Primitives(elementwise.rms_norm, elementwise.layer_norm, head_product)


@dataclass(frozen=True, slots=True)
class LatentNorms:
    """Weights of the norms behind a layer's first products, float32. key, key_bias: of the index key,
    None in a layer that reuses a selection."""

    query: Tensor
    row: Tensor
    key: Tensor | None
    key_bias: Tensor | None
    eps: float


def latents(
    parts: Sequence[Tensor],
    norms: LatentNorms,
    table: Tensor,
    positions: Tensor,
    use: Primitives = PLAIN,
) -> tuple[Tensor, ...]:
    """What attention and indexer start from: (query latent, row) or (..., index key, head weights).

    parts: the products of a row of the hidden state: query latent [n, q_rank], row [n, kv_rank +
    rope], and in a layer that chooses index key [n, dim] and head weights [n, H]. table, positions:
    see ``apply_rope``. The latents are normed, the last ``rope`` values of the row and the first of the
    key rotated, the head weights scaled by H ** -0.5. All float32.
    """
    rank, eps = norms.row.shape[0], norms.eps
    latent = use.rms_norm(parts[1][:, :rank], norms.row, eps)
    row = torch.cat([latent, apply_rope(parts[1][:, rank:], table, positions)], dim=-1)
    query = use.rms_norm(parts[0], norms.query, eps)
    if norms.key is None or norms.key_bias is None:
        return query, row
    key = turn_front(use.layer_norm(parts[2], norms.key, norms.key_bias, eps), table, positions)
    return query, row, key, parts[3] * parts[3].shape[1] ** -0.5


def queries(
    parts: Sequence[Tensor],
    key_up: Tensor,
    index_heads: int,
    table: Tensor,
    positions: Tensor,
    use: Primitives = PLAIN,
) -> tuple[Tensor, ...]:
    """Queries in row space [n, H, kv_rank + rope], and of the indexer [n, index_heads, dim].

    parts: the products of the query latent, [n, H * (nope + rope)] and in a layer that chooses
    [n, index_heads * dim]. key_up: [H, nope, kv_rank].
    """
    n, (heads, nope, _) = parts[0].shape[0], key_up.shape
    q = parts[0].view(n, heads, -1)
    absorbed = use.head_product(q[..., :nope], key_up)
    query = torch.cat([absorbed, apply_rope(q[..., nope:], table, positions)], dim=-1)
    if len(parts) == 1:
        return (query,)
    return query, turn_front(parts[1].view(n, index_heads, -1), table, positions)


def turn_front(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of the first values of the last dimension, as many as the table has."""
    rope = 2 * table.shape[-1]
    return torch.cat([apply_rope(x[..., :rope], table, positions), x[..., rope:]], dim=-1)
