"""Resolve in Triton: look-up, victims, admission, staging and counting of many requests in one launch.

A piece (one request's wanted entries in one store) is looked up by PARTS programs, each of which lists what
it misses. The last of them to arrive finds all of these a place. Which program that is changes nothing: all
of them write what the reference writes. Many parts make a small batch fast, one part a large one.

Nothing is read back by the host. Passes that read what others have written are divided by barriers and read
past the first-level cache; no tile is both read and written in one pass, since a tile may be smaller than a
program has threads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..eviction import EvictionRule
from ..resolve import CacheTables, Resolved
from .eviction import device_key, take_victims
from .sweep import sweep
from .tables import ABSENT, WANTED, is_entry, location_of, word_of

BLOCK, TILE = 1024, 1024
WARPS = 8
# Fields of one arrival: programs, tiles that left their hits unstamped, selected and missing entries.
UNSTAMPED, SELECTED, MISSING = tl.constexpr(8), tl.constexpr(16), tl.constexpr(40)
BYTE, ROWS = tl.constexpr((1 << 8) - 1), tl.constexpr((1 << 24) - 1)
COUNTERS = tl.constexpr(6)
LINE = tl.constexpr(16)  # frame numbers in a line of 128 bytes
# Words of scratch beside three lists of a piece's width: how many entries each part misses.
PART_COUNTS = 32


@triton.jit
def _bring_near(row_frames, slots, PER_ROW: tl.constexpr):
    """Ask for the first 12,000 slots' frame numbers, which the look-up needs after the map."""
    line = tl.minimum(tl.arange(0, 64) * LINE, tl.maximum(slots - 1, 0) // PER_ROW)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [row_frames + line], tl.int32, False, 1
    )


@triton.jit
def _look_up(
    maps, meta, row_frames, map_frames, meta_frames, wanted, entry, location, missed, columns, listed,
    inflight, begin, end, entries, tokens, first_row, whole, stays, due, stamp,
    DECODE: tl.constexpr, RESIDENT: tl.constexpr, TOUCH: tl.constexpr, TOKENS: tl.constexpr,
    PER_ROW: tl.constexpr, PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr,
    PER_META: tl.constexpr, META_FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Locations of columns begin..end-1; those that miss are listed, columns and entries. ``entry``: of the
    first tile. whole: the cache is full. stays, due: hits may be stamped, and are in any case; else where
    their tile has a miss. Returns how many were committed entries, how many of these are missing, and how
    many tiles left their hits unstamped."""
    selected = tl.zeros([], tl.int32)
    missing = tl.zeros([], tl.int32)
    unstamped = tl.zeros([], tl.int32)
    start = begin
    while start < end:
        column = start + tl.arange(0, BLOCK)
        inside = column < end
        valid = is_entry(entry)
        old = valid & (entry < entries)
        if RESIDENT:
            slot = tl.where(old, entry, ABSENT)
        else:
            mapped = tl.where(old, whole, 1) == 0
            at = word_of(map_frames, entry, mapped, PER_MAP, MAP_FRAME, 1)
            slot = tl.load(maps + at, mask=mapped, other=ABSENT)
            slot = tl.where(tl.where(old, whole, 0) == 0, slot, entry)
        hit = slot >= 0
        miss = old & (slot < 0)
        where = tl.where(hit, location_of(row_frames, slot, hit, PER_ROW), ABSENT)
        if DECODE:
            flying = valid & (entry >= entries)
            row = entry * TOKENS + (TOKENS - 1) - tokens + first_row
            where = tl.where(flying, location_of(inflight, row, flying, PER_ROW), where)
        else:
            tl.store(missed + column, miss.to(tl.int8), mask=inside)
        tl.store(location + column, where, mask=inside)
        both = tl.sum(old.to(tl.int32) + (miss.to(tl.int32) << 16), 0)
        selected += both & 0xFFFF
        misses = both >> 16
        if misses > 0:
            rank = missing + tl.cumsum(miss.to(tl.int32), 0) - 1
            tl.store(columns + rank, column, mask=miss)
            tl.store(listed + rank, entry, mask=miss)
        missing += misses
        if TOUCH:
            now = stays & ((due > 0) | (misses > 0))
            unstamped += tl.where(now, 0, 1)
            renewed = tl.where(hit & now, whole, 1) == 0
            at = word_of(meta_frames, slot, renewed, PER_META, META_FRAME, 2)
            tl.store(meta + at + 1, tl.zeros([BLOCK], tl.int32) + stamp, mask=renewed)
        start += BLOCK
        if start < end:
            next = start + tl.arange(0, BLOCK)
            entry = tl.load(wanted + next, mask=next < end, other=ABSENT).to(tl.int32)
    return selected, missing, unstamped


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
def _place(
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


@triton.jit
def _make_room(
    maps, meta, map_frames, meta_frames, wanted, room, used_at, hand_at, draws_at, age_at,
    used, hand, draws, age, width, entries, count, capacity, unstamped, step,
    TOUCH: tl.constexpr, EVICT: tl.constexpr, KEY: tl.constexpr,
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
    if EVICT:  # noqa: SIM102 - a condition of the compiler's
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
def _arrive(
    arrivals, part_counts, part, selected, missing, unstamped, PARTS: tl.constexpr
):  # fmt: skip
    """Whether this is the piece's last program, and the sums over all of them."""
    if PARTS == 1:
        tl.store(part_counts, missing)
        return True, selected, missing, unstamped
    else:
        tl.store(part_counts + part, missing)
        own = 1 + (selected.to(tl.int64) << SELECTED) + (missing.to(tl.int64) << MISSING)
        own += unstamped.to(tl.int64) << UNSTAMPED
        tl.debug_barrier()  # all threads' stores come before the arrival
        total = tl.atomic_add(arrivals, own, sem="acq_rel") + own
        last = (total & BYTE) == PARTS
        if last:
            tl.store(arrivals, 0)  # ready for the next launch
        selected = ((total >> SELECTED) & ROWS).to(tl.int32)
        unstamped = ((total >> UNSTAMPED) & BYTE).to(tl.int32)
        return last, selected, (total >> MISSING).to(tl.int32), unstamped


@triton.jit
def count_rows(
    counts, selected, unique, missing, granted,
    FIRST: tl.constexpr, LAYERS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Selected, unique, fetched, staged, refetched rows and bytes, added by the piece's last program (by
    atomics only because nobody then waits for the old values)."""
    field = tl.arange(0, 8)
    size = tl.where(field == 5, WORDS * 4, 0)
    if FIRST:
        fetched = size + tl.where((field == 2) | (field == 3), LAYERS, 0)
        value = missing.to(tl.int64) * fetched
        value += selected.to(tl.int64) * tl.where(field == 0, LAYERS, 0)
        value += unique.to(tl.int64) * tl.where(field == 1, LAYERS, 0)
        value -= granted.to(tl.int64) * tl.where(field == 3, LAYERS, 0)
    else:
        value = missing.to(tl.int64) * (size + tl.where(field == 4, LAYERS, 0))
    counted = tl.where(field < COUNTERS, selected, 0) > 0
    tl.atomic_add(counts + field, value, mask=counted, sem="relaxed")


@triton.jit
def serve_piece(
    maps, meta, row_frames, map_frames, meta_frames, capacity, full, used_at, hand_at, draws_at, age_at,
    seat, wanted, entry, admit, step_at, location, missed, scratch, committed, inflight, staging,
    row_base, source, target, misses, counts, arrivals,
    piece, part, width, row_seat, map_seat, meta_seat, segment,
    TOUCH: tl.constexpr, EVICT: tl.constexpr, KEY: tl.constexpr, LAZY: tl.constexpr,
    DECODE: tl.constexpr, FIRST: tl.constexpr, RESIDENT: tl.constexpr, PARTS: tl.constexpr,
    TOKENS: tl.constexpr, LAYERS: tl.constexpr, WORDS: tl.constexpr, PER_ROW: tl.constexpr,
    PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr, PER_META: tl.constexpr, META_FRAME: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """One part of the piece of a seat (int64, not negative); entry: its first tile. Returns whether it was
    the piece's last."""
    row_frames += seat * row_seat
    map_frames += seat * map_seat
    meta_frames += seat * meta_seat
    # Together, and here: only this piece's last program changes them, and memory is far away.
    step = tl.load(step_at).to(tl.int32)
    slots = tl.load(capacity + seat)
    stays = tl.load(admit + piece) != 0
    used = tl.load(used_at + seat)
    hand = tl.load(hand_at + seat)
    draws = tl.load(draws_at + seat)
    age = tl.load(age_at + seat)
    whole = tl.load(full + seat).to(tl.int32)
    tokens = 0
    entries = 2147483647
    home = tl.zeros([], tl.int64)
    if DECODE:
        tokens = tl.load(committed + piece).to(tl.int32)
        home = tl.load(row_base + seat)
        entries = tokens // TOKENS
    if NEAR:
        _bring_near(row_frames, slots, PER_ROW)
    slots = tl.where(stays & (whole == 0), slots, 0)
    if not FIRST:
        slots = slots * 0
    due = tl.where((step + seat) % LAZY == 0, 1, 0)
    span = tl.cdiv(tl.cdiv(width, PARTS), 16) * 16
    begin = part * span
    columns, listed, room = scratch, scratch + width, scratch + 2 * width
    part_counts = scratch + 3 * width
    selected, missing, unstamped = _look_up(
        maps, meta, row_frames, map_frames, meta_frames, wanted, entry, location, missed,
        columns + begin, listed + begin, inflight, begin, tl.minimum(begin + span, width),
        entries, tokens, piece.to(tl.int32), whole, slots > 0, due, 2 * step + 1,
        DECODE, RESIDENT, TOUCH and not RESIDENT, TOKENS,
        PER_ROW, PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK,
    )  # fmt: skip
    last, selected, missing, unstamped = _arrive(
        arrivals + seat, part_counts, part, selected, missing, unstamped, PARTS
    )
    if last:
        granted = tl.zeros([], tl.int32)
        if not RESIDENT:  # noqa: SIM102 - a condition of the compiler's
            if missing > 0:
                tl.debug_barrier()
                free = granted
                # Left out at compile time: Triton 3.6 fails on loads that it finds are never reached.
                if FIRST:
                    free, granted = _make_room(
                        maps, meta, map_frames, meta_frames, wanted, room,
                        used_at + seat, hand_at + seat, draws_at + seat, age_at + seat,
                        used, hand, draws, age, width, entries, missing, slots, unstamped, step,
                        TOUCH, EVICT, KEY, PER_MAP, MAP_FRAME, PER_META, META_FRAME, TILE,
                    )  # fmt: skip
                _place(
                    maps, meta, row_frames, map_frames, meta_frames, location, columns, listed,
                    part_counts, room, staging, source, target, span, missing, free, granted, used,
                    2 * step, home, piece.to(tl.int32) * segment, DECODE, PARTS, WORDS, PER_ROW,
                    PER_MAP, MAP_FRAME, PER_META, META_FRAME, TILE,
                )  # fmt: skip
        if DECODE:
            tl.store(misses + piece, missing)
            count_rows(
                counts + seat * COUNTERS, selected, selected, missing, granted, FIRST, LAYERS, WORDS
            )
    return last


@triton.jit
def first_tile(wanted, part, width, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The entries with which a part begins."""
    span = tl.cdiv(tl.cdiv(width, PARTS), 16) * 16
    column = part * span + tl.arange(0, BLOCK)
    end = tl.minimum(part * span + span, width)
    return tl.load(wanted + column, mask=column < end, other=ABSENT).to(tl.int32)


@triton.jit
def fill_absent(location, part, width, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """One part of a padded piece: no entry has a place."""
    span = tl.cdiv(tl.cdiv(width, PARTS), 16) * 16
    start = part * span
    end = tl.minimum(start + span, width)
    while start < end:
        column = start + tl.arange(0, BLOCK)
        tl.store(location + column, tl.zeros([BLOCK], tl.int32) + ABSENT, mask=column < end)
        start += BLOCK


@triton.jit(do_not_specialize=["width", "row_seat", "map_seat", "meta_seat", "segment"])
def _resolve(
    maps, meta, row_frames, map_frames, meta_frames, capacity, full, used, hand, draws, age,
    seats, wanted, admit, step_at, location, missed, scratch, committed, inflight, staging, row_base,
    source, target, misses, counts, arrivals,
    width, row_seat, map_seat, meta_seat, segment,
    TOUCH: tl.constexpr, EVICT: tl.constexpr, KEY: tl.constexpr, LAZY: tl.constexpr,
    DECODE: tl.constexpr, FIRST: tl.constexpr, RESIDENT: tl.constexpr, PARTS: tl.constexpr,
    TOKENS: tl.constexpr, LAYERS: tl.constexpr, WORDS: tl.constexpr, PER_ROW: tl.constexpr,
    PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr, PER_META: tl.constexpr, META_FRAME: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, NEAR: tl.constexpr, EXTRA: tl.constexpr,
):  # fmt: skip
    """row_seat, map_seat, meta_seat: from one seat to the next in the tables of frames. scratch: int32
    [p, 3 * width + EXTRA]. source, target: [p, width], misses: [p]. segment: staging places of a piece.
    BLOCK, TILE: columns looked up at a time, missing entries and slots seen at a time. NEAR: see
    ``_bring_near``."""
    program = tl.program_id(0)
    piece = (program // PARTS).to(tl.int64)
    part = program % PARTS
    wanted += piece * width
    location += piece * width
    entry = first_tile(wanted, part, width, PARTS, BLOCK)
    seat = tl.load(seats + piece).to(tl.int64)
    if seat < 0:
        fill_absent(location, part, width, PARTS, BLOCK)
        if DECODE:
            tl.store(misses + piece, 0)
    else:
        serve_piece(
            maps, meta, row_frames, map_frames, meta_frames, capacity, full, used, hand, draws, age,
            seat, wanted, entry, admit, step_at, location, missed + piece * width,
            scratch + piece * (3 * width + EXTRA), committed, inflight, staging, row_base,
            source + piece * width, target + piece * width, misses, counts, arrivals,
            piece, part, width, row_seat, map_seat, meta_seat, segment,
            TOUCH, EVICT, KEY, LAZY, DECODE, FIRST, RESIDENT, PARTS, TOKENS, LAYERS, WORDS, PER_ROW,
            PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK, TILE, NEAR,
        )  # fmt: skip


def scratch_of(pieces: int, width: int, device: torch.device) -> Tensor:
    """Room for the lists of all pieces."""
    return torch.empty((pieces, 3 * width + PART_COUNTS), dtype=torch.int32, device=device)


def check_tables(tables: CacheTables) -> None:
    """ValueError unless maps, metadata and frames lie as the kernels address them."""
    if tables.maps.stride(1) != 1 or tables.meta.stride()[1:] != (2, 1):
        raise ValueError(
            f"maps of strides {tables.maps.stride()}, meta of strides {tables.meta.stride()}: the "
            "items of a frame must be contiguous"
        )
    for name in ("row_frames", "map_frames", "meta_frames"):
        frames: Tensor = getattr(tables, name)
        if frames.stride(1) != 1:
            raise ValueError(f"{name} of strides {frames.stride()}: a seat's must be contiguous")


def table_arguments(tables: CacheTables) -> tuple[Tensor, ...]:
    """The tables in the order of the kernels' first arguments."""
    return (
        tables.maps, tables.meta, tables.row_frames, tables.map_frames, tables.meta_frames,
        tables.capacity, tables.full.view(torch.uint8), tables.used, tables.hand, tables.draws,
        tables.age,
    )  # fmt: skip


def table_strides(tables: CacheTables) -> tuple[int, int, int]:
    """From one seat to the next in the tables of frames of rows, maps and metadata."""
    frames = (tables.row_frames, tables.map_frames, tables.meta_frames)
    return frames[0].stride(0), frames[1].stride(0), frames[2].stride(0)


def table_constants(tables: CacheTables) -> dict[str, int]:
    """How the tables' items lie in frames."""
    return {
        "PER_ROW": tables.records.shape[1],
        "PER_MAP": tables.maps.shape[1],
        "MAP_FRAME": tables.maps.stride(0),
        "PER_META": tables.meta.shape[1],
        "META_FRAME": tables.meta.stride(0),
    }


def resolve_batch(
    tables: CacheTables,
    seats: Tensor,
    wanted: Tensor,
    admit: Tensor,
    rule: EvictionRule,
    step: int | Tensor,
    evict: bool = True,
) -> Resolved:
    """See :func:`kvpolicy.kernels.resolve.resolve_batch`: the same in every bit of everything.

    ValueError for a rule without a device function.
    """
    key = device_key(rule)
    check_tables(tables)
    wanted = wanted.contiguous()
    location = torch.empty_like(wanted)
    missed = torch.empty_like(wanted, dtype=torch.bool)
    pieces, width = wanted.shape
    if not wanted.numel():
        return Resolved(location, missed)
    if not isinstance(step, Tensor):
        step = torch.full((1,), step, dtype=torch.int64, device=wanted.device)
    scratch = scratch_of(pieces, width, wanted.device)
    unused = scratch  # pointers that are read in decode steps alone
    kernel: Any = _resolve
    kernel[(pieces,)](
        *table_arguments(tables),
        seats.contiguous(),
        wanted,
        admit.contiguous().view(torch.uint8),
        step,
        location,
        missed.view(torch.int8),
        scratch,
        *(unused,) * 9,
        width,
        *table_strides(tables),
        0,
        TOUCH=rule.touch,
        EVICT=evict,
        KEY=key,
        LAZY=rule.lazy,
        DECODE=False,
        FIRST=True,
        RESIDENT=False,
        PARTS=1,
        TOKENS=1,
        LAYERS=1,
        WORDS=1,
        **table_constants(tables),
        BLOCK=BLOCK,
        TILE=TILE,
        NEAR=False,
        EXTRA=PART_COUNTS,
        num_warps=WARPS,
    )
    return Resolved(location, missed)
