"""Admission in Triton: slots for missing entries, free ones first, then those of victims."""

from __future__ import annotations

import triton
import triton.language as tl

from .eviction import take_victims
from .sweep import sweep
from .tables import ABSENT, WANTED, is_entry, location_of, word_of


@triton.jit
def _change_hits(
    maps, meta, map_frames, meta_frames, wanted, width, entries, value,
    WHAT: tl.constexpr, PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr,
    PER_META: tl.constexpr, META_FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of the slots that were hit: the stamp becomes ``value`` (WHAT 0), or the entry WANTED (1), or itself
    again (2). Only victims leave the map meanwhile, and no hit is one."""
    start = 0
    while start < width:
        column = start + tl.arange(0, BLOCK)
        entry = tl.load(wanted + column, mask=column < width, other=ABSENT).to(tl.int32)
        old = is_entry(entry) & (entry < entries)
        at = word_of(map_frames, entry, old, PER_MAP, MAP_FRAME, 1)
        slot = tl.load(maps + at, mask=old, other=ABSENT)
        hit = slot >= 0
        at = word_of(meta_frames, slot, hit, PER_META, META_FRAME, 2)
        if WHAT == 0:
            tl.store(meta + at + 1, tl.zeros([BLOCK], tl.int32) + value, mask=hit)
        elif WHAT == 1:
            tl.store(meta + at, tl.zeros([BLOCK], tl.int32) + WANTED, mask=hit)
        else:
            tl.store(meta + at, entry, mask=hit)
        start += BLOCK


@triton.jit
def find_victims(
    maps, meta, map_frames, meta_frames, room, hand_at, draws_at, age_at, hand, draws, age,
    capacity, used, step, count, spare,
    KEY: tl.constexpr, TUNE: tl.constexpr, PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr,
    PER_META: tl.constexpr, META_FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Up to ``count`` victims (at least 1 asked for) into ``room``. Returns how many. hand, draws, age: as
    all threads have read them. spare: as in :func:`sweep`. Their entries leave the map."""
    tl.store(draws_at, draws + 1)
    if KEY is None:
        victims = sweep(
            maps, meta, map_frames, meta_frames, room, hand_at, age_at, hand, age, capacity, used,
            step, count, spare, TUNE, PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK,
        )  # fmt: skip
    else:
        victims = take_victims(
            maps, meta, map_frames, meta_frames, room, hand_at, hand, draws + 1, used, capacity,
            step, count, spare, KEY, PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK,
        )  # fmt: skip
    return victims


@triton.jit
def make_room(
    maps, meta, map_frames, meta_frames, wanted, room, used_at, hand_at, draws_at, age_at,
    used, hand, draws, age, width, entries, count, capacity, unstamped, step,
    TOUCH: tl.constexpr, KEY: tl.constexpr,
    PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr,
    PER_META: tl.constexpr, META_FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Slots for ``count`` missing entries: how many are free ones, how many there are with the victims in
    ``room``. capacity: 0 where nothing may change. unstamped: not all hits bear the stamp of this step."""
    stays = tl.where(capacity > 0, count, 0)
    free = tl.maximum(tl.minimum(capacity - used, stays), 0)
    granted = free
    spare = -1
    if TOUCH:
        spare = 2 * step + 1
        if (stays > 0) & (unstamped > 0):
            _change_hits(
                maps, meta, map_frames, meta_frames, wanted, width, entries, spare, 0,
                PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK,
            )  # fmt: skip
            tl.debug_barrier()
    if stays > free:
        if not TOUCH:
            _change_hits(
                maps, meta, map_frames, meta_frames, wanted, width, entries, 0, 1,
                PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK,
            )  # fmt: skip
            tl.debug_barrier()
        granted += find_victims(
            maps, meta, map_frames, meta_frames, room, hand_at, draws_at, age_at,
            hand, draws, age, capacity, used, step, stays - free, spare, KEY, True,
            PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK,
        )  # fmt: skip
        tl.debug_barrier()
        if not TOUCH:
            _change_hits(
                maps, meta, map_frames, meta_frames, wanted, width, entries, 0, 2,
                PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK,
            )  # fmt: skip
            tl.debug_barrier()
    if free > 0:
        tl.store(used_at, used + free)
    return free, granted


@triton.jit
def place_missing(
    maps, meta, row_frames, map_frames, meta_frames, location, columns, listed, part_counts, room,
    staging, source, target, span, count, free, granted, used, stamp, home, place,
    DECODE: tl.constexpr, PARTS: tl.constexpr, WORDS: tl.constexpr, PER_ROW: tl.constexpr,
    PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr,
    PER_META: tl.constexpr, META_FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Places of the missing entries: the first ``free`` take the slots from ``used`` on, those up to
    ``granted`` the slots of ``room``; what remains goes to staging, from ``place`` on (DECODE). Each part's
    list begins ``span`` after the one before."""
    part = tl.arange(0, PARTS)
    ends = tl.cumsum(tl.load(part_counts + part, cache_modifier=".cg"), 0)
    start = 0
    while start < count:
        rank = start + tl.arange(0, BLOCK)
        there = rank < count
        kept = rank < granted
        at = rank
        if PARTS > 1:
            before = ends[None, :] <= rank[:, None]
            first = tl.max(tl.where(before, ends[None, :], 0), 1)
            at = tl.sum(before.to(tl.int32), 1) * span + rank - first
        column = tl.load(columns + at, mask=there, other=0, cache_modifier=".cg")
        entry = tl.load(listed + at, mask=there, other=0, cache_modifier=".cg")
        evicted = kept & (rank >= free)
        slot = tl.load(room + rank - free, mask=evicted, other=0, cache_modifier=".cg")
        slot = tl.where(evicted, slot, used + rank)
        where = tl.where(kept, location_of(row_frames, slot, kept, PER_ROW), ABSENT)
        if DECODE:
            staged = there & (rank >= granted)
            index = place + rank - granted
            where = tl.where(staged, location_of(staging, index, staged, PER_ROW), where)
            tl.store(source + rank, home + entry.to(tl.int64) * WORDS, mask=there)
            tl.store(target + rank, where, mask=there)
        tl.store(location + column, where, mask=there)
        at = word_of(map_frames, entry, kept, PER_MAP, MAP_FRAME, 1)
        tl.store(maps + at, slot, mask=kept)
        at = word_of(meta_frames, slot, kept, PER_META, META_FRAME, 2)
        tl.store(meta + at, entry, mask=kept)
        tl.store(meta + at + 1, tl.zeros([BLOCK], tl.int32) + stamp, mask=kept)
        start += BLOCK
