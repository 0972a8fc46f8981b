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
from .admission import make_room, place_missing
from .eviction import device_key
from .look_up import bring_near, fill_absent, first_tile, look_up
from .tables import check_tables, table_arguments, table_constants, table_strides

BLOCK, TILE = 1024, 1024
WARPS = 8
# Fields of one arrival: programs, tiles that left their hits unstamped, selected and missing entries.
UNSTAMPED, SELECTED, MISSING = tl.constexpr(8), tl.constexpr(16), tl.constexpr(40)
BYTE, ROWS = tl.constexpr((1 << 8) - 1), tl.constexpr((1 << 24) - 1)
COUNTERS = tl.constexpr(6)
# Words of scratch beside three lists of a piece's width: how many entries each part misses.
PART_COUNTS = 32


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
    TOUCH: tl.constexpr, KEY: tl.constexpr, LAZY: tl.constexpr,
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
        bring_near(row_frames, slots, PER_ROW)
    slots = tl.where(stays & (whole == 0), slots, 0)
    if not FIRST:
        slots = slots * 0
    due = tl.where((step + seat) % LAZY == 0, 1, 0)
    span = tl.cdiv(tl.cdiv(width, PARTS), 16) * 16
    begin = part * span
    columns, listed, room = scratch, scratch + width, scratch + 2 * width
    part_counts = scratch + 3 * width
    selected, missing, unstamped = look_up(
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
                    free, granted = make_room(
                        maps, meta, map_frames, meta_frames, wanted, room,
                        used_at + seat, hand_at + seat, draws_at + seat, age_at + seat,
                        used, hand, draws, age, width, entries, missing, slots, unstamped, step,
                        TOUCH, KEY, PER_MAP, MAP_FRAME, PER_META, META_FRAME, TILE,
                    )  # fmt: skip
                place_missing(
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


@triton.jit(do_not_specialize=["width", "row_seat", "map_seat", "meta_seat", "segment"])
def _resolve(
    maps, meta, row_frames, map_frames, meta_frames, capacity, full, used, hand, draws, age,
    seats, wanted, admit, step_at, location, scratch, committed, inflight, staging, row_base,
    source, target, misses, counts, arrivals, missed,
    width, row_seat, map_seat, meta_seat, segment,
    TOUCH: tl.constexpr, KEY: tl.constexpr, LAZY: tl.constexpr,
    DECODE: tl.constexpr, FIRST: tl.constexpr, RESIDENT: tl.constexpr, PARTS: tl.constexpr,
    TOKENS: tl.constexpr, LAYERS: tl.constexpr, WORDS: tl.constexpr, PER_ROW: tl.constexpr,
    PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr, PER_META: tl.constexpr, META_FRAME: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, NEAR: tl.constexpr, EXTRA: tl.constexpr,
):  # fmt: skip
    """row_seat, map_seat, meta_seat: from one seat to the next in the tables of frames. scratch: int32
    [p, 3 * width + EXTRA]. source, target: [p, width], misses: [p]. segment: staging places of a piece.
    BLOCK, TILE: columns looked up at a time, missing entries and slots seen at a time. NEAR: see
    ``bring_near``."""
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
            TOUCH, KEY, LAZY, DECODE, FIRST, RESIDENT, PARTS, TOKENS, LAYERS, WORDS, PER_ROW,
            PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK, TILE, NEAR,
        )  # fmt: skip


def scratch_of(pieces: int, width: int, device: torch.device) -> Tensor:
    """Room for the lists of all pieces."""
    return torch.empty((pieces, 3 * width + PART_COUNTS), dtype=torch.int32, device=device)


def resolve_batch(
    tables: CacheTables,
    seats: Tensor,
    wanted: Tensor,
    admit: Tensor,
    rule: EvictionRule,
    step: int | Tensor,
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
        scratch,
        *(unused,) * 9,
        missed.view(torch.int8),
        width,
        *table_strides(tables),
        0,
        TOUCH=rule.touch,
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
