"""Batch-invariant products with IEEE float32 dots.

A tile of ROWS x COLUMNS outputs is one program; it walks the inner width from 0 in steps of INNER,
adding in that order. Tiles and order follow from the weight's shape, never from the row count, so a
row's bits are a function of the row and the weight. (The idea: "Defeating nondeterminism in LLM
inference", Thinking Machines Lab, 2025.)

Bytes to move: every weight once (4 * out * in), rows in and out once. From 17 rows on, a weight tile
is read again for each 16 rows, mostly from L2: row tiles of one column tile run side by side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import FUSION, aligned, blocks, power_of_two

# 16 rows are one decode step of the default engine. A warp's share of 16 x 32 outputs is 4 x 4 each,
# the largest that the compiler gives a float32 dot.
ROWS, COLUMNS, INNER, WARPS = 16, 64, 32, 4


@triton.jit(do_not_specialize=["n"])
def _linear_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    x_row: tl.tensor,
    x_head: tl.tensor,
    weight_head: tl.tensor,
    weight_column: tl.tensor,
    weight_inner: tl.tensor,
    heads: tl.constexpr,
    n_in: tl.constexpr,
    n_out: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(2).to(tl.int64)
    inner = tl.arange(0, INNER)
    in_rows, in_columns = row[:, None] < n, column[None, :] < n_out
    x_at = x + head * x_head + row[:, None] * x_row + inner[None, :]
    weight_at = weight + head * weight_head + column[None, :] * weight_column
    weight_at += inner[:, None] * weight_inner
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, n_in, INNER):
        rest = inner < n_in - start
        a = tl.load(x_at + start, mask=in_rows & rest[None, :], other=0.0)
        b = tl.load(weight_at + start * weight_inner, mask=in_columns & rest[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    at = out + (row[:, None] * heads + head) * n_out + column[None, :]
    tl.store(at, total, mask=in_rows & in_columns)


def _product(x: Tensor, weight: Tensor, heads: int, n_in: int, n_out: int) -> Tensor:
    """x: [n, heads, n_in] by strides; weight: [heads, n_in, n_out] by strides -> [n, heads, n_out]."""
    n = x.shape[0]
    out = torch.empty(n, heads, n_out, dtype=torch.float32, device=x.device)
    if out.numel() == 0:
        return out
    # Before the strides are read: the copy of a slice has its own.
    x, weight = aligned(x if x.stride(2) == 1 else x.contiguous()), aligned(weight)
    grid = (blocks(n, ROWS), blocks(n_out, COLUMNS), heads)
    _linear_kernel[grid](
        x,
        weight,
        out,
        n,
        x.stride(0),
        x.stride(1),
        weight.stride(0),
        weight.stride(2),
        weight.stride(1),
        heads=heads,
        n_in=n_in,
        n_out=n_out,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        INNER=min(INNER, power_of_two(n_in, least=16)),
        num_warps=WARPS,
        **FUSION,
    )
    return out


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T``. x: [n, in], any row stride; weight: [out, in]; float32 -> [n, out] float32."""
    n_out, n_in = weight.shape
    return _product(x[:, None], weight.T[None], 1, n_in, n_out)[:, 0]


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """One product per head. x: [n, H, d], any row and head stride; weight: [H, d, c]; float32 ->
    [n, H, c] float32."""
    heads, n_in, n_out = weight.shape
    return _product(x, weight, heads, n_in, n_out)
