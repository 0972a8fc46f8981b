"""Exact top-k of score rows: a search for the k-th score, then compaction in entry order.

The bits of a float32, those of negative values mirrored, are an int32 of the same order (-0.0
counts as +0.0; see ``kernels/indexer.py``). Two bits of the k-th largest are found per pass, by
counting against three candidates: 16 passes at most, fewer once exactly k keys reach a candidate.
A last pass takes what lies above, and of its equals the lowest entries. All integers: nothing
depends on how the work is spread.

Bytes to move: a row's scores up to 18 times (4 bytes each), after the first time from L2 where it
holds them (128 KiB a row at 32,768 entries).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import FUSION, aligned, power_of_two

BLOCK, WARPS = 2048, 8


@triton.jit
def _load_keys(
    scores: tl.tensor,
    entry: tl.tensor,
    seen: tl.tensor,
) -> tl.tensor:
    """Sortable int32 of scores."""
    score = tl.load(scores + entry, mask=entry < seen, other=0.0)
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _threshold(
    scores: tl.tensor,
    seen: tl.tensor,
    k: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """A key that exactly k keys reach, or else the k-th largest; and how many keys reach it.

    For a row that sees more than k entries. Both int32.
    """
    offset = tl.arange(0, BLOCK)
    threshold = -2147483648
    reach = seen
    step = 1073741824
    while (step > 0) & (reach > k):
        first = threshold + step
        second = first + step
        third = second + step
        over_first = tl.zeros([BLOCK], tl.int32)
        over_second = tl.zeros([BLOCK], tl.int32)
        over_third = tl.zeros([BLOCK], tl.int32)
        start = 0
        while start < seen:
            entry = start + offset
            key = _load_keys(scores, entry, seen)
            there = entry < seen
            over_first += (there & (key >= first)).to(tl.int32)
            over_second += (there & (key >= second)).to(tl.int32)
            over_third += (there & (key >= third)).to(tl.int32)
            start += BLOCK
        count = tl.sum(over_first, axis=0)
        threshold = tl.where(count >= k, first, threshold)
        reach = tl.where(count >= k, count, reach)
        count = tl.sum(over_second, axis=0)
        threshold = tl.where(count >= k, second, threshold)
        reach = tl.where(count >= k, count, reach)
        count = tl.sum(over_third, axis=0)
        threshold = tl.where(count >= k, third, threshold)
        reach = tl.where(count >= k, count, reach)
        step = step >> 2
    return threshold, reach


@triton.jit
def _count_above(
    scores: tl.tensor,
    seen: tl.tensor,
    threshold: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Keys above the threshold."""
    offset = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.int32)
    start = 0
    while start < seen:
        entry = start + offset
        key = _load_keys(scores, entry, seen)
        count += ((entry < seen) & (key > threshold)).to(tl.int32)
        start += BLOCK
    return tl.sum(count, axis=0)


@triton.jit
def _compact(
    scores: tl.tensor,
    chosen: tl.tensor,
    seen: tl.tensor,
    threshold: tl.tensor,
    ties: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write the entries above the threshold and the first ``ties`` equal to it, ascending."""
    offset = tl.arange(0, BLOCK)
    placed = 0
    tied = 0
    start = 0
    while start < seen:
        entry = start + offset
        key = _load_keys(scores, entry, seen)
        there = entry < seen
        equal = (there & (key == threshold)).to(tl.int32)
        rank = tied + tl.cumsum(equal, axis=0)
        take = there & ((key > threshold) | ((key == threshold) & (rank <= ties)))
        taken = take.to(tl.int32)
        place = placed + tl.cumsum(taken, axis=0) - 1
        tl.store(chosen + place, entry.to(tl.int64), mask=take)
        placed += tl.sum(taken, axis=0)
        tied += tl.sum(equal, axis=0)
        start += BLOCK


@triton.jit(do_not_specialize=["scores_row"])
def _top_k_kernel(
    scores: tl.tensor,
    visible: tl.tensor,
    chosen: tl.tensor,
    scores_row: tl.tensor,
    k: tl.constexpr,
    K_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    seen = tl.load(visible + row).to(tl.int32)
    scores += row * scores_row
    chosen += row * k
    if seen > k:
        threshold, reach = _threshold(scores, seen, k, BLOCK)
        ties = k
        if reach > k:
            ties = k - _count_above(scores, seen, threshold, BLOCK)
        _compact(scores, chosen, seen, threshold, ties, BLOCK)
    else:  # all of them; the scores are not read
        for start in range(0, k, K_BLOCK):
            entry = start + tl.arange(0, K_BLOCK)
            tl.store(chosen + entry, tl.where(entry < seen, entry, -1).to(tl.int64), mask=entry < k)


def top_k(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """The k highest entries of each row, ties to the lowest entry, in ascending entry order.

    scores: float32 [n, T], read below ``visible`` only, and only in rows that see more than k.
    visible: int64 [n], at most T; T below 2^31. Returns int64 [n, k]; rows that see fewer end in -1.
    """
    n = scores.shape[0]
    chosen = torch.empty(n, k, dtype=torch.int64, device=scores.device)
    if chosen.numel():
        _top_k_kernel[(n,)](
            aligned(scores.contiguous()),
            aligned(visible.contiguous()),
            chosen,
            scores.shape[1],
            k=k,
            K_BLOCK=min(BLOCK, power_of_two(k)),
            BLOCK=BLOCK,
            num_warps=WARPS,
            **FUSION,
        )
    return chosen
