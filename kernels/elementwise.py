"""Norms, activation and rotary embedding, written so that an element's bits depend on its row only.

Reductions run along a row of fixed width. exp, cos and sin go through one vectorised routine whose
tail uses the same approximation; ``silu`` is spelled out with exp because the fused CPU operator may
use another one there. ``choose_tiling`` checks the whole on the machine at hand.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of each row in float32. x: [n, d], weight: [d] -> [n, d]."""
    wide = x.float()
    scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm of each row in float32. x: [n, d], weight, bias: [d] -> [n, d]."""
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps)
    return (centred * scale).to(x.dtype) * weight + bias


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, element-wise."""
    return gate / (1.0 + torch.exp(-gate)) * up


def rope_table(positions: int, dim: int, theta: float, device: torch.device) -> Tensor:
    """cos and sin of every position: [2, positions, dim / 2] float32.

    angle = fp32(position) * fp32(theta^(-2i/dim)), the rounding that the public implementations of
    GLM-5 and DeepSeek-V3.2 use. Made once for all positions, so a position's bits never change.
    """
    inv_freq = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    angle = torch.arange(positions, dtype=torch.float32)[:, None] * inv_freq
    return torch.stack([angle.cos(), angle.sin()]).to(device)


def apply_rope(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """Interleaved rotary embedding: the pair (x[2i], x[2i+1]) turns by the i-th angle.

    x: [n, ..., dim]; table: [2, P, dim/2]; positions: [n] int64. Returned halves-first: all first
    components, then all second ones, the same permutation for queries and keys.
    """
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (x.shape[-1] // 2,)
    cos, sin = table[0][positions].view(shape), table[1][positions].view(shape)
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
