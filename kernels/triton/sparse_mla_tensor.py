"""Sparse latent attention on tensor cores: bf16 queries over bf16 rows or 8-bit row records.

The formula and the order of ``sparse_mla.py``: a program attends HEADS heads of one query row over
one part of its selection, ROWS rows at a time, ascending, sums in float32. How many parts there are
follows from k and the heads alone, and another kernel adds them up in order, so a row's bits know
nothing of the batch. A part stops after its last valid row: what is left out would add exactly 0.

8-bit rows (``kernels/fp8.py``) become float16 in registers: codes times the ratio of their group's
scale to the row's largest, sigma. That is exact up to float16's rounding (2^-11; bf16, which others
use here, 2^-8) and cannot overflow: |code * ratio| <= 448. Scores are multiplied by sigma, and so
are the weights, by adding log2(sigma) to their exponents. Queries are moved into the range of float16
by a power of two of their own.

Bytes to move: k rows per query row (1,152 or 656 B each at 512 + 64 values), once for every HEADS
heads; beside them 9 k of locations, queries, results, and the parts' partial sums twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fp8 import GROUP, row_bytes
from .fp8 import round_bf16
from .launch import FUSION, aligned, blocks, power_of_two

# Below any score, and far enough from the limits of float32 that differences stay finite.
LOWEST = tl.constexpr(-1e30)
LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Shape:
    """How a call is cut: rows of a tile, parts of a selection, and what the compiler is told."""

    rows: int
    parts: int
    warps: int
    stages: int


def choose_shape(heads: int, k: int, eight_bit: bool) -> Shape:
    """The shape for a model's heads, k and row format: never for a batch."""
    if heads <= 16:
        return Shape(rows=32, parts=min(8, blocks(k, 32)), warps=4, stages=3)
    return Shape(rows=32 if eight_bit else 64, parts=min(4, blocks(k, 64)), warps=8, stages=2)


@triton.jit
def _last_valid(valid, first, stop, PART: tl.constexpr):  # fmt: skip
    """One past the last valid place of a part."""
    place = first + tl.arange(0, PART)
    there = tl.load(valid + place, mask=place < stop, other=0) != 0
    return tl.max(tl.where(there, place + 1, 0), axis=0)


@triton.jit
def _item(location, PER: tl.constexpr, WIDE: tl.constexpr):
    """Frame (int64) and place of a location. Where an arena has fewer than 2^31 items, 32-bit
    division does."""
    if not WIDE:
        location = location.to(tl.int32)
    return (location // PER).to(tl.int64), (location % PER).to(tl.int64)


@triton.jit
def _weigh(scores, there, best, mass):
    """Soft-max on line: weights of a tile, what is kept of the sums so far, new best and mass."""
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
    locations: tl.tensor,
    valid: tl.tensor,
    out: tl.tensor,
    stats: tl.tensor,
    scale: tl.tensor,
    heads: tl.constexpr,
    width: tl.constexpr,
    value_width: tl.constexpr,
    k: tl.constexpr,
    PER: tl.constexpr,
    FRAME: tl.constexpr,
    ROW: tl.constexpr,
    WIDE: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    PART_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    VALUES: tl.constexpr,
    ROTARY: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    head_blocks: tl.constexpr = (heads + HEADS - 1) // HEADS
    row = (tl.program_id(0) // (head_blocks * PARTS)).to(tl.int64)
    part = tl.program_id(0) // head_blocks % PARTS
    head = tl.program_id(0) % head_blocks * HEADS + tl.arange(0, HEADS)
    locations += row * k
    valid += row * k
    first = part * PART
    stop = _last_valid(valid, first, tl.minimum(first + PART, k), PART_BLOCK)
    value, rotary = tl.arange(0, VALUES), value_width + tl.arange(0, ROTARY)
    own = head[:, None] < heads
    q_at = query + (row * heads + head[:, None]) * width
    q = tl.load(q_at + value[None, :], mask=own & (value[None, :] < value_width), other=0.0)
    if ROTARY > 1:
        q_rotary = tl.load(q_at + rotary[None, :], mask=own & (rotary[None, :] < width), other=0.0)
    best = tl.full([HEADS], LOWEST, tl.float32)
    mass = tl.zeros([HEADS], tl.float32)
    total = tl.zeros([HEADS, VALUES], tl.float32)
    for start in tl.range(first, stop, ROWS, num_stages=STAGES):
        place = start + tl.arange(0, ROWS)
        there = tl.load(valid + place, mask=place < stop, other=0) != 0
        location = tl.load(locations + place, mask=place < stop, other=0)
        frame, place_in = _item(location, PER, WIDE)
        at = view + frame * FRAME + place_in * ROW
        values = tl.load(
            at[:, None] + value[None, :],
            mask=there[:, None] & (value[None, :] < value_width),
            other=0.0,
        )
        scores = tl.dot(q, tl.trans(values))
        if ROTARY > 1:
            turned = tl.load(
                at[:, None] + rotary[None, :],
                mask=there[:, None] & (rotary[None, :] < width),
                other=0.0,
            )
            scores = tl.dot(q_rotary, tl.trans(turned), scores)
        weight, kept, best = _weigh(scores * scale, there, best, mass)
        mass = mass * kept + tl.sum(weight, axis=1)
        total = tl.dot(round_bf16(weight), values, total * kept[:, None])
    _finish(out, stats, total, best, mass, row, part, head, heads, value_width, PARTS, VALUES)


@triton.jit
def _attend_fp8(
    query: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    turned: tl.tensor,
    locations: tl.tensor,
    valid: tl.tensor,
    out: tl.tensor,
    stats: tl.tensor,
    scale: tl.tensor,
    heads: tl.constexpr,
    width: tl.constexpr,
    value_width: tl.constexpr,
    k: tl.constexpr,
    PER: tl.constexpr,
    FRAME: tl.constexpr,
    ROW: tl.constexpr,
    WIDE: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    PART_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    ROTARY: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """FRAME and ROW in bytes. codes, scales, turned: the same records as e4m3, float32 and bf16."""
    head_blocks: tl.constexpr = (heads + HEADS - 1) // HEADS
    GROUPS: tl.constexpr = value_width // GROUP
    row = (tl.program_id(0) // (head_blocks * PARTS)).to(tl.int64)
    part = tl.program_id(0) // head_blocks % PARTS
    head = tl.program_id(0) % head_blocks * HEADS + tl.arange(0, HEADS)
    locations += row * k
    valid += row * k
    first = part * PART
    stop = _last_valid(valid, first, tl.minimum(first + PART, k), PART_BLOCK)
    value, rotary = tl.arange(0, value_width), tl.arange(0, ROTARY)
    group, inner = tl.arange(0, GROUPS), tl.arange(0, GROUP)
    own = head[:, None] < heads
    own_rotary = rotary < width - value_width
    q_at = query + (row * heads + head[:, None]) * width
    wide = tl.load(q_at + value[None, :], mask=own, other=0.0).to(tl.float32)
    # 2^e of the largest value; as float16 it becomes 2^14 or more, below 2^15.
    exponent = (tl.max(tl.abs(wide), axis=1).to(tl.int32, bitcast=True) >> 23) - 127
    exponent = tl.minimum(tl.maximum(exponent, -100), 120)
    q = (wide * ((141 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]).to(tl.float16)
    unscale = ((113 + exponent) << 23).to(tl.float32, bitcast=True) * scale
    if ROTARY > 1:
        q_rotary = tl.load(
            q_at + value_width + rotary[None, :], mask=own & own_rotary[None, :], other=0.0
        )
    best = tl.full([HEADS], LOWEST, tl.float32)
    mass = tl.zeros([HEADS], tl.float32)
    total = tl.zeros([HEADS, value_width], tl.float32)
    for start in tl.range(first, stop, ROWS, num_stages=STAGES):
        place = start + tl.arange(0, ROWS)
        there = tl.load(valid + place, mask=place < stop, other=0) != 0
        location = tl.load(locations + place, mask=place < stop, other=0)
        frame, place_in = _item(location, PER, WIDE)
        code_at = codes + frame * FRAME + place_in * ROW
        scale_at = scales + frame * (FRAME // 4) + place_in * (ROW // 4) + value_width // 4
        code = tl.load(
            code_at[:, None, None] + group[None, :, None] * GROUP + inner[None, None, :],
            mask=there[:, None, None],
            other=0.0,
        )
        of_group = tl.load(scale_at[:, None] + group[None, :], mask=there[:, None], other=1.0)
        sigma = tl.max(of_group, axis=1)
        ratio = (of_group / sigma[:, None]).to(tl.float16)
        values = (code.to(tl.float16) * ratio[:, :, None]).reshape(ROWS, value_width)
        scores = tl.dot(q, tl.trans(values)) * unscale[:, None] * sigma[None, :]
        if ROTARY > 1:
            turned_at = turned + frame * (FRAME // 2) + place_in * (ROW // 2)
            k_rotary = tl.load(
                turned_at[:, None] + value_width // 2 + 2 * GROUPS + rotary[None, :],
                mask=there[:, None] & own_rotary[None, :],
                other=0.0,
            )
            scores += tl.dot(q_rotary, tl.trans(k_rotary)) * scale
        weight, kept, best = _weigh(scores + tl.log2(sigma)[None, :], there, best, mass)
        mass = mass * kept + tl.sum(weight * (1.0 / sigma)[None, :], axis=1)
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
    n, heads, width = query.shape
    k = locations.shape[1]
    out = torch.empty(n, heads, value_width, dtype=query.dtype, device=query.device)
    if out.numel() == 0:
        return out
    eight_bit = view.dtype == torch.uint8
    shape = shape or choose_shape(heads, k, eight_bit)
    parts = shape.parts
    partial, stats = out, out
    if parts > 1:
        partial = query.new_empty(n, parts, heads, value_width, dtype=torch.float32)
        stats = query.new_empty(n, parts, heads, 2, dtype=torch.float32)
    tile = 16 if heads <= 16 else min(64, power_of_two(heads))
    rows = min(shape.rows, power_of_two(k, least=16))
    part = blocks(blocks(k, parts), rows) * rows
    arguments = {
        "heads": heads,
        "width": width,
        "value_width": value_width,
        "k": k,
        "PER": view.shape[1],
        "FRAME": view.stride(0),
        "ROW": view.stride(1),
        "WIDE": view.shape[0] * view.shape[1] >= 2**31,
        "PARTS": parts,
        "PART": part,
        "PART_BLOCK": power_of_two(part),
        "HEADS": tile,
        "ROWS": rows,
        "ROTARY": power_of_two(width - value_width, least=16) if width > value_width else 1,
        "STAGES": shape.stages,
        "num_warps": shape.warps,
        **FUSION,
    }
    chosen = aligned(locations.contiguous()), aligned(valid.contiguous().view(torch.uint8))
    query = aligned(query.to(torch.bfloat16).contiguous())
    grid = (n * blocks(heads, tile) * parts,)
    factor = scale * LOG2E
    if eight_bit:
        if view.shape[2] != row_bytes(value_width, width - value_width):
            raise ValueError(f"records of {view.shape[2]} bytes: no rows of {width} values")
        records = (
            view.view(torch.float8_e4m3fn),
            view.view(torch.float32),
            view.view(torch.bfloat16),
        )
        arguments |= {"GROUP": GROUP}
        _attend_fp8[grid](query, *records, *chosen, partial, stats, factor, **arguments)
    else:
        arguments |= {"VALUES": power_of_two(value_width, least=16)}
        _attend_bf16[grid](query, view, *chosen, partial, stats, factor, **arguments)
    if parts > 1:
        _combine[(n * heads,)](
            partial,
            stats,
            out,
            heads=heads,
            value_width=value_width,
            PARTS=parts,
            VALUES=power_of_two(value_width),
            num_warps=4 if value_width >= 512 else 1,
            **FUSION,
        )
    return out
