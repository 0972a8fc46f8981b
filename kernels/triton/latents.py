"""Norms and rotary embedding between the products of a bf16 layer: one launch for each gap.

A program handles one row of one kind in blocks that follow from the model's widths alone, so a row's
bits do not depend on the others. All arithmetic is float32.

Bytes to move: what is read and written, once; for 128 rows of GLM-5.3 3 MB (latents), 3 MB (queries).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..latents import LatentNorms
from .launch import FUSION, power_of_two

WARPS = 4


@triton.jit
def _root_mean_square(x, weight, out, eps, width: tl.constexpr, WIDTH: tl.constexpr):
    """Norm of one row."""
    i = tl.arange(0, WIDTH)
    value = tl.load(x + i, mask=i < width, other=0.0)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    value = value * scale * tl.load(weight + i, mask=i < width, other=0.0)
    tl.store(out + i, value.to(out.dtype.element_ty), mask=i < width)


# Pointers and strides that a sum is read through are not specialised: their alignment would change how a
# row is spread over threads, and with it the order of the sum.
@triton.jit(do_not_specialize=["query", "row", "key", "query_row", "row_row", "key_row", "eps"])
def _latents_kernel(
    query: tl.tensor,
    row: tl.tensor,
    key: tl.tensor,
    weights: tl.tensor,
    query_norm: tl.tensor,
    row_norm: tl.tensor,
    key_norm: tl.tensor,
    key_bias: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    positions: tl.tensor,
    query_out: tl.tensor,
    row_out: tl.tensor,
    key_out: tl.tensor,
    weights_out: tl.tensor,
    query_row: tl.tensor,
    row_row: tl.tensor,
    key_row: tl.tensor,
    weights_row: tl.tensor,
    eps: tl.tensor,
    head_scale: tl.tensor,
    q_rank: tl.constexpr,
    rank: tl.constexpr,
    half: tl.constexpr,
    dim: tl.constexpr,
    heads: tl.constexpr,
    Q_RANK: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    n, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if part == 0:
        _root_mean_square(
            query + n * query_row, query_norm, query_out + n * q_rank, eps, q_rank, Q_RANK
        )
    else:
        pair = tl.arange(0, HALF)
        there = pair < half
        at = tl.load(positions + n) * half
        cosine = tl.load(cosines + at + pair, mask=there, other=0.0)
        sine = tl.load(sines + at + pair, mask=there, other=0.0)
        if part == 1:
            source, target = row + n * row_row, row_out + n * (rank + 2 * half)
            _root_mean_square(source, row_norm, target, eps, rank, RANK)
            x = tl.load(source + rank + 2 * pair, mask=there, other=0.0)
            y = tl.load(source + rank + 2 * pair + 1, mask=there, other=0.0)
            tl.store(target + rank + pair, x * cosine - y * sine, mask=there)
            tl.store(target + rank + half + pair, y * cosine + x * sine, mask=there)
        else:
            source, target = key + n * key_row, key_out + n * dim
            i = tl.arange(0, DIM)
            value = tl.load(source + i, mask=i < dim, other=0.0)
            mean = tl.sum(value, axis=0) / dim
            value = tl.where(i < dim, value - mean, 0.0)
            scale = tl.rsqrt(tl.sum(value * value, axis=0) / dim + eps)
            weight = tl.load(key_norm + i, mask=i < dim, other=0.0)
            value = value * scale * weight + tl.load(key_bias + i, mask=i < dim, other=0.0)
            tl.store(target + i, value, mask=(i >= 2 * half) & (i < dim))
            first, second = 2 * pair, 2 * pair + 1
            x = (tl.load(source + first, mask=there, other=0.0) - mean) * scale
            y = (tl.load(source + second, mask=there, other=0.0) - mean) * scale
            x = x * tl.load(key_norm + first, mask=there, other=0.0)
            y = y * tl.load(key_norm + second, mask=there, other=0.0)
            x += tl.load(key_bias + first, mask=there, other=0.0)
            y += tl.load(key_bias + second, mask=there, other=0.0)
            tl.store(target + pair, x * cosine - y * sine, mask=there)
            tl.store(target + half + pair, y * cosine + x * sine, mask=there)
            head = tl.arange(0, HEADS)
            own = head < heads
            value = tl.load(weights + n * weights_row + head, mask=own, other=0.0)
            tl.store(weights_out + n * heads + head, value * head_scale, mask=own)


def latents(
    parts: Sequence[Tensor], norms: LatentNorms, table: Tensor, positions: Tensor
) -> tuple[Tensor, ...]:
    """``kvpolicy.kernels.latents.latents`` with a bf16 query latent. parts: float32, any row stride."""
    query, row = parts[:2]
    key, weights = parts[2:] if len(parts) > 2 else (query, query)
    n, device = query.shape[0], query.device
    q_rank, rank, half = query.shape[1], norms.row.shape[0], table.shape[2]
    dim, heads = (key.shape[1], weights.shape[1]) if len(parts) > 2 else (1, 1)
    query_out = torch.empty(n, q_rank, dtype=torch.bfloat16, device=device)
    row_out = torch.empty(n, rank + 2 * half, dtype=torch.float32, device=device)
    found: tuple[Tensor, ...] = (query_out, row_out)
    key_out = weights_out = row_out  # not written where nothing is chosen
    if len(parts) > 2:
        key_out, weights_out = row_out.new_empty(n, dim), row_out.new_empty(n, heads)
        found += (key_out, weights_out)
    if n == 0:
        return found
    _latents_kernel[(n, len(parts) if len(parts) == 2 else 3)](
        query,
        row,
        key,
        weights,
        norms.query,
        norms.row,
        norms.query if norms.key is None else norms.key,
        norms.query if norms.key_bias is None else norms.key_bias,
        table[0],
        table[1],
        positions,
        query_out,
        row_out,
        key_out,
        weights_out,
        query.stride(0),
        row.stride(0),
        key.stride(0),
        weights.stride(0),
        norms.eps,
        heads**-0.5,
        q_rank=q_rank,
        rank=rank,
        half=half,
        dim=dim,
        heads=heads,
        Q_RANK=power_of_two(q_rank),
        RANK=power_of_two(rank),
        HALF=power_of_two(half),
        DIM=power_of_two(dim),
        HEADS=power_of_two(heads),
        num_warps=WARPS,
        **FUSION,
    )
    return found


@triton.jit
def _turn_heads(
    x,
    x_head,
    out,
    out_head,
    cosine,
    sine,
    heads: tl.constexpr,
    half: tl.constexpr,
    rest: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    """Turn the first 2 * half values of each head of a row; copy the rest behind them."""
    head = tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    there = (head < heads) & (pair < half)
    first = tl.load(x + head * x_head + 2 * pair, mask=there, other=0.0).to(tl.float32)
    second = tl.load(x + head * x_head + 2 * pair + 1, mask=there, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    at = out + head * out_head + pair
    tl.store(at, (first * cosine[None, :] - second * sine[None, :]).to(kind), mask=there)
    tl.store(at + half, (second * cosine[None, :] + first * sine[None, :]).to(kind), mask=there)
    if rest > 0:
        i = tl.arange(0, REST)[None, :]
        there = (head < heads) & (i < rest)
        value = tl.load(x + head * x_head + 2 * half + i, mask=there, other=0.0)
        tl.store(out + head * out_head + 2 * half + i, value, mask=there)


@triton.jit
def _turn_kernel(
    q: tl.tensor,
    index_q: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    positions: tl.tensor,
    query: tl.tensor,
    index_out: tl.tensor,
    q_row: tl.tensor,
    index_row: tl.tensor,
    heads: tl.constexpr,
    nope: tl.constexpr,
    rank: tl.constexpr,
    half: tl.constexpr,
    index_heads: tl.constexpr,
    dim: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
    REST: tl.constexpr,
) -> None:
    n = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF)
    at = tl.load(positions + n) * half
    cosine = tl.load(cosines + at + pair, mask=pair < half, other=0.0)
    sine = tl.load(sines + at + pair, mask=pair < half, other=0.0)
    if tl.program_id(1) == 0:
        source = q + n * q_row + nope
        out = query + n * heads * (rank + 2 * half) + rank
        _turn_heads(
            source, nope + 2 * half, out, rank + 2 * half, cosine, sine,
            heads, half, 0, HEADS, HALF, 1,
        )  # fmt: skip
    else:
        source, out = index_q + n * index_row, index_out + n * index_heads * dim
        _turn_heads(
            source, dim, out, dim, cosine, sine,
            index_heads, half, dim - 2 * half, INDEX_HEADS, HALF, REST,
        )  # fmt: skip


def turn_queries(
    parts: Sequence[Tensor],
    query: Tensor,
    nope: int,
    index_heads: int,
    table: Tensor,
    positions: Tensor,
) -> tuple[Tensor, ...]:
    """The rotary part of ``kvpolicy.kernels.latents.queries``, in bf16.

    query: [n, H, rank + rope], its last ``rope`` values written here. parts: bf16, any row stride.
    Returns ``query``, and the indexer's queries where there are two parts.
    """
    n, heads, width = query.shape
    half = table.shape[2]
    two = len(parts) > 1
    dim = parts[1].shape[1] // index_heads if two else 2 * half
    found: tuple[Tensor, ...] = (query,)
    if two:
        found += (query.new_empty(n, index_heads, dim),)
    if n == 0:
        return found
    _turn_kernel[(n, len(parts))](
        parts[0],
        parts[-1],
        table[0],
        table[1],
        positions,
        query,
        found[-1],
        parts[0].stride(0),
        parts[-1].stride(0),
        heads=heads,
        nope=nope,
        rank=width - 2 * half,
        half=half,
        index_heads=index_heads,
        dim=dim,
        HEADS=power_of_two(heads),
        HALF=power_of_two(half),
        INDEX_HEADS=power_of_two(index_heads),
        REST=power_of_two(dim - 2 * half) if dim > 2 * half else 1,
        num_warps=WARPS,
        **FUSION,
    )
    return found
