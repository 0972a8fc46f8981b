"""Norms of rows: a small fixed block of whole rows per program, so each sum has one order.

Bytes to move: every row in and out once (8 * n * width).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import FUSION, blocks, power_of_two

# Values of one program. At width 256 that is 8 rows, two programs for a decode step of 16.
BLOCK = 2048


# Pointers and strides are not specialised: their alignment would change how a row is spread over
# threads, and with it the order of its sum.
@triton.jit(do_not_specialize=["x", "weight", "bias", "out", "n", "x_row", "eps"])
def _norm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    x_row: tl.tensor,
    eps: tl.tensor,
    centre: tl.constexpr,
    width: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    mask = (row[:, None] < n) & (column[None, :] < width)
    value = tl.load(x + row[:, None] * x_row + column[None, :], mask=mask, other=0.0)
    if centre:
        mean = tl.sum(value, axis=1) / width
        value = tl.where(mask, value - mean[:, None], 0.0)
    variance = tl.sum(value * value, axis=1) / width
    value = value * tl.rsqrt(variance + eps)[:, None]
    value *= tl.load(weight + column, mask=column < width, other=0.0)[None, :]
    if centre:
        value += tl.load(bias + column, mask=column < width, other=0.0)[None, :]
    tl.store(out + row[:, None] * width + column[None, :], value, mask=mask)


def _norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    n, width = x.shape
    out = torch.empty(n, width, dtype=dtype, device=x.device)
    if out.numel() == 0:
        return out
    if x.stride(1) != 1:
        x = x.contiguous()
    columns = power_of_two(width)
    rows = max(1, BLOCK // columns)
    _norm_kernel[(blocks(n, rows),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        n,
        x.stride(0),
        eps,
        centre=bias is not None,
        width=width,
        ROWS=rows,
        WIDTH=columns,
        num_warps=4 if columns <= BLOCK else 8,
        **FUSION,
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Root-mean-square norm of each row. x: [n, d], any row stride; weight: [d]; float32 -> [n, d] of
    ``dtype``."""
    return _norm(x, weight, None, eps, dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm of each row. x: [n, d], any row stride; weight, bias: [d]; float32 -> [n, d]."""
    return _norm(x, weight, bias, eps)
