"""Batch-invariant bf16 products on tensor cores, accumulated in float32.

Weights take the side of the tile that is a multiple of 64 and rows the other one (out.T = W @ x.T), so that one
kind of instruction (wgmma m64nNk16) serves 16 rows as well as 1,024. An output element is one
float32 accumulator that takes the products of 16 inner values at a time, in ascending order; how
many rows, columns or stages share the tile does not enter it. A weight whose tiles would leave
multiprocessors idle is cut along the inner width into ranges, by its shape alone; their sums are
added in ascending order, whether one program walks all ranges or one each.

Bytes to move: every weight once (2 * out * in), rows in and out once.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
    WIDE: tl.constexpr,
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
        if WIDE:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total)
        if GATED:
            if EVEN:
                c = tl.load(weight_at + second + at)
            else:
                c = tl.load(weight_at + second + at, mask=rest[None, :], other=0.0)
            if WIDE:
                c = c.to(tl.float32)
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
    WIDE: tl.constexpr,
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
            x_at, weight_at, second, start, tl.minimum(start + length, n_in), n_in,
            GATED, EVEN, COLUMNS, ROWS, INNER, WIDE,
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
            x_at, weight_at, second, 0, n_in, n_in, GATED, EVEN, COLUMNS, ROWS, INNER, WIDE
        )
    else:
        for i in range(0, splits):
            start = i * length
            one, two = _range_sum(
                x_at, weight_at, second, start, tl.minimum(start + length, n_in), n_in,
                GATED, EVEN, COLUMNS, ROWS, INNER, WIDE,
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
