"""Sparse multi-head latent attention that gathers its rows inside the kernel (absorbed form,
DeepSeek-V2, section 2.1.2; softmax kept on line, "FlashAttention-2", 2023).

Here: float32 queries, in IEEE float32. bf16 queries and 8-bit rows go to tensor cores
(``sparse_mla_tensor.py``).

One program attends HEADS heads of one query row over its k selected rows, ROWS at a time, in
ascending order of the selection: one fixed order of sums per row, whatever the batch. A row's
leading ``value_width`` columns are its value, all of it is its key. Scores are added up over slices
of CHANNELS columns, so that wide rows (576 values) do not need all their columns in registers.

Bytes to move: k rows of w values per query row, once for every 16 heads (again through L2 for the
values), 8 * k for locations, queries in and results out once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import sparse_mla_tensor as tensor
from .launch import FUSION, aligned, blocks, power_of_two

HEADS, ROWS, CHANNELS = 16, 32, 32
# Below any score, and far enough from the limits of float32 that differences stay finite.
LOWEST = tl.constexpr(-1e30)


@triton.jit(do_not_specialize=["per"])
def _attend_kernel(
    query: tl.tensor,
    view: tl.tensor,
    locations: tl.tensor,
    valid: tl.tensor,
    out: tl.tensor,
    frame_stride: tl.tensor,
    row_stride: tl.tensor,
    scale: tl.tensor,
    per: tl.tensor,
    heads: tl.constexpr,
    width: tl.constexpr,
    value_width: tl.constexpr,
    k: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    VALUES: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    own_head = head[:, None] < heads
    q_at = query + (row * heads + head[:, None]) * width
    channel, value = tl.arange(0, CHANNELS), tl.arange(0, VALUES)
    best = tl.full([HEADS], LOWEST, tl.float32)
    mass = tl.zeros([HEADS], tl.float32)
    total = tl.zeros([HEADS, VALUES], tl.float32)
    for start in range(0, k, ROWS):
        place = start + tl.arange(0, ROWS)
        there = tl.load(valid + row * k + place, mask=place < k, other=0) != 0
        location = tl.load(locations + row * k + place, mask=there, other=0)
        row_at = view + (location // per) * frame_stride + (location % per) * row_stride
        scores = tl.zeros([HEADS, ROWS], tl.float32)
        for first in range(0, width, CHANNELS):
            column = first + channel
            a = tl.load(
                q_at + column[None, :], mask=own_head & (column[None, :] < width), other=0.0
            )
            b = tl.load(
                row_at[None, :] + column[:, None],
                mask=there[None, :] & (column[:, None] < width),
                other=0.0,
            )
            scores = tl.dot(a, b.to(tl.float32), scores, input_precision="ieee")
        scores = tl.where(there[None, :], scores * scale, LOWEST)
        highest = tl.maximum(best, tl.max(scores, axis=1))
        weight = tl.where(there[None, :], tl.exp(scores - highest[:, None]), 0.0)
        kept = tl.exp(best - highest)
        mass = mass * kept + tl.sum(weight, axis=1)
        values = tl.load(
            row_at[:, None] + value[None, :],
            mask=there[:, None] & (value[None, :] < value_width),
            other=0.0,
        )
        total = tl.dot(weight, values.to(tl.float32), total * kept[:, None], input_precision="ieee")
        best = highest
    total = total / tl.where(mass > 0.0, mass, 1.0)[:, None]
    out_at = out + (row * heads + head[:, None]) * value_width + value[None, :]
    tl.store(out_at, total, mask=own_head & (value[None, :] < value_width))


def sparse_mla(
    query: Tensor, view: Tensor, locations: Tensor, valid: Tensor, value_width: int, scale: float
) -> Tensor:
    """Attention of n query rows over k selected rows each.

    query: float32 or bf16 [n, H, w] in row space. view: [F, per, w], the rows of one layer as they
    lie in the arena, float32, bf16, or uint8 records (``kernels/fp8.py``) instead of w values; any
    frame and row stride. locations: int64 or int32 [n, k], frame * per + place. valid: bool [n, k];
    rows that are not valid are not read. value_width: leading columns that are the value. Returns
    [n, H, value_width] in the query's dtype; zeros for a row without valid entries.
    """
    if view.dtype == torch.uint8 or (view.dtype == query.dtype == torch.bfloat16):
        return tensor.sparse_mla(query, view, locations, valid, value_width, scale)
    query = query.float()
    n, heads, width = query.shape
    k = locations.shape[1]
    out = torch.empty(n, heads, value_width, dtype=torch.float32, device=query.device)
    if out.numel() == 0:
        return out
    tile = min(HEADS, power_of_two(heads))
    values = power_of_two(value_width)
    _attend_kernel[(n, blocks(heads, tile))](
        aligned(query.contiguous()),
        view,
        aligned(locations.contiguous()),
        aligned(valid.contiguous().view(torch.uint8)),
        out,
        view.stride(0),
        view.stride(1),
        scale,
        view.shape[1],
        heads=heads,
        width=width,
        value_width=value_width,
        k=k,
        HEADS=tile,
        ROWS=min(ROWS, power_of_two(k, least=16)),
        CHANNELS=min(CHANNELS, power_of_two(width, least=16)),
        VALUES=values,
        num_warps=4 if tile * values <= 4096 else 8,
        **FUSION,
    )
    return out
