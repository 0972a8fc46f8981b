"""Batch-invariant bf16 products on tensor cores, accumulated in float32.

Weights take the side of a tile that is a multiple of 64 and rows the other one (out.T = W @ x.T), so
that one kind of instruction (wgmma m64nNk16) serves 16 rows as well as 1,024. An output element is
one float32 accumulator that takes the products of 16 inner values at a time, in ascending order; how
many rows, columns or stages share the tile does not enter it. A weight whose tiles would leave
multiprocessors idle is cut along the inner width into ranges, by its shape alone; their sums are
added in ascending order, whether one program walks all ranges or one each.

Bytes to move: every weight once (2 * out * in), rows in and out once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import FUSION, blocks, power_of_two

SPREAD_ROWS = 128
_ARRIVED: dict[torch.device, Tensor] = {}


@dataclass(frozen=True, slots=True)
class Tile:
    """One program's share: columns of outputs x rows, and how it walks the inner width."""

    columns: int
    rows: int
    inner: int
    warps: int
    stages: int


def tile_of(n: int, gated: bool, interpreted: bool) -> Tile:
    """The tile for n rows."""
    if interpreted:
        return Tile(32, 16, 64, 4, 1)
    if n <= 16:
        return Tile(64, 16, 128, 4, 4)
    if n <= 32:
        return Tile(64, 32, 128, 4, 4)
    if n <= 64:
        return Tile(64, 64, 64, 4, 4)
    return Tile(64, 128, 64, 8, 4) if gated else Tile(128, 128, 64, 8, 4)


def splits_of(n_out: int, n_in: int, heads: int) -> int:
    """Ranges of the inner width, by the weight's shape alone."""
    tiles, splits = heads * blocks(n_out, 64), 1
    while tiles * splits < 132 and n_in >= 1024 * (splits + 1):
        splits += 1
    return splits


def arrived(device: torch.device) -> Tensor:
    """Counters of the programs that share an output tile, zero between launches. Products of one
    device run one after the other."""
    if device not in _ARRIVED:
        _ARRIVED[device] = torch.zeros(1 << 14, dtype=torch.int32, device=device)
    return _ARRIVED[device]


@triton.jit
def _range_sum(
    x_at,
    weight_at,
    second,
    start,
    stop,
    weight_column,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Sums over inner values start to stop: [COLUMNS, ROWS], of one matrix or two."""
    inner = tl.arange(0, INNER)
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    other = tl.zeros([COLUMNS, ROWS], tl.float32)
    for at in tl.range(start, stop, INNER):
        if EVEN:
            a = tl.load(weight_at + at)
            b = tl.load(x_at + at)
        else:
            rest = inner < stop - at
            a = tl.load(weight_at + at, mask=rest[None, :], other=0.0)
            b = tl.load(x_at + at, mask=rest[:, None], other=0.0)
        total = tl.dot(a, b, total)
        if GATED:
            if EVEN:
                c = tl.load(weight_at + second + at)
            else:
                c = tl.load(weight_at + second + at, mask=rest[None, :], other=0.0)
            other = tl.dot(c, b, other)
    return total, other


@triton.jit(do_not_specialize=["n", "splits"])
def product_kernel(
    x,
    weight,
    residual,
    out,
    partial,
    arrived,
    n,
    x_row,
    x_head,
    weight_head,
    out_row,
    out_head,
    n_in,
    n_out,
    length,
    splits,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    EVEN: tl.constexpr,
    SPREAD: tl.constexpr,
    SERIAL: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
):
    tiles = tl.cdiv(n, ROWS)
    tile = tl.program_id(0)
    row = ((tile % tiles) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tile // tiles) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(2).to(tl.int64)
    inner = tl.arange(0, INNER)
    # Beyond the edge the last one again: what is computed there is not stored.
    row_in = tl.minimum(row, n - 1)
    column_in = tl.minimum(column, n_out - 1).to(tl.int64)
    x_at = x + head * x_head + row_in[None, :] * x_row + inner[:, None]
    weight_at = weight + head * weight_head + column_in[:, None] * n_in + inner[None, :]
    second = n_out.to(tl.int64) * n_in
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    other = tl.zeros([COLUMNS, ROWS], tl.float32)
    kept = n
    if SPREAD:
        split = tl.program_id(1)
        start = split * length
        total, other = _range_sum(
            x_at,
            weight_at,
            second,
            start,
            tl.minimum(start + length, n_in),
            n_in,
            GATED,
            EVEN,
            COLUMNS,
            ROWS,
            INNER,
        )
        place = tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        mine = head * tl.num_programs(0) + tile
        block = partial + mine * splits * (COLUMNS * ROWS) + place
        tl.store(block + split * (COLUMNS * ROWS), total)
        tl.debug_barrier()
        before = tl.atomic_add(arrived + mine, 1, sem="acq_rel")
        if before == splits - 1:
            total = tl.zeros([COLUMNS, ROWS], tl.float32)
            for i in range(0, splits):
                total += tl.load(block + i * (COLUMNS * ROWS), cache_modifier=".cg")
            tl.store(arrived + mine, 0)
        kept = tl.where(before == splits - 1, n, 0)
    elif not SERIAL:
        total, other = _range_sum(
            x_at, weight_at, second, 0, n_in, n_in, GATED, EVEN, COLUMNS, ROWS, INNER
        )
    else:
        for i in range(0, splits):
            start = i * length
            one, two = _range_sum(
                x_at,
                weight_at,
                second,
                start,
                tl.minimum(start + length, n_in),
                n_in,
                GATED,
                EVEN,
                COLUMNS,
                ROWS,
                INNER,
            )
            total += one
            other += two
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * other
    inside = (row[None, :] < kept) & (column[:, None] < n_out)
    at = row[None, :] * out_row + head * out_head + column[:, None]
    if ADD:
        total += tl.load(residual + at, mask=inside, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def product(
    x: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    *,
    gated: bool = False,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """A product per head. x: bf16 [n, H, in], any row and head stride; weight: bf16 [H, out, in].

    gated: weight is [2, out, in], gate and up, and the result ``silu(x @ gate.T) * (x @ up.T)``.
    residual: float32 of the result's shape, added. out: [n, H, out], any row and head stride, where
    the result goes. Returns [n, H, out] of ``dtype``.
    """
    n, heads, n_in = x.shape
    n_out = weight.shape[1]
    if out is None:
        out = torch.empty(n, heads, n_out, dtype=dtype, device=x.device)
    if out.numel() == 0:
        return out
    if x.stride(2) != 1:
        x = x.contiguous()
    interpreted = x.device.type == "cpu"
    tile = tile_of(n, gated, interpreted)
    splits = 1 if gated else splits_of(n_out, n_in, heads)
    length = blocks(blocks(n_in, splits), 256) * 256
    inner = min(tile.inner, power_of_two(n_in, least=16))
    tiles = blocks(n, tile.rows) * blocks(n_out, tile.columns)
    spread = splits > 1 and n <= SPREAD_ROWS
    partial = out
    if spread:
        size = heads * tiles * splits * tile.rows * tile.columns
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
    product_kernel[(tiles, splits if spread else 1, heads)](
        x,
        weight,
        out if residual is None else residual,
        out,
        partial,
        arrived(x.device),
        n,
        x.stride(0),
        x.stride(1),
        weight.stride(0),
        out.stride(0),
        out.stride(1),
        n_in,
        n_out,
        length,
        splits,
        GATED=gated,
        ADD=residual is not None,
        EVEN=n_in % inner == 0,
        SPREAD=spread,
        SERIAL=splits > 1 and not spread,
        COLUMNS=tile.columns,
        ROWS=tile.rows,
        INNER=inner,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **FUSION,
    )
    return out
