"""Resolve in Triton for several query rows a piece: their union is looked up, stamped and fetched once.

One program serves one piece, row after row, so that the order of first appearance is the order of the misses.
The tables themselves say what has been seen: an entry of the metadata, or of the map, becomes SEEN or less
for the time of the launch. An entry that is missing carries its rank there, which is how the other rows that
selected it find its place.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..copy import words_of
from ..eviction import EvictionRule
from ..retrieve import DecodeRows, StoreMemory
from .admission import find_victims
from .eviction import device_key
from .lists import Lists, decode_arguments
from .look_up import fill_absent
from .resolve import count_rows
from .tables import (
    ABSENT,
    MISS,
    check_tables,
    is_entry,
    location_of,
    table_arguments,
    table_constants,
    table_strides,
    word_of,
)

BLOCK = 1024
WARPS = 8
# The first of the numbers that say "seen": -1 is absent, -2 a miss or a wanted slot.
SEEN = tl.constexpr(-3)


@triton.jit
def _see(
    maps, meta, row_frames, map_frames, meta_frames, wanted, location, missing_entries, inflight,
    width, entries, tokens, first_row, whole, due, stamp,
    TOKENS: tl.constexpr, Q: tl.constexpr, PER_ROW: tl.constexpr,
    PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr,
    PER_META: tl.constexpr, META_FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Locations of the hits and of what is in flight, MISS elsewhere; the missing entries, listed. Returns
    how many committed entries the rows selected, how many distinct ones, how many of these are missing."""
    selected = tl.zeros([], tl.int32)
    unique = tl.zeros([], tl.int32)
    missing = tl.zeros([], tl.int32)
    start = 0
    while start < Q * width:
        # Tiles end with their row: within one, no entry comes twice.
        column = start + tl.arange(0, BLOCK)
        end = (start // width + 1) * width
        inside = column < end
        entry = tl.load(wanted + column, mask=inside, other=ABSENT).to(tl.int32)
        valid = is_entry(entry)
        old = valid & (entry < entries)
        map_at = word_of(map_frames, entry, old, PER_MAP, MAP_FRAME, 1)
        mark = tl.load(maps + map_at, mask=old, other=0, cache_modifier=".cg")
        is_whole = tl.where(old, whole, 0) > 0
        slot = tl.where(is_whole, entry, tl.where(old, mark, ABSENT))
        hit = slot >= 0
        meta_at = word_of(meta_frames, slot, hit & (mark >= 0), PER_META, META_FRAME, 2)
        cached = tl.where(hit, whole, 1) == 0
        held = tl.load(meta + meta_at, mask=cached, other=ABSENT, cache_modifier=".cg")
        fresh_hit = cached & (held >= 0)
        fresh = old & (mark == ABSENT)
        fresh_miss = tl.where(fresh, whole, 1) == 0
        rank = missing + tl.cumsum(fresh_miss.to(tl.int32), 0) - 1
        tl.debug_barrier()  # read by all before any writes
        tl.store(meta + meta_at, tl.zeros([BLOCK], tl.int32) + SEEN, mask=fresh_hit)
        tl.store(maps + map_at, tl.where(fresh_miss, -rank, 0) + SEEN, mask=fresh)
        tl.store(missing_entries + rank, entry, mask=fresh_miss)
        renewed = tl.where(cached, due, 0) > 0
        tl.store(meta + meta_at + 1, tl.zeros([BLOCK], tl.int32) + stamp, mask=renewed)
        where = tl.where(hit, location_of(row_frames, slot, hit, PER_ROW), ABSENT)
        flying = valid & (entry >= entries)
        row = entry * TOKENS + (TOKENS - 1) - tokens + first_row
        where = tl.where(flying, location_of(inflight, row, flying, PER_ROW), where)
        tl.store(location + column, tl.where(old & (slot < 0), MISS, where), mask=inside)
        selected += tl.sum(old.to(tl.int32), 0)
        unique += tl.sum((fresh_hit | fresh).to(tl.int32), 0)
        missing += tl.sum(fresh_miss.to(tl.int32), 0)
        tl.debug_barrier()  # the next tile reads the marks
        start = tl.minimum(start + BLOCK, end)
    return selected, unique, missing


@triton.jit
def _again(
    maps, meta, map_frames, meta_frames, wanted, location, total, entries, whole, value,
    CLEAR: tl.constexpr, PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr,
    PER_META: tl.constexpr, META_FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Over all hits once more: their stamp becomes ``value``, or (CLEAR) their marks go."""
    start = 0
    while start < total:
        column = start + tl.arange(0, BLOCK)
        inside = column < total
        entry = tl.load(wanted + column, mask=inside, other=ABSENT).to(tl.int32)
        where = tl.load(location + column, mask=inside, other=MISS, cache_modifier=".cg")
        old = is_entry(entry) & (entry < entries) & (where != MISS)
        cached = tl.where(old, whole, 1) == 0
        map_at = word_of(map_frames, entry, old, PER_MAP, MAP_FRAME, 1)
        slot = tl.load(maps + map_at, mask=cached, other=0, cache_modifier=".cg")
        at = word_of(meta_frames, slot, cached, PER_META, META_FRAME, 2)
        if CLEAR:
            tl.store(meta + at, entry, mask=cached)
            is_whole = tl.where(old, whole, 0) > 0
            tl.store(maps + map_at, tl.zeros([BLOCK], tl.int32) + ABSENT, mask=is_whole)
        else:
            tl.store(meta + at + 1, tl.zeros([BLOCK], tl.int32) + value, mask=cached)
        start += BLOCK


@triton.jit
def _place_missing(
    maps, meta, row_frames, map_frames, meta_frames, missing_entries, room, staging, source, target,
    count, free, granted, used, stamp, home, place,
    WORDS: tl.constexpr, PER_ROW: tl.constexpr, PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr,
    PER_META: tl.constexpr, META_FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As resolve's: places of the missing entries, in the lists; the map still ranks what is staged."""
    start = 0
    while start < count:
        rank = start + tl.arange(0, BLOCK)
        listed = rank < count
        kept = rank < granted
        entry = tl.load(missing_entries + rank, mask=listed, other=0, cache_modifier=".cg")
        evicted = kept & (rank >= free)
        slot = tl.load(room + rank - free, mask=evicted, other=0, cache_modifier=".cg")
        slot = tl.where(evicted, slot, used + rank)
        staged = listed & (rank >= granted)
        where = location_of(row_frames, slot, kept, PER_ROW)
        stage = location_of(staging, place + rank - granted, staged, PER_ROW)
        tl.store(source + rank, home + entry.to(tl.int64) * WORDS, mask=listed)
        tl.store(target + rank, tl.where(staged, stage, where), mask=listed)
        at = word_of(map_frames, entry, kept, PER_MAP, MAP_FRAME, 1)
        tl.store(maps + at, slot, mask=kept)
        at = word_of(meta_frames, slot, kept, PER_META, META_FRAME, 2)
        tl.store(meta + at, entry, mask=kept)
        tl.store(meta + at + 1, tl.zeros([BLOCK], tl.int32) + stamp, mask=kept)
        start += BLOCK


@triton.jit
def _find_missing(
    maps, row_frames, map_frames, wanted, location, target, total,
    PER_ROW: tl.constexpr, PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Locations of the missing entries of all rows, by their slot or rank in the map."""
    start = 0
    while start < total:
        column = start + tl.arange(0, BLOCK)
        inside = column < total
        where = tl.load(location + column, mask=inside, other=ABSENT, cache_modifier=".cg")
        miss = where == MISS
        entry = tl.load(wanted + column, mask=miss, other=0).to(tl.int32)
        at = word_of(map_frames, entry, miss, PER_MAP, MAP_FRAME, 1)
        slot = tl.load(maps + at, mask=miss, other=0, cache_modifier=".cg")
        kept = miss & (slot >= 0)
        staged = miss & (slot < 0)
        where = location_of(row_frames, slot, kept, PER_ROW).to(tl.int32)
        stage = tl.load(target + SEEN - slot, mask=staged, other=0, cache_modifier=".cg")
        tl.store(location + column, tl.where(staged, stage, where), mask=miss)
        start += BLOCK


@triton.jit
def _forget(
    maps, map_frames, missing_entries, start, count,
    PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What is staged leaves no trace in the map."""
    while start < count:
        rank = start + tl.arange(0, BLOCK)
        entry = tl.load(missing_entries + rank, mask=rank < count, other=0, cache_modifier=".cg")
        at = word_of(map_frames, entry, rank < count, PER_MAP, MAP_FRAME, 1)
        tl.store(maps + at, tl.zeros([BLOCK], tl.int32) + ABSENT, mask=rank < count)
        start += BLOCK


@triton.jit
def _room_for(
    maps, meta, map_frames, meta_frames, room, used_at, hand_at, draws_at, age_at, count, capacity, step,
    TOUCH: tl.constexpr, KEY: tl.constexpr, PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr,
    PER_META: tl.constexpr, META_FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Free slots, used ones, and victims (in ``room``) for ``count`` entries: how many slots were used
    before, how many free ones are taken, how many entries find a slot. capacity: 0: none may."""
    used, hand, draws, age = (
        tl.load(used_at),
        tl.load(hand_at),
        tl.load(draws_at),
        tl.load(age_at),
    )
    tl.debug_barrier()  # a scalar load is done by every thread
    stays = tl.where(capacity > 0, count, 0)
    free = tl.maximum(tl.minimum(capacity - used, stays), 0)
    granted = free
    if stays > free:
        spare = -1
        if TOUCH:
            spare = 2 * step + 1
        granted += find_victims(
            maps, meta, map_frames, meta_frames, room, hand_at, draws_at, age_at, hand, draws, age,
            capacity, used, step, stays - free, spare, KEY, True,
            PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK,
        )  # fmt: skip
    if free > 0:
        tl.store(used_at, used + free)
    return used, free, granted


@triton.jit
def _serve(
    maps, meta, row_frames, map_frames, meta_frames, capacity, whole, used_at, hand, draws, age,
    wanted, location, scratch, inflight, staging, home, source, target, misses, counts,
    width, tokens, first_row, stays, lazy_at, step, place,
    TOUCH: tl.constexpr, KEY: tl.constexpr, LAZY: tl.constexpr, FIRST: tl.constexpr,
    Q: tl.constexpr, TOKENS: tl.constexpr, LAYERS: tl.constexpr, WORDS: tl.constexpr,
    PER_ROW: tl.constexpr, PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr,
    PER_META: tl.constexpr, META_FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    entries = tokens // TOKENS
    total = Q * width
    missing_entries, room = scratch, scratch + total
    slots = tl.where(stays & (whole == 0), capacity, 0)
    if not FIRST:
        slots = 0
    due = 0
    if TOUCH:
        due = tl.where((slots > 0) & ((step + lazy_at) % LAZY == 0), 1, 0)
    selected, unique, missing = _see(
        maps, meta, row_frames, map_frames, meta_frames, wanted, location, missing_entries, inflight,
        width, entries, tokens, first_row, whole, due, 2 * step + 1, TOKENS, Q,
        PER_ROW, PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK,
    )  # fmt: skip
    used = 0
    free = 0
    granted = 0
    if missing > 0:
        # Left out at compile time: Triton 3.6 fails on loads that it finds are never reached.
        if FIRST:
            if TOUCH:  # noqa: SIM102 - a condition of the compiler's
                if (slots > 0) & (due == 0):
                    _again(
                        maps, meta, map_frames, meta_frames, wanted, location, total, entries, whole,
                        2 * step + 1, False, PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK,
                    )  # fmt: skip
                    tl.debug_barrier()
            used, free, granted = _room_for(
                maps, meta, map_frames, meta_frames, room, used_at, hand, draws, age, missing, slots,
                step, TOUCH, KEY, PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK,
            )  # fmt: skip
        tl.debug_barrier()
    _again(
        maps, meta, map_frames, meta_frames, wanted, location, total, entries, whole, 0, True,
        PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK,
    )  # fmt: skip
    if missing > 0:
        tl.debug_barrier()
        _place_missing(
            maps, meta, row_frames, map_frames, meta_frames, missing_entries, room, staging, source,
            target, missing, free, granted, used, 2 * step, home, place, WORDS,
            PER_ROW, PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK,
        )  # fmt: skip
        tl.debug_barrier()
        _find_missing(
            maps, row_frames, map_frames, wanted, location, target, total,
            PER_ROW, PER_MAP, MAP_FRAME, BLOCK,
        )  # fmt: skip
        tl.debug_barrier()
        _forget(maps, map_frames, missing_entries, granted, missing, PER_MAP, MAP_FRAME, BLOCK)
    tl.store(misses, missing)
    count_rows(counts, selected, unique, missing, granted, FIRST, LAYERS, WORDS)


@triton.jit(do_not_specialize=["width", "row_seat", "map_seat", "meta_seat", "segment"])
def _resolve_union(
    maps, meta, row_frames, map_frames, meta_frames, capacity, full, used, hand, draws, age,
    seats, wanted, admit, step_at, location, scratch, committed, inflight, staging, row_base,
    source, target, misses, counts, width, row_seat, map_seat, meta_seat, segment,
    TOUCH: tl.constexpr, KEY: tl.constexpr, LAZY: tl.constexpr, FIRST: tl.constexpr,
    Q: tl.constexpr, TOKENS: tl.constexpr, LAYERS: tl.constexpr, WORDS: tl.constexpr,
    PER_ROW: tl.constexpr, PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr,
    PER_META: tl.constexpr, META_FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As ``_resolve``; wanted, location: [p, Q, width], scratch: [p, 2, Q * width]."""
    piece = tl.program_id(0).to(tl.int64)
    total = Q * width
    seat = tl.load(seats + piece).to(tl.int64)
    if seat < 0:
        fill_absent(location + piece * total, 0, total, 1, BLOCK)
        tl.store(misses + piece, 0)
    else:
        _serve(
            maps, meta, row_frames + seat * row_seat, map_frames + seat * map_seat,
            meta_frames + seat * meta_seat, tl.load(capacity + seat),
            tl.load(full + seat).to(tl.int32), used + seat, hand + seat, draws + seat, age + seat,
            wanted + piece * total, location + piece * total, scratch + piece * 2 * total,
            inflight, staging, tl.load(row_base + seat), source + piece * total,
            target + piece * total, misses + piece, counts + seat * 6, width,
            tl.load(committed + piece).to(tl.int32), piece.to(tl.int32) * Q,
            tl.load(admit + piece) != 0, seat, tl.load(step_at).to(tl.int32),
            piece.to(tl.int32) * segment, TOUCH, KEY, LAZY, FIRST, Q, TOKENS, LAYERS, WORDS,
            PER_ROW, PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK,
        )  # fmt: skip


def resolve_union(
    store: StoreMemory, rows: DecodeRows, chosen: Tensor, rule: EvictionRule, first: bool
) -> tuple[Tensor, Lists]:
    """One launch: locations as :func:`kvpolicy.kernels.retrieve.retrieve` gives them, and what is to be
    fetched."""
    cache = store.cache
    check_tables(cache)
    pieces, width, device = rows.seat.shape[0], chosen.shape[1], chosen.device
    total = rows.q * width
    location = torch.empty(chosen.shape, dtype=torch.int32, device=device)
    lists = Lists.empty(pieces, total, device)
    scratch = torch.empty((pieces, 2, total), dtype=torch.int32, device=device)
    kernel: Any = _resolve_union
    kernel[(pieces,)](
        *table_arguments(cache),
        *decode_arguments(store, rows, chosen, location, scratch, lists),
        width,
        *table_strides(cache),
        store.segment(pieces, total),
        TOUCH=rule.touch,
        KEY=device_key(rule),
        LAZY=rule.lazy,
        FIRST=first,
        Q=rows.q,
        TOKENS=store.tokens_per_entry,
        LAYERS=store.layers,
        WORDS=words_of(cache.records).shape[2],
        **table_constants(cache),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return location, lists
