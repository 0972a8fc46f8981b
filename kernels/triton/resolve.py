"""Resolve in Triton: look-up, victims, admission, staging and counting of many requests in one launch.

A piece (one request's wanted entries in one store) is looked up by PARTS programs. The last of them to
arrive does the rest: it lists what is missing, in the order of the entries, and finds each a place. Which
program that is changes nothing: all of them write what the reference writes. Many parts make a small batch
fast, one part a large one (no atomic, no program that waits for memory alone).

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
from .tables import ABSENT, MISS, WANTED, is_entry, location_of, word_of

BLOCK = 1024
WARPS = 8
# Fields of one arrival: programs in the low bits, then selected and missing entries.
ARRIVED, COUNTED = tl.constexpr(8), tl.constexpr(28)
BOTH = tl.constexpr(8 + 28)
ARRIVED_BITS, COUNTED_BITS = tl.constexpr((1 << 8) - 1), tl.constexpr((1 << 28) - 1)
COUNTERS = tl.constexpr(6)


@triton.jit
def _look_up(
    maps, meta, row_frames, map_frames, meta_frames, wanted, location, missed, inflight,
    begin, end, entries, tokens, first_row, whole, due, stamp,
    DECODE: tl.constexpr, TOKENS: tl.constexpr, PER_ROW: tl.constexpr,
    PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr,
    PER_META: tl.constexpr, META_FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Locations of columns begin..end-1, MISS where a record is missing. Returns how many were committed
    entries, and how many of these are missing. whole, due: the cache is full; hits are stamped."""
    selected = tl.zeros([], tl.int32)
    missing = tl.zeros([], tl.int32)
    start = begin
    while start < end:
        column = start + tl.arange(0, BLOCK)
        inside = column < end
        entry = tl.load(wanted + column, mask=inside, other=ABSENT).to(tl.int32)
        valid = is_entry(entry)
        old = valid & (entry < entries)
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
        tl.store(location + column, tl.where(miss, MISS, where), mask=inside)
        renewed = tl.where(hit, due, 0) > 0
        at = word_of(meta_frames, slot, renewed, PER_META, META_FRAME, 2)
        tl.store(meta + at + 1, tl.zeros([BLOCK], tl.int32) + stamp, mask=renewed)
        both = tl.sum(old.to(tl.int32) + (miss.to(tl.int32) << 16), 0)
        selected += both & 0xFFFF
        missing += both >> 16
        start += BLOCK
    return selected, missing


@triton.jit
def _list(
    maps, meta, map_frames, meta_frames, wanted, location, columns, width, entries, value,
    RENEW: tl.constexpr, LIST: tl.constexpr, MARK: tl.constexpr,
    PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr,
    PER_META: tl.constexpr, META_FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Columns of the missing entries, in order (LIST). Of the slots that were hit: the stamp becomes
    ``value`` (RENEW, where ``value`` is not negative), or the entry WANTED (MARK 1), or itself again (MARK
    2: only victims leave the map meanwhile, and no hit is one)."""
    found = 0
    start = 0
    while start < width:
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        entry = tl.load(wanted + column, mask=inside, other=ABSENT).to(tl.int32)
        where = tl.load(location + column, mask=inside, other=ABSENT, cache_modifier=".cg")
        miss = where == MISS
        if LIST:
            rank = found + tl.cumsum(miss.to(tl.int32), 0) - 1
            tl.store(columns + rank, column, mask=miss)
            found += tl.sum(miss.to(tl.int32), 0)
        if RENEW or MARK > 0:
            hit = is_entry(entry) & (entry < entries) & (where != MISS)
            hit = tl.where(hit, value, -1) >= 0
            at = word_of(map_frames, entry, hit, PER_MAP, MAP_FRAME, 1)
            slot = tl.load(maps + at, mask=hit, other=0)
            at = word_of(meta_frames, slot, hit, PER_META, META_FRAME, 2)
            if RENEW:
                tl.store(meta + at + 1, tl.zeros([BLOCK], tl.int32) + value, mask=hit)
            if MARK == 1:
                tl.store(meta + at, tl.zeros([BLOCK], tl.int32) + WANTED, mask=hit)
            if MARK == 2:
                tl.store(meta + at, entry, mask=hit)
        start += BLOCK


@triton.jit
def find_victims(
    maps, meta, map_frames, meta_frames, room, hand, draws, age, capacity, used, step, count, spare,
    KEY: tl.constexpr, TUNE: tl.constexpr, PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr,
    PER_META: tl.constexpr, META_FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Up to ``count`` victims (at least 1 asked for) into ``room``. Returns how many. spare: as in
    :func:`sweep`. Their entries leave the map."""
    calls = tl.load(draws) + 1
    tl.debug_barrier()  # a scalar load is done by every thread
    tl.store(draws, calls)
    if KEY is None:
        victims = sweep(
            maps, meta, map_frames, meta_frames, room, hand, age, capacity, used, step, count, spare,
            TUNE, PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK,
        )  # fmt: skip
    else:
        victims = take_victims(
            maps, meta, map_frames, meta_frames, room, hand, calls, capacity, step, count, spare,
            KEY, PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK,
        )  # fmt: skip
    return victims


@triton.jit
def _place(
    maps, meta, row_frames, map_frames, meta_frames, wanted, location, columns, room,
    staging, source, target, count, free, granted, used, stamp, home, place,
    DECODE: tl.constexpr, WORDS: tl.constexpr, PER_ROW: tl.constexpr,
    PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr,
    PER_META: tl.constexpr, META_FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Places of the missing entries: the first ``free`` take the slots from ``used`` on, those up to
    ``granted`` the slots of ``room``; what remains goes to staging, from ``place`` on (DECODE)."""
    start = 0
    while start < count:
        rank = start + tl.arange(0, BLOCK)
        listed = rank < count
        kept = rank < granted
        column = tl.load(columns + rank, mask=listed, other=0, cache_modifier=".cg")
        entry = tl.load(wanted + column, mask=listed, other=0).to(tl.int32)
        evicted = kept & (rank >= free)
        slot = tl.load(room + rank - free, mask=evicted, other=0, cache_modifier=".cg")
        slot = tl.where(evicted, slot, used + rank)
        where = tl.where(kept, location_of(row_frames, slot, kept, PER_ROW), ABSENT)
        if DECODE:
            staged = listed & (rank >= granted)
            index = place + rank - granted
            where = tl.where(staged, location_of(staging, index, staged, PER_ROW), where)
            tl.store(source + rank, home + entry.to(tl.int64) * WORDS, mask=listed)
            tl.store(target + rank, where, mask=listed)
        tl.store(location + column, where, mask=listed)
        at = word_of(map_frames, entry, kept, PER_MAP, MAP_FRAME, 1)
        tl.store(maps + at, slot, mask=kept)
        at = word_of(meta_frames, slot, kept, PER_META, META_FRAME, 2)
        tl.store(meta + at, entry, mask=kept)
        tl.store(meta + at + 1, tl.zeros([BLOCK], tl.int32) + stamp, mask=kept)
        start += BLOCK


@triton.jit
def _admit(
    maps, meta, row_frames, map_frames, meta_frames, used_at, hand, draws, age,
    wanted, location, scratch, staging, source, target,
    width, entries, count, capacity, due, step, home, place,
    TOUCH: tl.constexpr, EVICT: tl.constexpr, KEY: tl.constexpr,
    DECODE: tl.constexpr, WORDS: tl.constexpr, PER_ROW: tl.constexpr,
    PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr,
    PER_META: tl.constexpr, META_FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The ``count`` missing entries of a piece find their places. capacity: 0 where nothing may change.
    Returns how many stay."""
    hit_stamp = 2 * step + 1
    columns, room = scratch, scratch + width
    renew = tl.where((capacity > 0) & (due == 0), hit_stamp, -1)
    _list(
        maps, meta, map_frames, meta_frames, wanted, location, columns, width, entries, renew,
        TOUCH, True, 0, PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK,
    )  # fmt: skip
    used = tl.load(used_at)
    tl.debug_barrier()
    stays = tl.where(capacity > 0, count, 0)
    free = tl.minimum(capacity - used, stays)
    free = tl.maximum(free, 0)
    granted = free
    if EVICT:
        if stays > free:
            if not TOUCH:
                _list(
                    maps, meta, map_frames, meta_frames, wanted, location, columns, width, entries,
                    0, False, False, 1, PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK,
                )  # fmt: skip
                tl.debug_barrier()
            spare = -1
            if TOUCH:
                spare = hit_stamp
            granted += find_victims(
                maps, meta, map_frames, meta_frames, room, hand, draws, age, capacity, used, step,
                stays - free, spare, KEY, True, PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK,
            )  # fmt: skip
            tl.debug_barrier()
            if not TOUCH:
                _list(
                    maps, meta, map_frames, meta_frames, wanted, location, columns, width, entries,
                    0, False, False, 2, PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK,
                )  # fmt: skip
    if free > 0:
        tl.store(used_at, used + free)
    _place(
        maps, meta, row_frames, map_frames, meta_frames, wanted, location, columns, room, staging,
        source, target, count, free, granted, used, 2 * step, home, place,
        DECODE, WORDS, PER_ROW, PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK,
    )  # fmt: skip
    return granted


@triton.jit
def _arrive(arrivals, selected, missing, PARTS: tl.constexpr):
    """Whether this is the piece's last program, and the sums over all of them."""
    if PARTS == 1:
        return True, selected, missing
    else:
        own = 1 + (selected.to(tl.int64) << ARRIVED) + (missing.to(tl.int64) << BOTH)
        tl.debug_barrier()  # all threads' stores come before the arrival
        total = tl.atomic_add(arrivals, own, sem="acq_rel") + own
        last = (total & ARRIVED_BITS) == PARTS
        if last:
            tl.store(arrivals, 0)  # ready for the next launch
        selected = ((total >> ARRIVED) & COUNTED_BITS).to(tl.int32)
        return last, selected, (total >> BOTH).to(tl.int32)


@triton.jit
def count_rows(
    counts, selected, unique, missing, granted,
    FIRST: tl.constexpr, LAYERS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Selected, unique, fetched, staged, refetched rows and bytes, added by the piece's last program."""
    field = tl.arange(0, 8)
    if FIRST:
        rows = tl.where(field == 0, selected, tl.where(field == 1, unique, missing))
        rows = tl.where(field == 3, missing - granted, tl.where(field == 4, 0, rows))
    else:
        rows = tl.where(field == 4, missing, 0)
    value = tl.where(field == 5, missing.to(tl.int64) * (WORDS * 4), rows.to(tl.int64) * LAYERS)
    old = tl.load(counts + field, mask=field < COUNTERS, other=0)
    tl.debug_barrier()  # read by all before any writes
    tl.store(counts + field, old + value, mask=tl.where(field < COUNTERS, selected, 0) > 0)


@triton.jit
def serve_piece(
    maps, meta, row_frames, map_frames, meta_frames, capacity, full, used, hand, draws, age,
    seat, wanted, admit, step_at, location, missed, scratch, committed, inflight, staging, row_base,
    source, target, misses, counts, arrivals,
    piece, part, width, row_seat, map_seat, meta_seat, segment,
    TOUCH: tl.constexpr, EVICT: tl.constexpr, KEY: tl.constexpr, LAZY: tl.constexpr,
    DECODE: tl.constexpr, FIRST: tl.constexpr, RESIDENT: tl.constexpr, PARTS: tl.constexpr,
    TOKENS: tl.constexpr, LAYERS: tl.constexpr, WORDS: tl.constexpr, PER_ROW: tl.constexpr,
    PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr,
    PER_META: tl.constexpr, META_FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One part of the piece of a seat (int64, not negative). Returns whether it was the piece's last."""
    step = tl.load(step_at).to(tl.int32)
    row_frames += seat * row_seat
    map_frames += seat * map_seat
    meta_frames += seat * meta_seat
    slots = tl.load(capacity + seat)
    stays = tl.load(admit + piece) != 0
    if RESIDENT:
        whole = 1
    else:
        whole = tl.load(full + seat).to(tl.int32)
    if DECODE:
        tokens = tl.load(committed + piece).to(tl.int32)
        entries = tokens // TOKENS
    else:
        tokens = 0
        entries = 2147483647
    slots = tl.where(stays & (whole == 0), slots, 0)
    if not FIRST:
        slots = 0
    due = 0
    if TOUCH:
        due = tl.where((slots > 0) & ((step + seat) % LAZY == 0), 1, 0)
    span = tl.cdiv(tl.cdiv(width, PARTS), 16) * 16
    begin = part * span
    selected, missing = _look_up(
        maps, meta, row_frames, map_frames, meta_frames, wanted, location, missed, inflight,
        begin, tl.minimum(begin + span, width), entries, tokens, piece.to(tl.int32), whole, due,
        2 * step + 1, DECODE, TOKENS, PER_ROW, PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK,
    )  # fmt: skip
    last, selected, missing = _arrive(arrivals + seat, selected, missing, PARTS)
    if last:
        granted = 0
        if missing > 0:
            tl.debug_barrier()
            home = tl.zeros([], tl.int64)
            if DECODE:
                home = tl.load(row_base + seat)
            granted = _admit(
                maps, meta, row_frames, map_frames, meta_frames, used + seat, hand + seat,
                draws + seat, age + seat, wanted, location, scratch, staging, source, target,
                width, entries, missing, slots, due, step, home, piece.to(tl.int32) * segment,
                TOUCH, EVICT, KEY, DECODE, WORDS, PER_ROW,
                PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK,
            )  # fmt: skip
        if DECODE:
            tl.store(misses + piece, missing)
            count_rows(
                counts + seat * COUNTERS, selected, selected, missing, granted, FIRST, LAYERS, WORDS
            )
    return last


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
    PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr,
    PER_META: tl.constexpr, META_FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """row_seat, map_seat, meta_seat: from one seat to the next in the tables of frames. scratch: int32
    [p, 2, width]. source, target: [p, width], misses: [p]. segment: staging places of a piece."""
    program = tl.program_id(0)
    piece = (program // PARTS).to(tl.int64)
    part = program % PARTS
    wanted += piece * width
    location += piece * width
    seat = tl.load(seats + piece).to(tl.int64)
    if seat < 0:
        fill_absent(location, part, width, PARTS, BLOCK)
        if DECODE:
            tl.store(misses + piece, 0)
    else:
        serve_piece(
            maps, meta, row_frames, map_frames, meta_frames, capacity, full, used, hand, draws, age,
            seat, wanted, admit, step_at, location, missed + piece * width,
            scratch + piece * 2 * width, committed, inflight, staging, row_base,
            source + piece * width, target + piece * width, misses, counts, arrivals,
            piece, part, width, row_seat, map_seat, meta_seat, segment,
            TOUCH, EVICT, KEY, LAZY, DECODE, FIRST, RESIDENT, PARTS, TOKENS, LAYERS, WORDS, PER_ROW,
            PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK,
        )  # fmt: skip


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
    scratch = torch.empty((pieces, 2, width), dtype=torch.int32, device=wanted.device)
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
        num_warps=WARPS,
    )
    return Resolved(location, missed)
