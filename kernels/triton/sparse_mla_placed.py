"""Sparse latent attention for Hopper with every copy, wait and product placed by hand, in Gluon.

The formulas of ``sparse_mla_tensor.py``, cut for 512 + 64 values and multiples of 64 heads. A program
attends 64 heads of one row over one part of its selection. Its two warp groups share a tile's scores by
rows and the sums by value columns; left to itself the compiler has both compute all scores. There are
two buffers of a tile: the copies of the next are on the way during all products of one. Queries and
tiles of 64 rows fill shared memory: 225,280 bytes in bf16, 227,328 with 8-bit rows and their float16
form, of 232,448. The accumulator takes 128 of a thread's registers; nothing spills.

Where no row is, a valid row of the part is read with weight 0, so that nothing else is touched. Gluon
cannot be interpreted: this module is imported where a GPU is, or to compile for one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Renamed between triton 3.6 and 3.9.
_copy = gl.constexpr(
    async_copy.async_load
    if hasattr(async_copy, "async_load")
    else async_copy.async_copy_global_to_shared
)
_meet = gl.constexpr(gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier)

HEADS = gl.constexpr(64)
BUFFERS = gl.constexpr(2)
LOWEST = gl.constexpr(-1e30)
# 16 bytes a thread: rows of 512 values, rows of 64, 16 codes of a group, four scales.
WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
NARROW = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
CODES = gl.constexpr(gl.BlockedLayout([1, 1, 16], [1, 4, 8], [8, 1, 1], [2, 1, 0]))
SCALES = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [8, 1], [1, 0]))
# 8 codes a thread: eight threads write a whole line of 128 bytes of float16, without bank conflicts.
WIDENED = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 2, 16], [8, 1, 1], [2, 1, 0]))
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, SUMS.value, 2))
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
PLAIN_3D = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@gluon.jit
def _rows(at, safe, ROWS: gl.constexpr, layout: gl.constexpr):
    """Offsets of a tile's rows; of a valid one where none is."""
    row = gl.load(at + gl.arange(0, ROWS, layout))
    return gl.where(row < 0, safe, row)


@gluon.jit
def _extent(offsets, PART: gl.constexpr, PART_BLOCK: gl.constexpr, ROWS: gl.constexpr):
    """Tiles up to a part's last valid row, and a row that is valid."""
    place = gl.arange(0, PART_BLOCK, LINE)
    every = gl.load(offsets + place, mask=place < PART, other=-1)
    last = gl.max(gl.where(every >= 0, place + 1, 0), axis=0)
    return (last + ROWS - 1) // ROWS, gl.max(every, axis=0)


@gluon.jit
def _fetch(view, at, safe, values, turned, ROWS: gl.constexpr, UNIT: gl.constexpr):
    """Starts the copies of a tile of bf16 rows."""
    row = _rows(at, safe, ROWS, gl.SliceLayout(1, WIDE)) * UNIT
    _copy(values, view + row[:, None] + gl.arange(0, 512, gl.SliceLayout(0, WIDE))[None, :])
    row = _rows(at, safe, ROWS, gl.SliceLayout(1, NARROW)) * UNIT
    column = 512 + gl.arange(0, 64, gl.SliceLayout(0, NARROW))
    _copy(turned, view + row[:, None] + column[None, :])


@gluon.jit
def _fetch_records(
    codes, scales, turned, at, safe, to_codes, to_scales, to_turned, ROWS: gl.constexpr,
    UNIT: gl.constexpr,
):  # fmt: skip
    """Starts the copies of a tile of 8-bit records: codes, scales, rotary values."""
    flat: gl.constexpr = gl.SliceLayout(2, CODES)
    row = _rows(at, safe, ROWS, gl.SliceLayout(1, flat)) * UNIT
    group = gl.arange(0, 4, gl.SliceLayout(0, flat)) * 128
    inner = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, CODES)))
    column = group[None, :][:, :, None] + inner[None, :][:, None, :]
    _copy(to_codes, codes + row[:, None][:, :, None] + column)
    row = _rows(at, safe, ROWS, gl.SliceLayout(1, SCALES)) * (UNIT // 4)
    column = 128 + gl.arange(0, 4, gl.SliceLayout(0, SCALES))
    _copy(to_scales, scales + row[:, None] + column[None, :])
    row = _rows(at, safe, ROWS, gl.SliceLayout(1, NARROW)) * (UNIT // 2)
    column = 264 + gl.arange(0, 64, gl.SliceLayout(0, NARROW))
    _copy(to_turned, turned + row[:, None] + column[None, :])


@gluon.jit
def _fetch_queries(
    values, value_row: gl.constexpr, turned, turned_row: gl.constexpr, to_values, to_turned
):
    """Starts the copies of 64 heads' queries: 512 values each, and the 64 after them of ``turned``."""
    head = gl.arange(0, HEADS, gl.SliceLayout(1, WIDE))
    column = gl.arange(0, 512, gl.SliceLayout(0, WIDE))
    _copy(to_values, values + head[:, None] * value_row + column[None, :])
    head = gl.arange(0, HEADS, gl.SliceLayout(1, NARROW))
    column = 512 + gl.arange(0, 64, gl.SliceLayout(0, NARROW))
    _copy(to_turned, turned + head[:, None] * turned_row + column[None, :])


@gluon.jit
def _arrived():
    """All copies are there, for all threads and the tensor cores."""
    async_copy.wait_group(0)
    fence_async_shared()
    _meet()


@gluon.jit
def _weigh(scores, there, best):
    """Soft-max on line: weights of a tile, what is kept of the sums so far, the new best."""
    scores = gl.where(there[None, :], scores, LOWEST)
    highest = gl.maximum(best, gl.max(scores, axis=1))
    weight = gl.where(there[None, :], gl.exp2(scores - highest[:, None]), 0.0)
    return weight, gl.exp2(best - highest), highest


@gluon.jit
def _add(total, kept, weight, values):
    """The sums, with a tile's values added."""
    total = total * gl.convert_layout(kept, gl.SliceLayout(1, SUMS))[:, None]
    weight = gl.convert_layout(weight.to(values.dtype), WEIGHTS)
    total = warpgroup_mma(weight, values, total, is_async=True)
    return warpgroup_mma_wait(0, deps=(total,))


@gluon.jit
def _finish(
    out, stats, total, best, mass, row, part, first, heads: gl.constexpr, PARTS: gl.constexpr
):
    """The result of a selection of one part, or a part's sums and (best, mass)."""
    base = row * heads + first
    if PARTS == 1:
        mass = gl.convert_layout(gl.where(mass > 0.0, mass, 1.0), gl.SliceLayout(1, SUMS))
        total = total / mass[:, None]
    else:
        base = (row * PARTS + part) * heads + first
        head = gl.arange(0, HEADS, best.type.layout)
        gl.store(stats + (base + head) * 2, best)
        gl.store(stats + (base + head) * 2 + 1, mass)
    head = gl.arange(0, HEADS, gl.SliceLayout(1, SUMS))
    value = gl.arange(0, 512, gl.SliceLayout(0, SUMS))
    gl.store(out + (base + head)[:, None] * 512 + value[None, :], total.to(out.dtype.element_ty))


@gluon.jit
def _place(heads: gl.constexpr, PARTS: gl.constexpr):
    """The row, part and first head of this program."""
    row = (gl.program_id(0) // (heads // HEADS * PARTS)).to(gl.int64)
    part = gl.program_id(0) // (heads // HEADS) % PARTS
    return row, part, gl.program_id(0) % (heads // HEADS) * HEADS


@gluon.jit
def _attend_bf16(
    query, view, offsets, out, stats, scale, heads: gl.constexpr, UNIT: gl.constexpr,
    PARTS: gl.constexpr, PART: gl.constexpr, PART_BLOCK: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, ROWS // 2, 16])
    row, part, first = _place(heads, PARTS)
    offsets += (row * PARTS + part) * PART
    query += (row * heads + first) * 576
    q = gl.allocate_shared_memory(gl.bfloat16, [HEADS, 512], SHARED)
    q_turned = gl.allocate_shared_memory(gl.bfloat16, [HEADS, 64], SHARED)
    values = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, ROWS, 512], SHARED)
    turned = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, ROWS, 64], SHARED)
    tiles, safe = _extent(offsets, PART, PART_BLOCK, ROWS)
    _fetch_queries(query, 576, query, 576, q, q_turned)
    if tiles > 0:
        _fetch(view, offsets, safe, values.index(0), turned.index(0), ROWS, UNIT)
    async_copy.commit_group()
    best = gl.full([HEADS], LOWEST, gl.float32, gl.SliceLayout(1, SCORES))
    mass = gl.full([HEADS], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([HEADS, 512], gl.float32, SUMS)
    zero = gl.zeros([HEADS, ROWS], gl.float32, SCORES)
    place = gl.arange(0, ROWS, gl.SliceLayout(0, SCORES))
    for tile in range(tiles):
        there = gl.load(offsets + tile * ROWS + place) >= 0
        _arrived()
        own, next = tile % 2, (tile + 1) % 2
        tile_values = values.index(own)
        scores = warpgroup_mma(q, tile_values.permute((1, 0)), zero, use_acc=False, is_async=True)
        tile_turned = turned.index(own).permute((1, 0))
        scores = warpgroup_mma(q_turned, tile_turned, scores, is_async=True)
        if tile + 1 < tiles:
            at = offsets + (tile + 1) * ROWS
            _fetch(view, at, safe, values.index(next), turned.index(next), ROWS, UNIT)
        async_copy.commit_group()
        scores = warpgroup_mma_wait(0, deps=(scores,))
        weight, kept, best = _weigh(scores * scale, there, best)
        mass = mass * kept + gl.sum(weight, axis=1)
        total = _add(total, kept, weight, tile_values)
    async_copy.wait_group(0)
    _finish(out, stats, total, best, mass, row, part, first, heads, PARTS)


@gluon.jit
def _attend_fp8(
    query, narrow, factors, codes, scales, turned, offsets, out, stats, scale, heads: gl.constexpr,
    UNIT: gl.constexpr, PARTS: gl.constexpr, PART: gl.constexpr, PART_BLOCK: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """codes, scales, turned: the same records as e4m3, float32 and bf16. UNIT: bytes."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, ROWS // 2, 16])
    row, part, first = _place(heads, PARTS)
    offsets += (row * PARTS + part) * PART
    q = gl.allocate_shared_memory(gl.float16, [HEADS, 512], SHARED)
    q_turned = gl.allocate_shared_memory(gl.bfloat16, [HEADS, 64], SHARED)
    values = gl.allocate_shared_memory(gl.float16, [ROWS, 512], SHARED)
    all_codes = gl.allocate_shared_memory(gl.float8e4nv, [BUFFERS, ROWS, 4, 128], PLAIN_3D)
    all_scales = gl.allocate_shared_memory(gl.float32, [BUFFERS, ROWS, 4], PLAIN)
    all_turned = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, ROWS, 64], SHARED)
    tiles, safe = _extent(offsets, PART, PART_BLOCK, ROWS)
    head = row * heads + first
    _fetch_queries(narrow + head * 512, 512, query + head * 576, 576, q, q_turned)
    if tiles > 0:
        _fetch_records(
            codes, scales, turned, offsets, safe, all_codes.index(0), all_scales.index(0),
            all_turned.index(0), ROWS, UNIT,
        )  # fmt: skip
    async_copy.commit_group()
    unscale = gl.load(factors + head + gl.arange(0, HEADS, gl.SliceLayout(1, SCORES))) * scale
    best = gl.full([HEADS], LOWEST, gl.float32, gl.SliceLayout(1, SCORES))
    mass = gl.full([HEADS], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([HEADS, 512], gl.float32, SUMS)
    zero = gl.zeros([HEADS, ROWS], gl.float32, SCORES)
    place = gl.arange(0, ROWS, gl.SliceLayout(0, SCORES))
    for tile in range(tiles):
        there = gl.load(offsets + tile * ROWS + place) >= 0
        _arrived()
        own, next = tile % 2, (tile + 1) % 2
        if tile + 1 < tiles:
            _fetch_records(
                codes, scales, turned, offsets + (tile + 1) * ROWS, safe, all_codes.index(next),
                all_scales.index(next), all_turned.index(next), ROWS, UNIT,
            )  # fmt: skip
        async_copy.commit_group()
        of_group = all_scales.index(own).load(gl.SliceLayout(2, WIDENED))
        exponent = (gl.max(of_group, axis=1).to(gl.int32, bitcast=True) + 0x7FFFFF) >> 23
        inverse = ((254 - exponent) << 23).to(gl.float32, bitcast=True)
        ratio = (of_group * inverse[:, None]).to(gl.float16)
        code = all_codes.index(own).load(WIDENED).to(gl.float16)
        values.store(gl.reshape(code * ratio[:, :, None], [ROWS, 512]))
        fence_async_shared()
        _meet()
        scores = warpgroup_mma(q, values.permute((1, 0)), zero, use_acc=False, is_async=True)
        tile_turned = all_turned.index(own).permute((1, 0))
        extra = warpgroup_mma(q_turned, tile_turned, zero, use_acc=False, is_async=True)
        exponent = gl.convert_layout(exponent, gl.SliceLayout(0, SCORES))
        sigma = (exponent << 23).to(gl.float32, bitcast=True)
        inverse = ((254 - exponent) << 23).to(gl.float32, bitcast=True)
        scores, extra = warpgroup_mma_wait(0, deps=(scores, extra))
        scores = scores * unscale[:, None] * sigma[None, :] + extra * scale
        scores += (exponent - 127).to(gl.float32)[None, :]
        weight, kept, best = _weigh(scores, there, best)
        mass = mass * kept + gl.sum(weight * inverse[None, :], axis=1)
        total = _add(total, kept, weight, values)
    async_copy.wait_group(0)
    _finish(out, stats, total, best, mass, row, part, first, heads, PARTS)
