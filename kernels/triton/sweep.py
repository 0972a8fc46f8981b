"""The CLOCK sweep in Triton: its cost follows the slots that the hand passes, not the size of the cache."""

from __future__ import annotations

import triton
import triton.language as tl

from ..eviction import CLOCK_EARLY as _CLOCK_EARLY
from ..eviction import CLOCK_LESS as _CLOCK_LESS
from ..eviction import CLOCK_MOST_STEPS as _CLOCK_MOST_STEPS
from .tables import ABSENT, word_of

CLOCK_EARLY = tl.constexpr(_CLOCK_EARLY)
CLOCK_LESS = tl.constexpr(_CLOCK_LESS)
CLOCK_MOST_STEPS = tl.constexpr(_CLOCK_MOST_STEPS)


@triton.jit
def _tile(
    maps, meta, map_frames, meta_frames, room, start, rest, capacity, used, step, age, spare, lap,
    taken, count, PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr,
    PER: tl.constexpr, FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The victims among the next ``rest`` slots (at most BLOCK) from ``start``, around the end. Returns
    how many candidates there were, and how many slots the last one taken lies ahead, plus 1."""
    ahead = tl.arange(0, BLOCK)
    slot = start + ahead
    slot = tl.where(slot >= capacity, slot - capacity, slot)
    inside = (ahead < rest) & (slot < used)
    at = word_of(meta_frames, slot, inside, PER, FRAME, 2)
    # Past the first-level cache: other threads of the program have just written some of them.
    stamp = tl.load(meta + at + 1, mask=inside, other=0, cache_modifier=".cg")
    entry = tl.load(meta + at, mask=inside, other=0, cache_modifier=".cg")
    unused = step - (stamp >> 1)
    laps = (unused < age).to(tl.int32) + (unused < (age + 1) // 2).to(tl.int32)
    candidate = inside & (stamp != spare) & (laps == lap)
    rank = taken + tl.cumsum(candidate.to(tl.int32), 0) - 1
    goes = candidate & (rank < count)
    tl.store(room + rank, slot, mask=goes)
    at = word_of(map_frames, entry, goes, PER_MAP, MAP_FRAME, 1)
    tl.store(maps + at, tl.zeros([BLOCK], tl.int32) + ABSENT, mask=goes)
    return tl.sum(candidate.to(tl.int32), 0), tl.max(tl.where(goes, ahead, -1), 0) + 1


@triton.jit
def sweep(
    maps, meta, map_frames, meta_frames, room, hand_at, age_at, start, age, capacity, used, step,
    count, spare, TUNE: tl.constexpr, PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr,
    PER: tl.constexpr, FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Up to ``count`` victims into ``room`` in the order of the sweep; moves the hand, now at ``start``, and
    the age on. Returns how many. spare: a stamp whose slots must stay, -1 for none; a barrier has made
    stamps visible."""
    passed = 0
    taken = 0
    after = start  # the slot after the last victim
    while (taken < count) & (passed < 3 * capacity):
        lap = tl.where(passed < capacity, 0, tl.where(passed < 2 * capacity, 1, 2))
        rest = tl.minimum((lap + 1) * capacity - passed, BLOCK)
        found, last = _tile(
            maps, meta, map_frames, meta_frames, room, start, rest, capacity, used, step, age,
            spare, lap, taken, count, PER_MAP, MAP_FRAME, PER, FRAME, BLOCK,
        )  # fmt: skip
        after = tl.where(last > 0, start + last, after)
        taken += found
        advance = tl.where(taken >= count, last, rest)
        passed += advance
        start += advance
        start = tl.where(start >= capacity, start - capacity, start)
    tl.store(hand_at, tl.where(after >= capacity, after - capacity, after))
    if TUNE:
        second = (taken < count) | (passed > capacity)
        early = passed * CLOCK_EARLY < capacity
        longer = tl.where(early, tl.minimum(age + 1, CLOCK_MOST_STEPS), age)
        tl.store(age_at, tl.where(second, tl.maximum(age - CLOCK_LESS, 1), longer))
    return tl.minimum(taken, count)
