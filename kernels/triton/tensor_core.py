"""Batch-invariant bf16 products on tensor cores, accumulated in float32.

Weights take the side of a tile that is a multiple of 64 and rows the other one (out.T = W @ x.T), so
that one kind of instruction (wgmma m64nNk16) serves 16 rows as well as 1,024. An output element is
one float32 accumulator that takes the products of 16 inner values at a time, in ascending order; how
many rows, columns or stages share the tile does not enter it (on an H200 164 forms had one set of
bits). So the tile may follow the row count. A weight whose tiles would leave multiprocessors idle is
cut along the inner width into ranges, by its shape alone; their sums are added in ascending
order, whether one program walks all ranges or one each.

Tiles are read by tensor descriptors (TMA): 5 to 15 % faster than pointers from 64 rows on.

Bytes to move: every weight once (2 * out * in), rows in and out once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import ALIGNMENT, FUSION, blocks, power_of_two

# Multiprocessors of an H200. A constant: the ranges of a weight, and with them the bits, must not depend
# on the machine.
PROCESSORS = 132
# No range is shorter; ranges are multiples of STEP, the widest inner tile.
LEAST_RANGE, STEP = 1024, 128
_ARRIVED: dict[torch.device, Tensor] = {}


@dataclass(frozen=True, slots=True)
class Tile:
    """One program's share: columns of outputs x rows, and how it walks the inner width.

    spread: where there are ranges, each is a program's. whole: full tiles are stored by descriptor.
    """

    columns: int
    rows: int
    inner: int
    warps: int
    stages: int
    spread: bool = True
    whole: bool = True


# (most rows, tile), the last for any number. Measured on an H200 for GLM-5.3's products, some 40 tiles a
# row count (today: kvpolicy bench kernels --only linear). ranges, few: weights with fewer tiles than
# multiprocessors, so that one deep pipeline each keeps the memory busy; many: two programs share a
# multiprocessor; heads: inner widths of 192 and 512; gated: two accumulators.
TILES = {
    "ranges": (
        (16, Tile(64, 16, 128, 4, 6)),
        (32, Tile(64, 32, 128, 4, 6)),
        (64, Tile(64, 64, 128, 4, 6)),
        (128, Tile(64, 128, 128, 4, 4)),
        (256, Tile(64, 128, 64, 4, 4)),
        (512, Tile(128, 256, 64, 8, 4)),
        (1024, Tile(64, 128, 64, 4, 3, spread=False)),
    ),
    "few": (
        (16, Tile(64, 16, 128, 4, 6)),
        (32, Tile(64, 32, 128, 4, 6)),
        (64, Tile(64, 64, 128, 4, 6)),
        (128, Tile(64, 128, 128, 4, 4)),
        (256, Tile(128, 64, 64, 4, 4)),
        (512, Tile(128, 256, 64, 8, 4, whole=False)),
        (1024, Tile(128, 128, 64, 4, 4)),
    ),
    "many": (
        (16, Tile(64, 16, 128, 4, 4)),
        (32, Tile(64, 32, 128, 4, 4)),
        (64, Tile(128, 64, 64, 4, 4)),
        (256, Tile(64, 128, 64, 4, 3)),
        (512, Tile(128, 128, 64, 4, 4)),
        (1024, Tile(128, 128, 64, 4, 3)),
    ),
    "heads": (
        (16, Tile(128, 16, 64, 4, 6)),
        (32, Tile(64, 32, 64, 4, 3)),
        (64, Tile(64, 64, 64, 4, 3)),
        (512, Tile(128, 128, 64, 4, 3)),
        (1024, Tile(128, 128, 64, 4, 2)),
    ),
    "gated": (
        (16, Tile(64, 16, 128, 4, 5)),
        (32, Tile(64, 32, 128, 4, 5)),
        (64, Tile(64, 64, 128, 4, 4)),
        (512, Tile(64, 128, 128, 4, 3)),
        (1024, Tile(64, 256, 64, 8, 4, whole=False)),
    ),
}
INTERPRETED = Tile(32, 16, 128, 4, 1)


def tile_of(n: int, n_out: int, heads: int, gated: bool, ranges: int) -> Tile:
    """The tile for n rows of a weight."""
    if gated or heads > 1:
        kind = "gated" if gated else "heads"
    elif ranges > 1:
        kind = "ranges"
    else:
        kind = "few" if blocks(n_out, 64) < PROCESSORS else "many"
    tiles = TILES[kind]
    return next((tile for most, tile in tiles if n <= most), tiles[-1][1])


def ranges_of(n_out: int, n_in: int, heads: int) -> int:
    """Ranges of the inner width, by the weight's shape alone."""
    return max(1, min(PROCESSORS // (heads * blocks(n_out, 64)), n_in // LEAST_RANGE))


def arrived(device: torch.device) -> Tensor:
    """Counters of the programs that share an output tile, zero between launches. Products of one
    device run one after the other."""
    if device not in _ARRIVED:
        _ARRIVED[device] = torch.zeros(1 << 12, dtype=torch.int32, device=device)
    return _ARRIVED[device]


@triton.jit
def _range_sum(
    x,
    weight,
    row,
    x_at,
    column,
    second,
    start,
    stop,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Sums over inner values start to stop: [COLUMNS, ROWS], of one matrix or two."""
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    other = tl.zeros([COLUMNS, ROWS], tl.float32)
    for at in tl.range(start, stop, INNER):
        a = weight.load([column, at])
        b = x.load([row, x_at + at])
        if not EVEN:  # what lies beyond is another head's, or no number
            b = tl.where((at + tl.arange(0, INNER))[None, :] < stop, b, 0.0)
        total = tl.dot(a, b.T, total)
        if GATED:
            c = weight.load([column + second, at])
            other = tl.dot(c, b.T, other)
    return total, other


@triton.jit(do_not_specialize=["n"])
def _product_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    out_tile: tl.tensor,
    partial: tl.tensor,
    arrived: tl.tensor,
    n: tl.tensor,
    x_head: tl.tensor,
    out_row: tl.tensor,
    out_head: tl.tensor,
    n_in: tl.tensor,
    n_out: tl.tensor,
    length: tl.tensor,
    RANGES: tl.constexpr,
    SPREAD: tl.constexpr,
    WHOLE: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    EVEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
) -> None:
    # Row tiles of one column tile run side by side: its weights come from memory once.
    tiles = tl.cdiv(n, ROWS)
    tile, head = tl.program_id(0), tl.program_id(2)
    first_row, first_column = (tile % tiles) * ROWS, (tile // tiles) * COLUMNS
    x_at, weight_at = head * x_head, head * n_out + first_column
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    other = tl.zeros([COLUMNS, ROWS], tl.float32)
    kept = n
    if SPREAD:
        own = tl.program_id(1)
        total, other = _range_sum(
            x, weight, first_row, x_at, weight_at, n_out,
            own * length, tl.minimum(own * length + length, n_in),
            GATED, EVEN, COLUMNS, ROWS, INNER,
        )  # fmt: skip
        shared = head * tl.num_programs(0) + tile
        place = tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        block = partial + shared.to(tl.int64) * RANGES * (COLUMNS * ROWS) + place
        tl.store(block + own * (COLUMNS * ROWS), total)
        tl.debug_barrier()  # all threads' stores come before the one thread's count
        before = tl.atomic_add(arrived + shared, 1, sem="acq_rel")
        # The last one adds them up and stores them.
        kept = tl.where(before == RANGES - 1, n, 0)
        if before == RANGES - 1:
            total = tl.zeros([COLUMNS, ROWS], tl.float32)
            for i in range(RANGES):
                total += tl.load(block + i * (COLUMNS * ROWS), cache_modifier=".cg")
            tl.store(arrived + shared, 0)
    elif RANGES == 1:
        total, other = _range_sum(
            x, weight, first_row, x_at, weight_at, n_out, 0, n_in,
            GATED, EVEN, COLUMNS, ROWS, INNER,
        )  # fmt: skip
    else:
        for i in range(RANGES):
            one, two = _range_sum(
                x, weight, first_row, x_at, weight_at, n_out,
                i * length, tl.minimum(i * length + length, n_in),
                GATED, EVEN, COLUMNS, ROWS, INNER,
            )  # fmt: skip
            total += one
            other += two
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * other
    row = (first_row + tl.arange(0, ROWS)).to(tl.int64)[None, :]
    column = (first_column + tl.arange(0, COLUMNS))[:, None]
    inside = (row < kept) & (column < n_out)
    at = row * out_row + head.to(tl.int64) * out_head + column
    if ADD:
        total += tl.load(residual + at, mask=inside, other=0.0)
    if WHOLE:
        out_tile.store(
            [first_row, head * out_head + first_column], total.to(out.dtype.element_ty).T
        )
    else:
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def _readable(x: Tensor) -> bool:
    """Whether a tensor descriptor can span it: 16-byte aligned rows, values side by side."""
    values = ALIGNMENT // x.element_size()
    aligned = x.data_ptr() % ALIGNMENT == 0 and x.stride(-1) == 1
    return aligned and all(stride % values == 0 for stride in x.stride()[:-1])


def padded(x: Tensor) -> Tensor:
    """``x`` [..., width] as a tensor descriptor can span it; copied where it is not so already."""
    if _readable(x):
        return x
    values = ALIGNMENT // x.element_size()
    room = x.new_zeros(*x.shape[:-1], blocks(x.shape[-1], values) * values)
    return room[..., : x.shape[-1]].copy_(x)


def product(
    x: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    *,
    gated: bool = False,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """A product per head. x: bf16 [n, H, in], any strides; weight: bf16 [H, out, in], ``padded`` and
    whole: its matrices one behind the other.

    gated: weight is [2, out, in], gate and up, and the result ``silu(x @ gate.T) * (x @ up.T)``.
    residual: float32 of the result's shape and strides, added. out: [n, H, out], any row and head
    stride, where the result goes. Returns [n, H, out] of ``dtype``.
    """
    n, heads, n_in = x.shape
    n_out = weight.shape[1]
    if out is None:
        out = torch.empty(n, heads, n_out, dtype=dtype, device=x.device)
    if out.numel() == 0:
        return out
    x = padded(x)
    ranges = 1 if gated else ranges_of(n_out, n_in, heads)
    tile = tile_of(n, n_out, heads, gated, ranges)
    if x.device.type == "cpu":
        tile = INTERPRETED
    length = blocks(blocks(n_in, ranges), STEP) * STEP
    inner = min(tile.inner, power_of_two(n_in, least=16))
    tiles = blocks(n, tile.rows) * blocks(n_out, tile.columns)
    spread = ranges > 1 and tile.spread
    partial = out
    if spread:
        size = heads * tiles * ranges * tile.rows * tile.columns
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
    width = (heads - 1) * x.stride(1) + n_in
    weights = TensorDescriptor(
        weight, [weight.shape[0] * n_out, n_in], [weight.stride(1), 1], [tile.columns, inner]
    )
    whole = tile.whole and not spread and n_out % tile.columns == 0 and _readable(out)
    out_tile = weights
    if whole:
        shape = [n, (heads - 1) * out.stride(1) + n_out]
        out_tile = TensorDescriptor(out, shape, [out.stride(0), 1], [tile.rows, tile.columns])
    _product_kernel[(tiles, ranges if spread else 1, heads)](
        TensorDescriptor(x, [n, width], [x.stride(0), 1], [tile.rows, inner]),
        weights,
        out if residual is None else residual,
        out,
        out_tile,
        partial,
        arrived(x.device),
        n,
        x.stride(1),
        out.stride(0),
        out.stride(1),
        n_in,
        n_out,
        length,
        RANGES=ranges,
        SPREAD=spread,
        WHOLE=whole,
        GATED=gated,
        ADD=residual is not None,
        EVEN=n_in % inner == 0,
        COLUMNS=tile.columns,
        ROWS=tile.rows,
        INNER=inner,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **FUSION,
    )
    return out
