"""Lightning-indexer scores over paged keys (DeepSeek-V3.2 technical report, eq. 1).

score(row, entry) = sum_h weight_h * relu(q_h . key * scale)

One program scores ENTRIES entries for one row: the keys are gathered through the frame table, one
dot gives all heads, and the heads are added in one fixed order. Nothing in it depends on the other
rows, the number of keys, or where a row stands.

Bytes to move: the visible keys of each request once (rows of one request run side by side and share
them through L2), 4 bytes out per row and entry.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..indexer import KeyPages
from . import index_scores_tensor as tensor
from .launch import FUSION, aligned, blocks, power_of_two

ENTRIES, CHANNELS, WARPS = 128, 16, 8


@triton.jit(do_not_specialize=["n", "frames_row", "scores_row", "above", "per"])
def _score_kernel(
    q: tl.tensor,
    weights: tl.tensor,
    view: tl.tensor,
    frames: tl.tensor,
    row_segment: tl.tensor,
    visible: tl.tensor,
    scores: tl.tensor,
    n: tl.tensor,
    frames_row: tl.tensor,
    scores_row: tl.tensor,
    above: tl.tensor,
    frame_stride: tl.tensor,
    key_stride: tl.tensor,
    scale: tl.tensor,
    per: tl.tensor,
    heads: tl.constexpr,
    width: tl.constexpr,
    ENTRIES: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    row = (tl.program_id(0) % n).to(tl.int64)
    first = (tl.program_id(0) // n) * ENTRIES
    seen = tl.load(visible + row)
    if (seen > above) & (first < seen):
        entry = first + tl.arange(0, ENTRIES)
        there = entry < seen
        table = frames + tl.load(row_segment + row) * frames_row
        frame = tl.load(table + entry // per, mask=there, other=0)
        key_at = view + frame * frame_stride + (entry % per) * key_stride
        head, channel = tl.arange(0, HEADS), tl.arange(0, CHANNELS)
        q_at = q + (row * heads + head[None, :]) * width
        own_head = head < heads
        dots = tl.zeros([ENTRIES, HEADS], tl.float32)
        for start in range(0, width, CHANNELS):
            column = start + channel
            a = tl.load(
                key_at[:, None] + column[None, :],
                mask=there[:, None] & (column[None, :] < width),
                other=0.0,
            )
            b = tl.load(
                q_at + column[:, None],
                mask=own_head[None, :] & (column[:, None] < width),
                other=0.0,
            )
            dots = tl.dot(a.to(tl.float32), b, dots, input_precision="ieee")
        weight = tl.load(weights + row * heads + head, mask=own_head, other=0.0)
        total = tl.sum(tl.maximum(dots * scale, 0.0) * weight[None, :], axis=1)
        tl.store(scores + row * scores_row + entry, total, mask=there)


def index_scores(
    q: Tensor,
    weights: Tensor,
    pages: KeyPages,
    row_segment: Tensor,
    visible: Tensor,
    most: int,
    scale: float,
    above: int = 0,
) -> Tensor:
    """Scores of n query rows against the keys of their segments.

    q: [n, H, d], weights: [n, H], float32 or bf16. pages: keys of d values, float32 or bf16, or
    uint8 records (``kernels/fp8.py``); 8-bit keys, and bf16 ones beside bf16 queries, are scored on
    tensor cores (``index_scores_tensor.py``), all else in IEEE float32. row_segment, visible: int64
    [n]; most: no row sees more entries. Rows that see ``above`` entries or fewer are left out.
    Returns float32 [n, most], undefined from ``visible`` on and for rows left out.
    """
    if pages.view.dtype == torch.uint8 or (pages.view.dtype == q.dtype == torch.bfloat16):
        return tensor.index_scores(q, weights, pages, row_segment, visible, most, scale, above)
    q, weights = q.float(), weights.float()
    n, heads, width = q.shape
    scores = torch.empty(n, most, dtype=torch.float32, device=q.device)
    if scores.numel() == 0:
        return scores
    view, frames = pages.view, aligned(pages.frames)
    _score_kernel[(n * blocks(most, ENTRIES),)](
        aligned(q.contiguous()),
        aligned(weights.contiguous()),
        view,
        frames,
        aligned(row_segment.contiguous()),
        aligned(visible.contiguous()),
        scores,
        n,
        frames.stride(0),
        most,
        above,
        view.stride(0),
        view.stride(1),
        scale,
        view.shape[1],
        heads=heads,
        width=width,
        ENTRIES=ENTRIES,
        HEADS=power_of_two(heads),
        CHANNELS=min(CHANNELS, power_of_two(width, least=16)),
        num_warps=WARPS,
        **FUSION,
    )
    return scores
