"""Attention of a drafter's block over the window of committed tokens and over itself (softmax kept on
line, "FlashAttention-2", 2023).

One program per request and key head: all rows of the block and all query heads that share the key, so
that a key is read once. Keys come in tiles of KEYS in the order of the columns, then the block's own:
one fixed order of sums per request, whatever the batch. IEEE float32.

Bytes to move: C * 2 * d numbers of the window per request and key head, C * B bytes of mask.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import FUSION, aligned, power_of_two

KEYS = 64
# Below any score, and far enough from the limits of float32 that differences stay finite.
LOWEST = tl.constexpr(-1e30)


@triton.jit
def _attend(q, keys, values, seen, best, mass, total, scale):
    """One tile: q [R, D]; keys, values [N, D]; seen [R, N]."""
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
    scores = tl.where(seen, scores * scale, LOWEST)
    highest = tl.maximum(best, tl.max(scores, axis=1))
    weight = tl.where(seen, tl.exp(scores - highest[:, None]), 0.0)
    kept = tl.exp(best - highest)
    mass = mass * kept + tl.sum(weight, axis=1)
    total = tl.dot(weight, values, total * kept[:, None], input_precision="ieee")
    return highest, mass, total


@triton.jit(do_not_specialize=["columns"])
def _draft_attention_kernel(
    query: tl.tensor,
    context: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    visible: tl.tensor,
    out: tl.tensor,
    columns: tl.tensor,
    request_stride: tl.tensor,
    column_stride: tl.tensor,
    scale: tl.tensor,
    block: tl.constexpr,
    heads: tl.constexpr,
    groups: tl.constexpr,
    dim: tl.constexpr,
    CAUSAL: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    OWN: tl.constexpr,
    DIM: tl.constexpr,
) -> None:
    request, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    each: tl.constexpr = heads // groups
    # Row i of the tile: query head i // block of the group, row i % block of the block.
    row, channel = tl.arange(0, ROWS), tl.arange(0, DIM)
    there, at = row < each * block, row % block
    inside = channel < dim
    place = (request * block + at) * heads + group * each + row // block
    both = there[:, None] & inside[None, :]
    q = tl.load(query + place[:, None] * dim + channel[None, :], mask=both, other=0.0)
    best = tl.full([ROWS], LOWEST, tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, DIM], tl.float32)
    for start in range(0, columns, KEYS):
        column = start + tl.arange(0, KEYS)
        seen = tl.load(
            visible + (request * block + at)[:, None] * columns + column[None, :],
            mask=there[:, None] & (column[None, :] < columns),
            other=0,
        )
        read = (tl.max(seen, axis=0) != 0)[:, None] & inside[None, :]
        from_ = context + request * request_stride + column[:, None] * column_stride
        from_ += group * dim + channel[None, :]
        keys = tl.load(from_, mask=read, other=0.0).to(tl.float32)
        values = tl.load(from_ + groups * dim, mask=read, other=0.0).to(tl.float32)
        best, mass, total = _attend(q, keys, values, seen != 0, best, mass, total, scale)
    own = tl.arange(0, OWN)
    from_own = ((request * block + own)[:, None] * groups + group) * dim + channel[None, :]
    read = (own < block)[:, None] & inside[None, :]
    keys = tl.load(key + from_own, mask=read, other=0.0)
    values = tl.load(value + from_own, mask=read, other=0.0)
    seen = there[:, None] & (own[None, :] < block)
    if CAUSAL:
        seen = seen & (own[None, :] <= at[:, None])
    best, mass, total = _attend(q, keys, values, seen, best, mass, total, scale)
    total = total / tl.where(mass > 0.0, mass, 1.0)[:, None]
    tl.store(out + place[:, None] * dim + channel[None, :], total, mask=both)


def draft_attention(
    query: Tensor, context: Tensor, key: Tensor, value: Tensor, visible: Tensor, causal: bool
) -> Tensor:
    """See ``kvpolicy.kernels.draft_attention.draft_attention``. context: float32 or bf16, any stride of
    requests and columns."""
    r, block, heads, dim = query.shape
    groups = key.shape[2]
    out = torch.empty(r, block, heads, dim, dtype=torch.float32, device=query.device)
    if out.numel() == 0:
        return out
    context = context if context.stride(2) == 1 else context.contiguous()
    _draft_attention_kernel[(r, groups)](
        aligned(query.float().contiguous()),
        context,
        aligned(key.float().contiguous()),
        aligned(value.float().contiguous()),
        aligned(visible.contiguous().view(torch.uint8)),
        out,
        context.shape[1],
        context.stride(0),
        context.stride(1),
        dim**-0.5,
        block=block,
        heads=heads,
        groups=groups,
        dim=dim,
        CAUSAL=causal,
        ROWS=power_of_two(heads // groups * block, least=16),
        KEYS=KEYS,
        OWN=power_of_two(block, least=16),
        DIM=power_of_two(dim, least=16),
        num_warps=4,
        **FUSION,
    )
    return out
