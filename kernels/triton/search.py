"""Parts of the top-k search: sortable keys, and the k-th largest of a tile or of a row.

Two bits of the k-th largest key are found per pass, by counting against three candidates: 16 passes
at most, fewer once exactly k keys reach a candidate.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_keys(scores: tl.tensor, entry: tl.tensor, seen: tl.tensor) -> tl.tensor:
    """Sortable int32 of scores."""
    score = tl.load(scores + entry, mask=entry < seen, other=0.0)
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _narrow(threshold, reach, k, first, second, third, over_first, over_second, over_third):
    """The highest of three candidates that at least k keys reach, if any does."""
    threshold = tl.where(over_first >= k, first, threshold)
    reach = tl.where(over_first >= k, over_first, reach)
    threshold = tl.where(over_second >= k, second, threshold)
    reach = tl.where(over_second >= k, over_second, reach)
    threshold = tl.where(over_third >= k, third, threshold)
    reach = tl.where(over_third >= k, over_third, reach)
    return threshold, reach


@triton.jit
def threshold_of_tile(
    key: tl.tensor, k: tl.constexpr, enough: tl.constexpr, total: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """A value that k keys or more reach, but no more than ``enough``, or else the k-th largest; and
    how many keys reach it.

    key: int32 of fewer than 2^21 values, the least int32 where there is none; total: how many there
    are. With fewer than k keys the lowest of them.
    """
    highest = tl.max(key, axis=0).to(tl.int64)
    lowest = tl.min(tl.where(key == -2147483648, 2147483647, key), axis=0).to(tl.int64)
    threshold = lowest.to(tl.int32)
    reach = total
    step = tl.cast(1, tl.int64)
    while step * 4 <= highest - lowest:
        step = step << 2
    while (step > 0) & (reach > enough):
        # Not above the highest, so that sums stay in int32.
        first = tl.minimum(threshold + step, highest).to(tl.int32)
        second = tl.minimum(threshold + 2 * step, highest).to(tl.int32)
        third = tl.minimum(threshold + 3 * step, highest).to(tl.int32)
        # Three counts of 21 bits in one sum.
        over = (key >= first).to(tl.int64) + ((key >= second).to(tl.int64) << 21)
        count = tl.sum(over + ((key >= third).to(tl.int64) << 42), axis=0)
        low, middle = (count & 0x1FFFFF).to(tl.int32), ((count >> 21) & 0x1FFFFF).to(tl.int32)
        high = (count >> 42).to(tl.int32)
        threshold, reach = _narrow(threshold, reach, k, first, second, third, low, middle, high)
        step = step >> 2
    return threshold, reach


@triton.jit
def threshold_of_row(
    scores: tl.tensor, seen: tl.tensor, k: tl.constexpr, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The same over a row of scores that sees more than k entries."""
    offset = tl.arange(0, BLOCK)
    threshold = -2147483648
    reach = seen
    step = 1073741824
    while (step > 0) & (reach > k):
        first = threshold + step
        second = first + step
        third = second + step
        low = tl.zeros([BLOCK], tl.int32)
        middle = tl.zeros([BLOCK], tl.int32)
        high = tl.zeros([BLOCK], tl.int32)
        start = 0
        while start < seen:
            entry = start + offset
            key = load_keys(scores, entry, seen)
            there = entry < seen
            low += (there & (key >= first)).to(tl.int32)
            middle += (there & (key >= second)).to(tl.int32)
            high += (there & (key >= third)).to(tl.int32)
            start += BLOCK
        low, middle, high = tl.sum(low, axis=0), tl.sum(middle, axis=0), tl.sum(high, axis=0)
        threshold, reach = _narrow(threshold, reach, k, first, second, third, low, middle, high)
        step = step >> 2
    return threshold, reach


@triton.jit
def count_above(
    scores: tl.tensor, seen: tl.tensor, threshold: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """Keys of a row above the threshold."""
    count = tl.zeros([BLOCK], tl.int32)
    start = 0
    while start < seen:
        entry = start + tl.arange(0, BLOCK)
        key = load_keys(scores, entry, seen)
        count += ((entry < seen) & (key > threshold)).to(tl.int32)
        start += BLOCK
    return tl.sum(count, axis=0)


@triton.jit
def rank_step(key, there, threshold, tied, ties):
    """Which of a tile to take: above the threshold, and of its equals as many as are left."""
    equal = (there & (key == threshold)).to(tl.int32)
    rank = tied + tl.cumsum(equal, axis=0)
    take = there & ((key > threshold) | ((key == threshold) & (rank <= ties)))
    return take, take.to(tl.int32), equal
