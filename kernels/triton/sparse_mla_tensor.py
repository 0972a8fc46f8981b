"""Sparse latent attention on tensor cores: bf16 queries over bf16 rows or 8-bit row records.

The formula and the order of ``sparse_mla.py``: a program attends HEADS heads of one query row over
one part of its selection, ROWS rows at a time, ascending, sums in float32. How many parts there are
follows from k and the heads alone, and another kernel adds them up in order, so a row's bits know
nothing of the batch. A part stops after its last valid row: what is left out would add exactly 0.

8-bit rows (``kernels/fp8.py``) become float16 in registers: codes times the ratio of their group's
scale to sigma, the least power of two that all scales of the row fit in. That is exact up to float16's
rounding (2^-11; bf16, which others use here, 2^-8) and cannot overflow: |code * ratio| <= 448. Scores
are multiplied by sigma, and so are the weights, by adding log2(sigma) to their exponents. Queries are
moved into the range of float16 by a power of two of their own.

Bytes to move: k rows per query row (1,152 or 656 B each at 512 + 64 values), once for every HEADS
heads; beside them 9 k of locations, queries, results, and the parts' partial sums twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fp8 import GROUP, row_bytes
from .fp8 import round_bf16
from .launch import FUSION, aligned, blocks, power_of_two
from .sparse_mla_inputs import prepare_offsets, prepare_queries

# Below any score, and far enough from the limits of float32 that differences stay finite.
LOWEST = tl.constexpr(-1e30)
LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Shape:
    """How a call is cut: rows of a tile, parts of a selection, what the compiler is told, and heads
    of a tile (16 take mma.sync, 64 the wider wgmma). placed: the form of ``sparse_mla_placed.py``,
    which has two stages and takes tiles of 64 heads."""

    rows: int
    parts: int
    warps: int
    stages: int
    heads: int = 64
    placed: bool = False


# Parts of a selection in the hand-placed form, where it fits: by 8-bit rows or not; 0: not used. Sums are
# taken part by part, so the number never depends on the batch. On an H200, 2,048 rows, bf16, 1 / 16 / 128
# query rows: 1 part 108 / 110 / 116 us, 2 parts 57 / 60 / 131, 4 parts 32 / 36 / 154 (8-bit rows 144 / 146 /
# 154, 76 / 79 / 164, 43 / 46 / 186); without it 57 / 60 / 244 (69 / 72 / 282).
PLACED_PARTS = {False: 2, True: 2}


def place_shape(query: Tensor, view: Tensor, value_width: int) -> Shape | None:
    """The hand-placed form, if it is used and fits a model's sizes, its memory and its device."""
    parts = PLACED_PARTS[view.dtype == torch.uint8]
    sizes = query.shape[1] % 64 == 0 and query.shape[2] == 576 and value_width == 512
    unit = 16 // view.element_size()
    if not parts or not sizes or view.stride(0) % unit or view.stride(1) % unit:
        return None
    if not query.is_cuda or torch.cuda.get_device_capability(query.device)[0] != 9:
        return None
    return Shape(rows=64, parts=parts, warps=8, stages=2, placed=True)


def choose_shape(heads: int, k: int) -> Shape:
    """The shape for a model's heads and k: never for a batch."""
    # Three tiles of 32 rows and 64 heads' queries fill shared memory: five stages keep two tiles of rows
    # (and two of their offsets) on the way while one is attended. Tiles of 64 rows leave room for two,
    # and the next is asked for only after the last product (5 us a tile, seen on an H200).
    # More parts help a batch of 1 and cost one of 128, whose partial sums go through memory: with tiles
    # of 64 rows, bf16 and 64 heads, it took 172 / 93 / 50 / 30 us for one row in 1 / 2 / 4 / 8
    # parts, and 183 / 213 / 239 / 282 us for 128 rows. The form here is checked there, not timed.
    parts = min(4, blocks(k, 32))
    if heads <= 16:  # 16 heads fit mma.sync; wgmma takes 64
        return Shape(rows=32, parts=parts, warps=4, stages=5, heads=16)
    return Shape(rows=32, parts=parts, warps=8, stages=5)


@triton.jit
def _place(n_heads: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr):
    """The row, part and heads of this program: heads of a row and part side by side."""
    blocks: tl.constexpr = (n_heads + HEADS - 1) // HEADS
    row = (tl.program_id(0) // (blocks * PARTS)).to(tl.int64)
    part = tl.program_id(0) // blocks % PARTS
    return row, part, tl.program_id(0) % blocks * HEADS + tl.arange(0, HEADS)


@triton.jit
def _count(offsets, PART: tl.constexpr, PART_BLOCK: tl.constexpr):
    """One past the last valid row of a part."""
    place = tl.arange(0, PART_BLOCK)
    offset = tl.load(offsets + place, mask=place < PART, other=-1)
    return tl.max(tl.where(offset >= 0, place + 1, 0), axis=0)


@triton.jit
def _weigh(scores, there, best):
    """Soft-max on line: weights of a tile, what is kept of the sums so far, the new best."""
    scores = tl.where(there[None, :], scores, LOWEST)
    highest = tl.maximum(best, tl.max(scores, axis=1))
    weight = tl.where(there[None, :], tl.exp2(scores - highest[:, None]), 0.0)
    return weight, tl.exp2(best - highest), highest


@triton.jit
def _finish(
    out, stats, total, best, mass, row, part, head, heads: tl.constexpr, value_width: tl.constexpr,
    PARTS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """The result of a selection of one part, or a part's sums and (best, mass)."""
    value = tl.arange(0, VALUES)
    own = head < heads
    if PARTS == 1:
        total = total / tl.where(mass > 0.0, mass, 1.0)[:, None]
        at = row * heads + head
    else:
        at = (row * PARTS + part) * heads + head
        tl.store(stats + at * 2, best, mask=own)
        tl.store(stats + at * 2 + 1, mass, mask=own)
    out_at = out + at[:, None] * value_width + value[None, :]
    if out.dtype.element_ty == tl.bfloat16:
        total = round_bf16(total)
    tl.store(out_at, total, mask=own[:, None] & (value[None, :] < value_width))


@triton.jit
def _attend_bf16(
    query: tl.tensor,
    view: tl.tensor,
    offsets: tl.tensor,
    out: tl.tensor,
    stats: tl.tensor,
    scale: tl.tensor,
    heads: tl.constexpr,
    width: tl.constexpr,
    value_width: tl.constexpr,
    UNIT: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    PART_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    VALUES: tl.constexpr,
    ROTARY: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    row, part, head = _place(heads, HEADS, PARTS)
    offsets += (row * PARTS + part) * PART
    value, rotary = tl.arange(0, VALUES), value_width + tl.arange(0, ROTARY)
    own = head[:, None] < heads
    q_at = query + (row * heads + head[:, None]) * width
    q = tl.load(q_at + value[None, :], mask=own & (value[None, :] < value_width), other=0.0)
    if ROTARY > 1:
        q_rotary = tl.load(q_at + rotary[None, :], mask=own & (rotary[None, :] < width), other=0.0)
    best = tl.full([HEADS], LOWEST, tl.float32)
    mass = tl.zeros([HEADS], tl.float32)
    total = tl.zeros([HEADS, VALUES], tl.float32)
    for start in tl.range(0, _count(offsets, PART, PART_BLOCK), ROWS, num_stages=STAGES):
        offset = tl.load(offsets + start + tl.arange(0, ROWS))
        there = offset >= 0
        at = view + offset[:, None] * UNIT
        values = tl.load(
            at + value[None, :],
            mask=there[:, None] & (value[None, :] < value_width),
            other=0.0,
        )
        scores = tl.dot(q, tl.trans(values))
        if ROTARY > 1:
            turned = tl.load(
                at + rotary[None, :],
                mask=there[:, None] & (rotary[None, :] < width),
                other=0.0,
            )
            scores = tl.dot(q_rotary, tl.trans(turned), scores)
        weight, kept, best = _weigh(scores * scale, there, best)
        mass = mass * kept + tl.sum(weight, axis=1)
        total = tl.dot(round_bf16(weight), values, total * kept[:, None])
    _finish(out, stats, total, best, mass, row, part, head, heads, value_width, PARTS, VALUES)


@triton.jit
def _attend_fp8(
    query: tl.tensor,
    narrow: tl.tensor,
    factors: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    turned: tl.tensor,
    offsets: tl.tensor,
    out: tl.tensor,
    stats: tl.tensor,
    scale: tl.tensor,
    heads: tl.constexpr,
    width: tl.constexpr,
    value_width: tl.constexpr,
    UNIT: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    PART_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    ROTARY: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """codes, scales, turned: the same records as e4m3, float32 and bf16. UNIT: bytes."""
    GROUPS: tl.constexpr = value_width // GROUP
    row, part, head = _place(heads, HEADS, PARTS)
    offsets += (row * PARTS + part) * PART
    group, inner = tl.arange(0, GROUPS), tl.arange(0, GROUP)
    rotary = tl.arange(0, ROTARY)
    own, own_rotary = head[:, None] < heads, rotary[None, :] < width - value_width
    head_at = row * heads + head
    q_at = narrow + head_at[:, None] * value_width + tl.arange(0, value_width)[None, :]
    q = tl.load(q_at, mask=own, other=0.0)
    unscale = tl.load(factors + head_at, mask=head < heads, other=0.0) * scale
    if ROTARY > 1:
        q_at = query + head_at[:, None] * width + value_width + rotary[None, :]
        q_rotary = tl.load(q_at, mask=own & own_rotary, other=0.0)
    best = tl.full([HEADS], LOWEST, tl.float32)
    mass = tl.zeros([HEADS], tl.float32)
    total = tl.zeros([HEADS, value_width], tl.float32)
    for start in tl.range(0, _count(offsets, PART, PART_BLOCK), ROWS, num_stages=STAGES):
        offset = tl.load(offsets + start + tl.arange(0, ROWS))
        there = offset >= 0
        code = tl.load(
            codes
            + offset[:, None, None] * UNIT
            + (group[None, :, None] * GROUP + inner[None, None, :]),
            mask=there[:, None, None],
            other=0.0,
        )
        scale_at = scales + offset[:, None] * (UNIT // 4) + value_width // 4 + group[None, :]
        of_group = tl.load(scale_at, mask=there[:, None], other=1.0)
        exponent = (tl.max(of_group, axis=1).to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
        sigma = (exponent << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        ratio = (of_group * inverse[:, None]).to(tl.float16)
        values = (code.to(tl.float16) * ratio[:, :, None]).reshape(ROWS, value_width)
        scores = tl.dot(q, tl.trans(values)) * unscale[:, None] * sigma[None, :]
        if ROTARY > 1:
            turned_at = turned + offset[:, None] * (UNIT // 2) + value_width // 2 + 2 * GROUPS
            k_rotary = tl.load(
                turned_at + rotary[None, :], mask=there[:, None] & own_rotary, other=0.0
            )
            scores += tl.dot(q_rotary, tl.trans(k_rotary)) * scale
        scores += (exponent - 127).to(tl.float32)[None, :]
        weight, kept, best = _weigh(scores, there, best)
        mass = mass * kept + tl.sum(weight * inverse[None, :], axis=1)
        total = tl.dot(weight.to(tl.float16), values, total * kept[:, None])
    _finish(out, stats, total, best, mass, row, part, head, heads, value_width, PARTS, value_width)


@triton.jit
def _combine(
    partial: tl.tensor,
    stats: tl.tensor,
    out: tl.tensor,
    heads: tl.constexpr,
    value_width: tl.constexpr,
    PARTS: tl.constexpr,
    VALUES: tl.constexpr,
) -> None:
    """One head of one row: the parts' sums, brought to one best, added in order."""
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    value = tl.arange(0, VALUES)
    first = row * PARTS * heads + head
    highest = tl.load(stats + first * 2)
    for part in tl.static_range(1, PARTS):
        highest = tl.maximum(highest, tl.load(stats + (first + part * heads) * 2))
    mass = 0.0
    total = tl.zeros([VALUES], tl.float32)
    for part in tl.static_range(PARTS):
        at = first + part * heads
        kept = tl.exp2(tl.load(stats + at * 2) - highest)
        mass = tl.fma(tl.load(stats + at * 2 + 1), kept, mass)
        summed = tl.load(partial + at * value_width + value, mask=value < value_width, other=0.0)
        total = tl.fma(summed, kept, total)
    total = total / tl.where(mass > 0.0, mass, 1.0)
    if out.dtype.element_ty == tl.bfloat16:
        total = round_bf16(total)
    out_at = out + (row * heads + head) * value_width + value
    tl.store(out_at, total, mask=value < value_width)


def sparse_mla(
    query: Tensor,
    view: Tensor,
    locations: Tensor,
    valid: Tensor,
    value_width: int,
    scale: float,
    shape: Shape | None = None,
) -> Tensor:
    """Attention of n query rows over k selected rows each.

    query: bf16 or float32 (rounded to bf16) [n, H, w]. view: [F, per, w] bf16, or uint8 records
    [F, per, row_bytes(value_width, w - value_width)], any frame and row stride (of records: a
    multiple of 4). locations: int64 or int32 [n, k]; valid: bool [n, k]. Returns [n, H, value_width]
    in the query's dtype; zeros for a row without valid entries.
    """
    n, heads, _ = query.shape
    k = locations.shape[1]
    out = torch.empty(n, heads, value_width, dtype=query.dtype, device=query.device)
    if out.numel() == 0:
        return out
    shape = shape or place_shape(query, view, value_width) or choose_shape(heads, k)
    if shape.parts == 1:
        _attend(query, view, locations, valid, out, out, scale, shape)
        return out
    partial = query.new_empty(n, shape.parts, heads, value_width, dtype=torch.float32)
    stats = query.new_empty(n, shape.parts, heads, 2, dtype=torch.float32)
    _attend(query, view, locations, valid, partial, stats, scale, shape)
    _combine[(n * heads,)](
        partial,
        stats,
        out,
        heads=heads,
        value_width=value_width,
        PARTS=shape.parts,
        VALUES=power_of_two(value_width),
        num_warps=4 if value_width >= 512 else 1,
        **FUSION,
    )
    return out


def _attend(
    query: Tensor,
    view: Tensor,
    locations: Tensor,
    valid: Tensor,
    out: Tensor,
    stats: Tensor,
    scale: float,
    shape: Shape,
) -> None:
    """The parts' sums and stats, or, of one part, the result."""
    n, heads, width = query.shape
    k, value_width = locations.shape[1], out.shape[-1]
    tile = shape.heads
    rows = shape.rows if shape.placed else min(shape.rows, power_of_two(k, least=16))
    part = blocks(blocks(k, shape.parts), rows) * rows
    query = aligned(query.to(torch.bfloat16).contiguous())
    # Rows lie at multiples of this many items: 16 bytes at true sizes, so loads may be as wide.
    unit = gcd(view.stride(0), view.stride(1), 16 // view.element_size())
    offsets = prepare_offsets(view, locations, valid, shape.parts * part, unit)
    arguments = {
        "UNIT": unit,
        "heads": heads,
        "PARTS": shape.parts,
        "PART": part,
        "PART_BLOCK": power_of_two(part),
        "ROWS": rows,
        "num_warps": shape.warps,
        **FUSION,
    }
    kernels = (_attend_bf16, _attend_fp8)
    if shape.placed:
        from . import sparse_mla_placed  # only where there is a GPU

        kernels = (sparse_mla_placed._attend_bf16, sparse_mla_placed._attend_fp8)
    else:
        arguments |= {
            "width": width,
            "value_width": value_width,
            "HEADS": tile,
            "ROTARY": power_of_two(width - value_width, least=16) if width > value_width else 1,
            "STAGES": shape.stages,
        }
    grid = (n * blocks(heads, tile) * shape.parts,)
    if view.dtype != torch.uint8:
        if not shape.placed:
            arguments["VALUES"] = power_of_two(value_width, least=16)
        kernels[0][grid](query, view, offsets, out, stats, scale * LOG2E, **arguments)
        return
    if view.shape[2] != row_bytes(value_width, width - value_width):
        raise ValueError(f"records of {view.shape[2]} bytes: no rows of {width} values")
    records = [view.view(dtype) for dtype in (torch.float8_e4m3fn, torch.float32, torch.bfloat16)]
    inputs = (query, *prepare_queries(query, value_width), *records, offsets)
    if not shape.placed:
        arguments["GROUP"] = GROUP
    kernels[1][grid](*inputs, out, stats, scale * LOG2E, **arguments)
