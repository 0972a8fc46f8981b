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

ENTRIES, WARPS, STAGES, PROGRAMS, HALF = 128, 4, 1, 4, False  # PROGRAMS: for each multiprocessor
_PLAN = tl.constexpr(128)  # rows that the plan counts at a time


@triton.jit
def _tiles(visible, row, n, above, ENTRIES: tl.constexpr):
    """Tiles of rows: none where a row sees ``above`` entries or fewer."""
    seen = tl.load(visible + row, mask=row < n, other=0).to(tl.int32)
    return tl.where(seen > above, (seen + ENTRIES - 1) // ENTRIES, 0)


@triton.jit
def _find(visible, n, above, target, ENTRIES: tl.constexpr):
    """Of all rows' tiles, one after the other: the row of tile ``target``, and its first tile."""
    row = 0
    base = 0
    before = 0
    start = 0
    while start < n:
        index = start + tl.arange(0, _PLAN)
        end = before + tl.cumsum(_tiles(visible, index, n, above, ENTRIES), axis=0)
        ended = (index < n) & (end <= target)
        row += tl.sum(ended.to(tl.int32), axis=0)
        base = tl.maximum(base, tl.max(tl.where(ended, end, 0), axis=0))
        before = tl.max(end, axis=0)
        start += _PLAN
    return row, base


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
    HALF: tl.constexpr,
    ENTRIES: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """FRAME and KEY: strides of keys in values (in bytes, for 8-bit keys)."""
    count = 0
    start = 0
    while start < n:
        rows = start + tl.arange(0, _PLAN)
        count += tl.sum(_tiles(visible, rows, n, above, ENTRIES), axis=0)
        start += _PLAN
    worker, workers = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    tile = (worker * count // workers).to(tl.int32)
    last = ((worker + 1) * count // workers).to(tl.int32)
    row, base = _find(visible, n, above, tile, ENTRIES)
    head, column = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    while tile < last:
        at = tl.cast(row, tl.int64)
        seen = tl.load(visible + at).to(tl.int32)
        tiles = tl.where(seen > above, (seen + ENTRIES - 1) // ENTRIES, 0)
        stop = tl.minimum(last, base + tiles)
        if tile < stop:
            table = frames + tl.load(row_segment + at) * frames_row
            own = head < heads
            q_at = q + (at * heads + head[:, None]) * width + column[None, :]
            if heads == HEADS and width == WIDTH:
                queries = tl.load(q_at)
            else:
                queries = tl.load(q_at, mask=own[:, None] & (column[None, :] < width), other=0.0)
            weight = (
                tl.load(weights + at * heads + head, mask=own, other=0.0).to(tl.float32) * scale
            )
            if EIGHT_BIT:
                weight *= tl.load(q_scales + at * heads + head, mask=own, other=0.0)
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
                if HALF:
                    dots = tl.dot(key.to(tl.float16), tl.trans(queries.to(tl.float16)))
                else:
                    dots = tl.dot(key, tl.trans(queries))
                total = tl.sum(tl.maximum(dots, 0.0) * weight[None, :], axis=1)
                if EIGHT_BIT:
                    scale_at = frame * (FRAME // 4) + entry % PER * (KEY // 4) + width // 4
                    total *= tl.load(key_scales + scale_at, mask=there, other=0.0)
                tl.store(scores + at * scores_row + entry, total, mask=there)
        tile = tl.maximum(tile, stop)
        base += tiles
        row += 1


def index_scores(
    q: Tensor,
    weights: Tensor,
    pages: KeyPages,
    row_segment: Tensor,
    visible: Tensor,
    most: int,
    scale: float,
    above: int = 0,
    shape: tuple[int, int, int, int, bool] = (ENTRIES, WARPS, STAGES, PROGRAMS, HALF),
) -> Tensor:
    """Scores of n query rows: float32 [n, most], undefined from ``visible`` on and for rows that see
    ``above`` entries or fewer.

    q: [n, H, d], weights: [n, H], bf16 or float32 (queries are rounded to the keys' format). pages:
    keys of d bf16 values, or uint8 records of d + 4 bytes. row_segment, visible: int64 [n]. scale:
    positive. shape: entries of a tile, warps, stages, programs for each multiprocessor.
    """
    if not scale > 0.0:
        raise ValueError(f"scale = {scale}: must be positive")
    n, heads, width = q.shape
    scores = torch.empty(n, most, dtype=torch.float32, device=q.device)
    if scores.numel() == 0:
        return scores
    view, frames = pages.view, aligned(pages.frames)
    eight_bit = view.dtype == torch.uint8
    entries, warps, stages, programs, half = shape
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
        HALF=half and eight_bit,
        ENTRIES=entries,
        HEADS=power_of_two(heads, least=16),
        WIDTH=power_of_two(width, least=32),
        STAGES=stages,
        num_warps=warps,
        **FUSION,
    )
    return scores
