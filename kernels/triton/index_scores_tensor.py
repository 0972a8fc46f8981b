"""Lightning-indexer scores on tensor cores: bf16 keys, or 8-bit key records, as they lie in frames.

score(row, entry) = sum_h weight_h * relu(q_h . key * scale)   (DeepSeek-V3.2 technical report, eq. 1)

Against 8-bit keys (``kernels/fp8.py``) queries are rounded to e4m3 too, with one scale a head, as the
public description of that model does; both scales are applied to the sum in float32. All products
of a key with a row's heads come from one dot of one shape, and heads are added in one fixed order:
a score's bits depend on its row and key only.

The launch knows no lengths. A fixed number of programs share all tiles of ENTRIES keys of all rows,
as the device's ``visible`` counts them, in one contiguous run each: a program loads a row's queries
once and then streams keys.

Bytes to move: the visible keys of each row once, 4 bytes out per row and entry. Rows of one request
read the same keys at about the same time, so later ones find them in L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fp8 import key_bytes
from ..indexer import KeyPages
from .fp8 import quantize
from .launch import FUSION, aligned, power_of_two, processors

# PROGRAMS: for each multiprocessor. On an H200, 128 rows over 100,000 8-bit keys, whose bytes take 401
# us at the copy rate: 469 us; with 4 programs 495, with 6 616; 64 entries 707 and more, 8 warps 526 and
# more; pipelined (2 stages and more), where records of 132 bytes are copied 4 bytes at a time, 712 and
# more; products in float16 instead of e4m3, which are exact, 657 and more (of 2,048 entries both chose
# the same as the reference). bf16 keys run at the copy rate in any of these shapes (778 to 795 us).
ENTRIES, WARPS, STAGES, PROGRAMS = 128, 4, 1, 5
_PLAN = tl.constexpr(128)  # rows that the plan counts at a time


@triton.jit
def _seen(visible, group, groups, TOGETHER: tl.constexpr):
    """Keys that some row of a group sees."""
    seen = tl.load(visible + group * TOGETHER, mask=group < groups, other=0)
    for row in tl.static_range(1, TOGETHER):
        other = tl.load(visible + group * TOGETHER + row, mask=group < groups, other=0)
        seen = tl.maximum(seen, other)
    return seen.to(tl.int32)


@triton.jit
def _tiles(visible, group, groups, above, ENTRIES: tl.constexpr, TOGETHER: tl.constexpr):
    """Tiles of groups: none where all rows see ``above`` entries or fewer."""
    seen = _seen(visible, group, groups, TOGETHER)
    return tl.where(seen > above, (seen + ENTRIES - 1) // ENTRIES, 0)


@triton.jit
def _count(visible, groups, above, ENTRIES: tl.constexpr, TOGETHER: tl.constexpr):
    """Tiles of all groups."""
    count = 0
    start = 0
    while start < groups:
        group = start + tl.arange(0, _PLAN)
        count += tl.sum(_tiles(visible, group, groups, above, ENTRIES, TOGETHER), axis=0)
        start += _PLAN
    return count


@triton.jit
def _find(visible, groups, above, target, ENTRIES: tl.constexpr, TOGETHER: tl.constexpr):
    """Of all groups' tiles, one after the other: the group of tile ``target``, and its first tile."""
    found = 0
    base = 0
    before = 0
    start = 0
    while start < groups:
        group = start + tl.arange(0, _PLAN)
        tiles = _tiles(visible, group, groups, above, ENTRIES, TOGETHER)
        end = before + tl.cumsum(tiles, axis=0)
        ended = (group < groups) & (end <= target)
        found += tl.sum(ended.to(tl.int32), axis=0)
        base = tl.maximum(base, tl.max(tl.where(ended, end, 0), axis=0))
        before = tl.max(end, axis=0)
        start += _PLAN
    return found, base


@triton.jit
def _row_inputs(
    q, q_scales, weights, row, scale, heads: tl.constexpr, width: tl.constexpr,
    EIGHT_BIT: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Queries of a row [HEADS, WIDTH], and its weights, with all scales that are not a key's."""
    head, column = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    own = head < heads
    q_at = q + (row * heads + head[:, None]) * width + column[None, :]
    if heads == HEADS and width == WIDTH:
        queries = tl.load(q_at)
    else:
        queries = tl.load(q_at, mask=own[:, None] & (column[None, :] < width), other=0.0)
    weight = tl.load(weights + row * heads + head, mask=own, other=0.0).to(tl.float32) * scale
    if EIGHT_BIT:
        weight *= tl.load(q_scales + row * heads + head, mask=own, other=0.0)
    return queries, weight


@triton.jit(do_not_specialize=["n", "frames_row", "scores_row", "above"])
def _score_tiles(
    q: tl.tensor,
    q_scales: tl.tensor,
    weights: tl.tensor,
    keys: tl.tensor,
    key_scales: tl.tensor,
    frames: tl.tensor,
    row_segment: tl.tensor,
    visible: tl.tensor,
    scores: tl.tensor,
    n: tl.tensor,
    frames_row: tl.tensor,
    scores_row: tl.tensor,
    above: tl.tensor,
    scale: tl.tensor,
    heads: tl.constexpr,
    width: tl.constexpr,
    PER: tl.constexpr,
    FRAME: tl.constexpr,
    KEY: tl.constexpr,
    EIGHT_BIT: tl.constexpr,
    ENTRIES: tl.constexpr,
    TOGETHER: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """FRAME and KEY: strides of keys in values (in bytes, for 8-bit keys)."""
    groups = n // TOGETHER
    count = _count(visible, groups, above, ENTRIES, TOGETHER)
    worker, workers = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    tile = (worker * count // workers).to(tl.int32)
    last = ((worker + 1) * count // workers).to(tl.int32)
    group, base = _find(visible, groups, above, tile, ENTRIES, TOGETHER)
    column = tl.arange(0, WIDTH)
    while tile < last:
        row = tl.cast(group, tl.int64) * TOGETHER
        seen = _seen(visible, tl.cast(group, tl.int64), groups, TOGETHER)
        tiles = tl.where(seen > above, (seen + ENTRIES - 1) // ENTRIES, 0)
        stop = tl.minimum(last, base + tiles)
        if tile < stop:
            table = frames + tl.load(row_segment + row) * frames_row
            queries, weight = _row_inputs(
                q, q_scales, weights, row, scale, heads, width, EIGHT_BIT, HEADS, WIDTH
            )
            for current in tl.range(tile - base, stop - base, num_stages=STAGES):
                entry = current * ENTRIES + tl.arange(0, ENTRIES)
                there = entry < seen
                frame = tl.load(table + entry // PER, mask=there, other=0)
                offset = frame * FRAME + entry % PER * KEY
                key = tl.load(
                    keys + offset[:, None] + column[None, :],
                    mask=there[:, None] & (column[None, :] < width),
                    other=0.0,
                )
                if EIGHT_BIT:
                    scale_at = frame * (FRAME // 4) + entry % PER * (KEY // 4) + width // 4
                    key_scale = tl.load(key_scales + scale_at, mask=there, other=0.0)
                for other in tl.static_range(TOGETHER):
                    if TOGETHER > 1:
                        queries, weight = _row_inputs(
                            q, q_scales, weights, row + other, scale, heads, width, EIGHT_BIT,
                            HEADS, WIDTH,
                        )  # fmt: skip
                        there = entry < tl.load(visible + row + other)
                    dots = tl.dot(key, tl.trans(queries))
                    total = tl.sum(tl.maximum(dots, 0.0) * weight[None, :], axis=1)
                    if EIGHT_BIT:
                        total *= key_scale
                    tl.store(scores + (row + other) * scores_row + entry, total, mask=there)
        tile = tl.maximum(tile, stop)
        base += tiles
        group += 1


def index_scores(
    q: Tensor,
    weights: Tensor,
    pages: KeyPages,
    row_segment: Tensor,
    visible: Tensor,
    most: int,
    scale: float,
    above: int = 0,
    rows_per_segment: int = 1,
    shape: tuple[int, int, int, int] = (ENTRIES, WARPS, STAGES, PROGRAMS),
) -> Tensor:
    """Scores of n query rows: float32 [n, most], undefined from ``visible`` on and for rows that see
    ``above`` entries or fewer.

    q: [n, H, d], weights: [n, H], bf16 or float32 (queries are rounded to the keys' format). pages:
    keys of d bf16 values, or uint8 records of d + 4 bytes. row_segment, visible: int64 [n]. scale:
    positive. rows_per_segment: promise that rows come in runs of this many of one segment; each tile of
    keys is then read once for a run (the bits stay). shape: entries of a tile, warps, stages, programs
    for each multiprocessor.
    """
    if len(q) % rows_per_segment:
        raise ValueError(f"rows_per_segment = {rows_per_segment}: must divide the {len(q)} rows")
    if not scale > 0.0:
        raise ValueError(f"scale = {scale}: must be positive")
    n, heads, width = q.shape
    scores = torch.empty(n, most, dtype=torch.float32, device=q.device)
    if scores.numel() == 0:
        return scores
    view, frames = pages.view, aligned(pages.frames)
    eight_bit = view.dtype == torch.uint8
    entries, warps, stages, programs = shape
    if eight_bit:
        if view.shape[2] != key_bytes(width):
            raise ValueError(f"records of {view.shape[2]} bytes: no keys of {width} values")
        q, q_scales = quantize(q)
        keys, key_scales = view.view(torch.float8_e4m3fn), view.view(torch.float32)
    else:
        q = q.to(torch.bfloat16).contiguous()
        keys, q_scales, key_scales = view, weights, weights
    _score_tiles[(programs * processors(q.device),)](
        aligned(q),
        q_scales,
        aligned(weights.contiguous()),
        keys,
        key_scales,
        frames,
        aligned(row_segment.contiguous()),
        aligned(visible.contiguous()),
        scores,
        n,
        frames.stride(0),
        most,
        above,
        scale,
        heads=heads,
        width=width,
        PER=view.shape[1],
        FRAME=view.stride(0),
        KEY=view.stride(1),
        EIGHT_BIT=eight_bit,
        ENTRIES=entries,
        TOGETHER=rows_per_segment,
        HEADS=power_of_two(heads, least=16),
        WIDTH=power_of_two(width, least=32),
        STAGES=stages,
        num_warps=warps,
        **FUSION,
    )
    return scores
