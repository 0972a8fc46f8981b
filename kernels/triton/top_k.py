"""Exact top-k of score rows in three launches, several programs a row where rows are few.

The bits of a float32, those of negative values mirrored, are an int32 of the same order (-0.0
counts as +0.0; see ``kernels/indexer.py``): a score's *key*.

1. ``_maxima``: the entries of a row fall into GROUPS interleaved groups; the largest key of each.
   There are at least 2 k groups, so the k-th largest of these maxima is a bound that k entries
   reach, and few others (for 100,000 independent scores and k = 2,048 about 2,800 entries do).
2. ``_candidates``: finds that bound (a little lower: what up to k / 8 more maxima reach) and lists
   the entries that reach it, in order.
3. ``_choose``: finds the k-th key among the candidates in registers, and writes what lies above and
   of its equals the lowest entries. Should ties or a hostile order leave more candidates than fit,
   it searches the whole row, in up to 16 passes: slower, and as exact.

All integers: the result is a function of the scores, however the work is spread. Bytes to move: a
row's scores twice (4 bytes each, the second time from L2 where it holds them).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import FUSION, aligned, power_of_two, processors
from .search import count_above, load_keys, rank_step, threshold_of_row, threshold_of_tile

BLOCK, WARPS = 2048, 8
MAXIMA_WARPS, UNROLL = 4, 4
_LEAST = tl.constexpr(-2147483648)


@triton.jit
def _span(seen, part, PARTS: tl.constexpr):
    """First and one past the last entry of a part of a row."""
    size = (seen + PARTS - 1) // PARTS
    size = (size + 3) // 4 * 4  # parts start at multiples of 16 bytes
    first = part * size
    return first, tl.minimum(first + size, seen)


@triton.jit(do_not_specialize=["scores_row"])
def _maxima(
    scores: tl.tensor,
    visible: tl.tensor,
    maxima: tl.tensor,
    scores_row: tl.tensor,
    k: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    row, part = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    seen = tl.load(visible + row).to(tl.int32)
    if seen > k:
        OWN: tl.constexpr = GROUPS // PARTS
        offset = tl.arange(0, OWN)
        start, stop = _span(seen, part, PARTS)
        best = tl.full([OWN], _LEAST, tl.int32)
        while start < stop:
            for step in tl.static_range(UNROLL):
                entry = start + step * OWN + offset
                key = load_keys(scores + row * scores_row, entry, stop)
                best = tl.maximum(best, tl.where(entry < stop, key, _LEAST))
            start += UNROLL * OWN
        tl.store(maxima + row * GROUPS + part * OWN + offset, best)


@triton.jit(do_not_specialize=["scores_row"])
def _candidates(
    scores: tl.tensor,
    visible: tl.tensor,
    maxima: tl.tensor,
    entries: tl.tensor,
    counts: tl.tensor,
    scores_row: tl.tensor,
    k: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, part = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    seen = tl.load(visible + row).to(tl.int32)
    if seen > k:
        keys = tl.load(maxima + row * GROUPS + tl.arange(0, GROUPS))
        bound, _ = threshold_of_tile(keys, k, k + k // 8, GROUPS)
        start, stop = _span(seen, part, PARTS)
        entries += (row * PARTS + part) * GROUPS
        count = 0
        # Runs of 8 neighbours lie in one or two threads: only their counts are added across threads.
        offset = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
        while start < stop:
            entry = start + offset
            key = load_keys(scores + row * scores_row, entry, stop)
            take = (entry < stop) & (key >= bound)
            inner = tl.cumsum(take.to(tl.int32), axis=1)
            taken = tl.sum(take.to(tl.int32), axis=1)
            place = count + (tl.cumsum(taken, axis=0) - taken)[:, None] + inner - 1
            tl.store(entries + place, entry, mask=take & (place < GROUPS))
            count += tl.sum(taken, axis=0)
            start += BLOCK
        tl.store(counts + row * PARTS + part, count)


@triton.jit
def _choose_all(chosen, seen, k: tl.constexpr, K_BLOCK: tl.constexpr):
    """A row that sees at most k entries takes them all."""
    for start in tl.static_range(0, k, K_BLOCK):
        entry = start + tl.arange(0, K_BLOCK)
        tl.store(chosen + entry, tl.where(entry < seen, entry, -1).to(tl.int64), mask=entry < k)


@triton.jit
def _choose_candidates(
    scores, entries, counts, chosen, seen, k: tl.constexpr, GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """The best k of the candidates, which all fit one tile."""
    place = tl.arange(0, GROUPS)
    source = tl.zeros([GROUPS], tl.int32)  # in ``entries``; parts' lists are GROUPS apart
    total = 0
    for part in tl.static_range(PARTS):
        source = tl.where(place >= total, part * GROUPS + place - total, source)
        total += tl.load(counts + part)
    there = place < total
    entry = tl.load(entries + source, mask=there, other=0)
    key = tl.where(there, load_keys(scores, entry, seen), _LEAST)
    threshold, _ = threshold_of_tile(key, k, k, total)
    equal = (there & (key == threshold)).to(tl.int32)
    ties = k - tl.sum((there & (key > threshold)).to(tl.int32), axis=0)
    take = there & ((key > threshold) | ((key == threshold) & (tl.cumsum(equal, axis=0) <= ties)))
    at = tl.cumsum(take.to(tl.int32), axis=0) - 1
    tl.store(chosen + at, entry.to(tl.int64), mask=take)


@triton.jit
def _choose_from_row(scores, chosen, seen, k: tl.constexpr, BLOCK: tl.constexpr):
    """The best k of a whole row."""
    threshold, reach = threshold_of_row(scores, seen, k, BLOCK)
    ties = k
    if reach > k:
        ties = k - count_above(scores, seen, threshold, BLOCK)
    placed = 0
    tied = 0
    start = 0
    while start < seen:
        entry = start + tl.arange(0, BLOCK)
        key = load_keys(scores, entry, seen)
        take, taken, equal = rank_step(key, entry < seen, threshold, tied, ties)
        place = placed + tl.cumsum(taken, axis=0) - 1
        tl.store(chosen + place, entry.to(tl.int64), mask=take)
        placed += tl.sum(taken, axis=0)
        tied += tl.sum(equal, axis=0)
        start += BLOCK


@triton.jit(do_not_specialize=["scores_row"])
def _choose(
    scores: tl.tensor,
    visible: tl.tensor,
    entries: tl.tensor,
    counts: tl.tensor,
    chosen: tl.tensor,
    scores_row: tl.tensor,
    k: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    K_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    seen = tl.load(visible + row).to(tl.int32)
    scores += row * scores_row
    chosen += row * k
    if seen > k:
        counts += row * PARTS
        count = 0
        for part in tl.static_range(PARTS):
            count += tl.load(counts + part)
        if count <= GROUPS:
            entries += row * PARTS * GROUPS
            _choose_candidates(scores, entries, counts, chosen, seen, k, GROUPS, PARTS)
        else:
            _choose_from_row(scores, chosen, seen, k, BLOCK)
    else:
        _choose_all(chosen, seen, k, K_BLOCK)


def choose_parts(n: int, device: torch.device) -> int:
    """Programs that share a row's scores: about 4 for each multiprocessor in all, 4 to 16.

    On an H200, 100,000 scores, k = 2,048: 1 row takes 44 / 32 / 28 us with 4 / 8 / 16, 16 rows take 46 /
    35 / 34, and 128 rows 97 / 97 / 110.
    """
    return min(16, max(4, power_of_two(4 * processors(device) // max(n, 1))))


def top_k(scores: Tensor, visible: Tensor, k: int, parts: int | None = None) -> Tensor:
    """The k highest entries of each row, ties to the lowest entry, in ascending entry order.

    scores: float32 [n, T], read below ``visible`` only, and only in rows that see more than k.
    visible: int64 [n], at most T; T below 2^31. parts: programs that share a row, a power of two;
    changes the time, not the result. Returns int64 [n, k]; rows that see fewer end in -1.
    """
    n, most = scores.shape
    chosen = torch.empty(n, k, dtype=torch.int64, device=scores.device)
    if not chosen.numel():
        return chosen
    scores, visible = aligned(scores.contiguous()), aligned(visible.contiguous())
    parts = parts or choose_parts(n, scores.device)
    groups = max(2 * power_of_two(k), 32 * parts)
    entries = scores.new_empty(n, parts, groups, dtype=torch.int32)
    counts = scores.new_empty(n, parts, dtype=torch.int32)
    cut = {"k": k, "GROUPS": groups, "PARTS": parts, **FUSION}
    if most > k:
        maxima = scores.new_empty(n, groups, dtype=torch.int32)
        _maxima[(n * parts,)](
            scores, visible, maxima, most, UNROLL=UNROLL, num_warps=MAXIMA_WARPS, **cut
        )
        _candidates[(n * parts,)](
            scores, visible, maxima, entries, counts, most, BLOCK=BLOCK, num_warps=WARPS, **cut
        )
    _choose[(n,)](
        scores,
        visible,
        entries,
        counts,
        chosen,
        most,
        K_BLOCK=min(BLOCK, power_of_two(k)),
        BLOCK=BLOCK,
        num_warps=WARPS,
        **cut,
    )
    return chosen
