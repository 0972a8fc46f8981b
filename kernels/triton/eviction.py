"""Eviction in Triton: victims by key functions (passes over all slots), or by the CLOCK sweep (sweep.py)."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ..eviction import DRAW_CALL as _DRAW_CALL
from ..eviction import DRAW_SLOT as _DRAW_SLOT
from ..eviction import DRAW_STEP as _DRAW_STEP
from ..eviction import EvictionRule, Key
from ..eviction import random_key as _random_key
from ..eviction import stamp_key as _stamp_key
from .tables import ABSENT, WANTED, slot_tile, word_of

DRAW_SLOT = tl.constexpr(_DRAW_SLOT)
DRAW_STEP = tl.constexpr(_DRAW_STEP)
DRAW_CALL = tl.constexpr(_DRAW_CALL)
LEAST = tl.constexpr(-(2**63))
MOST = tl.constexpr(2**63 - 1)
# A gallop whose stride has passed this bisects from then on: four times it would overflow.
GALLOP = tl.constexpr(2**60)


# --- keys: as in kernels/eviction.py, of one slot; all int64 ----------------------------------------


@triton.jit
def stamp_key(slot, stamp, capacity, step, hand, draws):
    return stamp


@triton.jit
def random_key(slot, stamp, capacity, step, hand, draws):
    mixed = (slot + 1) * DRAW_SLOT ^ (step * DRAW_STEP + draws * DRAW_CALL)
    return (mixed ^ (mixed >> 15)) * DRAW_CALL & 0x7FFFFFFF


DEVICE_KEYS: dict[Key, Any] = {
    _stamp_key: stamp_key,
    _random_key: random_key,
}


def device_key(rule: EvictionRule) -> Any:
    """The rule's key as a Triton function, None for the CLOCK sweep. ValueError if it has none."""
    if rule.key is None:
        return None
    key = rule.device_key or DEVICE_KEYS.get(rule.key)
    if key is None:
        raise ValueError(
            f"eviction rule {rule.name!r} has no device_key: the Triton backend needs its key as a "
            "@triton.jit function; give one, or use the reference backend"
        )
    return key


# --- passes --------------------------------------------------------------------------------------


@triton.jit
def _keys(
    meta, meta_frames, start, used, capacity, step, hand, draws, spare,
    KEY: tl.constexpr, PER: tl.constexpr, FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of slots, their entries and keys. Candidates are those below ``used`` (others hold nothing that
    was written) whose entry is not negative: wanted ones and those of the stamp ``spare`` are none."""
    slot, entry, stamp = slot_tile(meta, meta_frames, start, used, PER, FRAME, BLOCK)
    entry = tl.where(stamp == spare, WANTED, entry)
    key = KEY(slot.to(tl.int64), stamp.to(tl.int64), capacity.to(tl.int64), step, hand, draws)
    return slot, entry, key


@triton.jit
def _key_range(
    meta, meta_frames, used, capacity, step, hand, draws, spare,
    KEY: tl.constexpr, PER: tl.constexpr, FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Number of candidates, their smallest and their largest key."""
    count = 0
    least = tl.zeros([BLOCK], tl.int64) + MOST
    most = tl.zeros([BLOCK], tl.int64) + LEAST
    start = 0
    while start < used:
        _slot, entry, key = _keys(
            meta,
            meta_frames,
            start,
            used,
            capacity,
            step,
            hand,
            draws,
            spare,
            KEY,
            PER,
            FRAME,
            BLOCK,
        )
        candidate = entry >= 0
        count += tl.sum(candidate.to(tl.int32), 0)
        least = tl.where(candidate, tl.minimum(least, key), least)
        most = tl.where(candidate, tl.maximum(most, key), most)
        start += BLOCK
    return count, tl.min(least, 0), tl.max(most, 0)


@triton.jit
def _threshold(
    meta, meta_frames, used, capacity, step, hand, draws, spare, count, low, high,
    KEY: tl.constexpr, PER: tl.constexpr, FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The count-th smallest key of the candidates, within [low, high]; how many lie below (0 also
    where all up to it go).

    A pass counts the keys up to a middle and moves a bound onto a key. Victims are few and their
    keys mostly lie close above the smallest (a sweep's distances, old stamps), so the middle
    gallops up from there before it bisects: 3 to 5 passes for a sweep over 16,000 slots, not 15.
    """
    below = 0
    stride = count.to(tl.int64) * 2
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)  # rounded down, without overflow
        middle = tl.where(middle - low > stride, low + stride, middle)
        up_to = 0
        last = tl.zeros([BLOCK], tl.int64) + LEAST
        following = tl.zeros([BLOCK], tl.int64) + MOST
        start = 0
        while start < used:
            _slot, entry, key = _keys(
                meta, meta_frames, start, used, capacity, step, hand, draws, spare, KEY, PER, FRAME, BLOCK,
            )  # fmt: skip
            counted = (entry >= 0) & (key <= middle)
            up_to += tl.sum(counted.to(tl.int32), 0)
            last = tl.where(counted, tl.maximum(last, key), last)
            beyond = (entry >= 0) & (key > middle)
            following = tl.where(beyond, tl.minimum(following, key), following)
            start += BLOCK
        enough = up_to >= count
        below = tl.where(enough, below, up_to)
        high = tl.where(enough, tl.max(last, 0), high)
        low = tl.where(enough, low, tl.min(following, 0))
        low = tl.where(up_to == count, high, low)
        below = tl.where(up_to == count, 0, below)
        stride = tl.where(enough, MOST, tl.where(stride > GALLOP, MOST, stride * 4))
    return high, below


@triton.jit
def _take_victims(
    maps, meta, map_frames, meta_frames, room, used, capacity, step, hand, draws, spare, threshold,
    ties,
    KEY: tl.constexpr, PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr,
    PER: tl.constexpr, FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Candidates below the threshold and the lowest ``ties`` at it, into ``room`` by slot; their map
    entries are dropped. Returns the last one in key order."""
    last = -1
    taken = 0
    tied = 0
    start = 0
    while start < used:
        slot, entry, key = _keys(
            meta,
            meta_frames,
            start,
            used,
            capacity,
            step,
            hand,
            draws,
            spare,
            KEY,
            PER,
            FRAME,
            BLOCK,
        )
        tie = (entry >= 0) & (key == threshold)
        tie_goes = tie & (tied + tl.cumsum(tie.to(tl.int32), 0) <= ties)
        goes = ((entry >= 0) & (key < threshold)) | tie_goes
        rank = taken + tl.cumsum(goes.to(tl.int32), 0) - 1
        tl.store(room + rank, slot, mask=goes)
        at = word_of(map_frames, entry, goes, PER_MAP, MAP_FRAME, 1)
        tl.store(maps + at, tl.zeros([BLOCK], tl.int32) + ABSENT, mask=goes)
        last = tl.maximum(last, tl.max(tl.where(tie_goes, slot, -1), 0))
        tied += tl.sum(tie.to(tl.int32), 0)
        taken += tl.sum(goes.to(tl.int32), 0)
        start += BLOCK
    return last


@triton.jit
def take_victims(
    maps, meta, map_frames, meta_frames, room, hand_at, hand, draws, used, capacity, step, count,
    spare,
    KEY: tl.constexpr, PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr,
    PER: tl.constexpr, FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Up to ``count`` victims of the first ``used`` slots into ``room`` by slot; moves the hand on. Returns
    how many.

    spare: a stamp whose slots must stay, -1 for none. Wanted slots that do not bear it are marked WANTED,
    by stores that a barrier has made visible. draws: counting this call.
    """
    sweep = hand.to(tl.int64)
    step = step.to(tl.int64)
    draw = draws.to(tl.int64)
    found, low, high = _key_range(
        meta, meta_frames, used, capacity, step, sweep, draw, spare, KEY, PER, FRAME, BLOCK
    )
    if found > 0:
        # Where all of them go the threshold is the largest key, and there is nothing to search.
        low = tl.where(found <= count, high, low)
        threshold, below = _threshold(
            meta, meta_frames, used, capacity, step, sweep, draw, spare, count, low, high,
            KEY, PER, FRAME, BLOCK,
        )  # fmt: skip
        last = _take_victims(
            maps, meta, map_frames, meta_frames, room, used, capacity, step, sweep, draw,
            spare, threshold, count - below, KEY, PER_MAP, MAP_FRAME, PER, FRAME, BLOCK,
        )  # fmt: skip
        tl.store(hand_at, tl.where(last + 1 == capacity, 0, last + 1))
    return tl.minimum(found, count)
