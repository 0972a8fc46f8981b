"""What tensor-core attention reads beside rows, made once a call: offsets of rows, float16 queries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import FUSION, aligned, blocks, power_of_two


@triton.jit
def _offsets(
    locations: tl.tensor,
    valid: tl.tensor,
    offsets: tl.tensor,
    k: tl.constexpr,
    K: tl.constexpr,
    PER: tl.constexpr,
    FRAME: tl.constexpr,
    ROW: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Where selected rows start in the arena, -1 where none is: once, not in each pass of a loop.
    K: k rounded up to whole parts. FRAME, ROW: strides in the unit of the result. WIDE: the arena
    has 2^31 items or more."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = tl.load(valid + row * k + place, mask=place < k, other=0) != 0
    location = tl.load(locations + row * k + place, mask=place < k, other=0)
    if not WIDE:  # 32-bit division does
        location = location.to(tl.int32)
    offset = (location // PER).to(tl.int64) * FRAME + (location % PER).to(tl.int64) * ROW
    tl.store(offsets + row * K + place, tl.where(there, offset, -1), mask=place < K)


@triton.jit
def _queries(
    query: tl.tensor,
    narrow: tl.tensor,
    factors: tl.tensor,
    width: tl.constexpr,
    value_width: tl.constexpr,
) -> None:
    """Latent queries as float16, moved by a power of two so that the largest of a head is in
    [2^14, 2^15); factors: what undoes it."""
    head = tl.program_id(0).to(tl.int64)
    value = tl.arange(0, value_width)
    wide = tl.load(query + head * width + value).to(tl.float32)
    exponent = (tl.max(tl.abs(wide), axis=0).to(tl.int32, bitcast=True) >> 23) - 127
    exponent = tl.minimum(tl.maximum(exponent, -100), 120)
    moved = wide * ((141 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(narrow + head * value_width + value, moved.to(tl.float16))
    tl.store(factors + head, ((113 + exponent) << 23).to(tl.float32, bitcast=True))


def prepare_offsets(
    view: Tensor, locations: Tensor, valid: Tensor, padded: int, unit: int
) -> Tensor:
    """Offsets of rows in ``view``, in units of its items; -1 where none is: int64 [n, padded]."""
    n, k = locations.shape
    offsets = torch.empty(n, padded, dtype=torch.int64, device=view.device)
    block = min(1024, power_of_two(padded))
    _offsets[(n, blocks(padded, block))](
        aligned(locations.contiguous()),
        aligned(valid.contiguous().view(torch.uint8)),
        offsets,
        k=k,
        K=padded,
        PER=view.shape[1],
        FRAME=view.stride(0) // unit,
        ROW=view.stride(1) // unit,
        WIDE=view.shape[0] * view.shape[1] >= 2**31,
        BLOCK=block,
        num_warps=4,
        **FUSION,
    )
    return offsets


def prepare_queries(query: Tensor, value_width: int) -> tuple[Tensor, Tensor]:
    """Latent queries [n, H, value_width] as float16, and the factors float32 [n, H] that undo their
    scaling. query: bf16 [n, H, w], contiguous."""
    n, heads, width = query.shape
    narrow = query.new_empty(n, heads, value_width, dtype=torch.float16)
    factors = query.new_empty(n, heads, dtype=torch.float32)
    _queries[(n * heads,)](
        query, narrow, factors, width=width, value_width=value_width, num_warps=1, **FUSION
    )
    return narrow, factors
