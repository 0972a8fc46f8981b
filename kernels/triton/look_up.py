"""Look-up in Triton: where each entry that a program's part of a piece wants is, and what it misses."""

from __future__ import annotations

import triton
import triton.language as tl

from .tables import ABSENT, is_entry, location_of, word_of

LINE = tl.constexpr(16)  # frame numbers in a line of 128 bytes


@triton.jit
def bring_near(row_frames, slots, PER_ROW: tl.constexpr):
    """Ask for the first 12,000 slots' frame numbers, which the look-up needs after the map."""
    line = tl.minimum(tl.arange(0, 64) * LINE, tl.maximum(slots - 1, 0) // PER_ROW)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [row_frames + line], tl.int32, False, 1
    )


@triton.jit
def look_up(
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
