"""Resolve in Triton: one program serves one piece (a request's union in one store).

Nothing is read back by the host. A program never reads what it writes within one pass, and passes
are divided by barriers: so tiles may be of any size, also smaller than a program has threads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..eviction import EvictionRule
from ..resolve import CacheTables, Resolved
from .eviction import device_key, take_free, take_victims
from .tables import ABSENT, PAD, WANTED, location_of, wanted_tile, word_of

BLOCK = 1024
WARPS = 8


@triton.jit
def _identity(
    wanted, location, missed, row_frames, width, PER_ROW: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A full cache: slot = entry."""
    start = 0
    while start < width:
        column, inside, entry = wanted_tile(wanted, start, width, BLOCK)
        where = location_of(row_frames, entry, entry != PAD, PER_ROW)
        tl.store(location + column, tl.where(entry != PAD, where, ABSENT), mask=inside)
        tl.store(missed + column, tl.zeros([BLOCK], tl.int8), mask=inside)
        start += BLOCK


@triton.jit
def _look_up(
    wanted, location, missed, maps, meta, row_frames, map_frames, meta_frames, width, stamp,
    capacity, TOUCH: tl.constexpr, PER_ROW: tl.constexpr, PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr,
    PER_META: tl.constexpr, META_FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Locations of the hits, and who missed; stamps the hits (TOUCH, and ``capacity`` is not 0).
    Returns the number of misses."""
    count = 0
    start = 0
    while start < width:
        column, inside, entry = wanted_tile(wanted, start, width, BLOCK)
        valid = entry != PAD
        at = word_of(map_frames, entry, valid, PER_MAP, MAP_FRAME, 1)
        slot = tl.load(maps + at, mask=valid, other=ABSENT)
        hit = slot >= 0
        miss = valid & (slot < 0)
        where = location_of(row_frames, slot, hit, PER_ROW)
        tl.store(location + column, tl.where(hit, where, ABSENT), mask=inside)
        tl.store(missed + column, miss.to(tl.int8), mask=inside)
        if TOUCH:
            renewed = tl.where(hit, capacity, 0) > 0
            at = word_of(meta_frames, slot, renewed, PER_META, META_FRAME, 2)
            tl.store(meta + at + 1, tl.zeros([BLOCK], tl.int32) + stamp, mask=renewed)
        count += tl.sum(miss.to(tl.int32), 0)
        start += BLOCK
    return count


@triton.jit
def _mark_hits(
    wanted, maps, meta, map_frames, meta_frames, width, MARK: tl.constexpr,
    PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr,
    PER_META: tl.constexpr, META_FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write WANTED over the entries of the slots that were hit, or (not MARK) their entries again.

    Both times the map gives the same slots: only victims leave it meanwhile, and none is wanted.
    """
    start = 0
    while start < width:
        _column, _inside, entry = wanted_tile(wanted, start, width, BLOCK)
        at = word_of(map_frames, entry, entry != PAD, PER_MAP, MAP_FRAME, 1)
        slot = tl.load(maps + at, mask=entry != PAD, other=ABSENT)
        hit = slot >= 0
        at = word_of(meta_frames, slot, hit, PER_META, META_FRAME, 2)
        if MARK:
            tl.store(meta + at, tl.zeros([BLOCK], tl.int32) + WANTED, mask=hit)
        else:
            tl.store(meta + at, entry, mask=hit)
        start += BLOCK


@triton.jit
def _evict(
    wanted, maps, meta, map_frames, meta_frames, room, hand, draws, width, capacity, step, count,
    KEY: tl.constexpr, PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr,
    PER_META: tl.constexpr, META_FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Up to ``count`` slots of rows that are not wanted, into ``room``. Returns how many."""
    victims = 0
    if count > 0:
        tl.debug_barrier()
        _mark_hits(
            wanted, maps, meta, map_frames, meta_frames, width, True,
            PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK,
        )  # fmt: skip
        tl.debug_barrier()
        victims = take_victims(
            maps, meta, map_frames, meta_frames, room, hand, draws, capacity, step, count,
            KEY, PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK,
        )  # fmt: skip
        tl.debug_barrier()
        _mark_hits(
            wanted, maps, meta, map_frames, meta_frames, width, False,
            PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK,
        )  # fmt: skip
    return victims


@triton.jit
def _place(
    wanted, location, missed, room, maps, meta, row_frames, map_frames, meta_frames, width, granted,
    stamp, PER_ROW: tl.constexpr, PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr,
    PER_META: tl.constexpr, META_FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Publish the first ``granted`` missing entries at the slots of ``room``."""
    seen = 0
    start = 0
    while start < width:
        column, inside, entry = wanted_tile(wanted, start, width, BLOCK)
        miss = tl.load(missed + column, mask=inside, other=0, cache_modifier=".cg") != 0
        rank = seen + tl.cumsum(miss.to(tl.int32), 0) - 1
        placed = miss & (rank < granted)
        slot = tl.load(room + rank, mask=placed, other=0, cache_modifier=".cg")
        where = location_of(row_frames, slot, placed, PER_ROW)
        tl.store(location + column, where, mask=placed)
        at = word_of(map_frames, entry, placed, PER_MAP, MAP_FRAME, 1)
        tl.store(maps + at, slot, mask=placed)
        at = word_of(meta_frames, slot, placed, PER_META, META_FRAME, 2)
        tl.store(meta + at, entry, mask=placed)
        tl.store(meta + at + 1, tl.zeros([BLOCK], tl.int32) + stamp, mask=placed)
        seen += tl.sum(miss.to(tl.int32), 0)
        start += BLOCK


@triton.jit
def _serve(
    maps, meta, row_frames, map_frames, meta_frames, hand, draws, wanted, location, missed, room,
    width, capacity, step,
    TOUCH: tl.constexpr, EVICT: tl.constexpr, KEY: tl.constexpr,
    PER_ROW: tl.constexpr, PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr,
    PER_META: tl.constexpr, META_FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A mapped cache. capacity: 0 where nothing may change."""
    count = _look_up(
        wanted, location, missed, maps, meta, row_frames, map_frames, meta_frames, width,
        2 * step + 1, capacity, TOUCH,
        PER_ROW, PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK,
    )  # fmt: skip
    if (count > 0) & (capacity > 0):
        tl.debug_barrier()
        granted = take_free(meta, meta_frames, room, capacity, count, PER_META, META_FRAME, BLOCK)
        if EVICT:
            granted += _evict(
                wanted, maps, meta, map_frames, meta_frames, room + granted, hand, draws, width,
                capacity, step.to(tl.int64), count - granted,
                KEY, PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK,
            )  # fmt: skip
        tl.debug_barrier()
        _place(
            wanted, location, missed, room, maps, meta, row_frames, map_frames, meta_frames, width,
            granted, 2 * step, PER_ROW, PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["width", "row_seat", "map_seat", "meta_seat", "step"])
def _resolve(
    maps, meta, row_frames, map_frames, meta_frames, capacity, full, hand, draws,
    seats, wanted, admit, location, missed, room, width, row_seat, map_seat, meta_seat, step,
    TOUCH: tl.constexpr, EVICT: tl.constexpr, KEY: tl.constexpr,
    PER_ROW: tl.constexpr, PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr,
    PER_META: tl.constexpr, META_FRAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """row_seat, map_seat, meta_seat: from one seat to the next in the tables of frames."""
    piece = tl.program_id(0).to(tl.int64)
    seat = tl.load(seats + piece)
    wanted += piece * width
    location += piece * width
    missed += piece * width
    row_frames += seat * row_seat
    if tl.load(full + seat) != 0:
        _identity(wanted, location, missed, row_frames, width, PER_ROW, BLOCK)
    else:
        slots = tl.where(tl.load(admit + piece) != 0, tl.load(capacity + seat), 0)
        _serve(
            maps, meta, row_frames, map_frames + seat * map_seat, meta_frames + seat * meta_seat,
            hand + seat, draws + seat, wanted, location, missed, room + piece * width,
            width, slots, step, TOUCH, EVICT, KEY,
            PER_ROW, PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK,
        )  # fmt: skip


def _check(tables: CacheTables) -> None:
    """ValueError unless maps, metadata and frames lie as the kernel addresses them."""
    if tables.maps.stride(1) != 1 or tables.meta.stride()[1:] != (2, 1):
        raise ValueError(
            f"maps of strides {tables.maps.stride()}, meta of strides {tables.meta.stride()}: the "
            "items of a frame must be contiguous"
        )
    for name in ("row_frames", "map_frames", "meta_frames"):
        frames: Tensor = getattr(tables, name)
        if frames.stride(1) != 1:
            raise ValueError(f"{name} of strides {frames.stride()}: a seat's must be contiguous")


def resolve_batch(
    tables: CacheTables,
    seats: Tensor,
    wanted: Tensor,
    admit: Tensor,
    rule: EvictionRule,
    step: int,
    evict: bool = True,
) -> Resolved:
    """See :func:`kvpolicy.kernels.resolve.resolve_batch`: the same in every bit of everything.

    ValueError for a rule without a device function.
    """
    key = device_key(rule)
    _check(tables)
    wanted = wanted.contiguous()
    location = torch.empty_like(wanted)
    missed = torch.empty_like(wanted, dtype=torch.bool)
    if not wanted.numel():
        return Resolved(location, missed)
    room = torch.empty_like(wanted, dtype=torch.int32)  # slots for missing entries, in their order
    kernel: Any = _resolve
    kernel[(wanted.shape[0],)](
        tables.maps,
        tables.meta,
        tables.row_frames,
        tables.map_frames,
        tables.meta_frames,
        tables.capacity,
        tables.full.view(torch.uint8),
        tables.hand,
        tables.draws,
        seats.contiguous(),
        wanted,
        admit.contiguous().view(torch.uint8),
        location,
        missed.view(torch.int8),
        room,
        wanted.shape[1],
        tables.row_frames.stride(0),
        tables.map_frames.stride(0),
        tables.meta_frames.stride(0),
        step,
        TOUCH=rule.touch,
        EVICT=evict,
        KEY=key,
        PER_ROW=tables.records.shape[1],
        PER_MAP=tables.maps.shape[1],
        MAP_FRAME=tables.maps.stride(0),
        PER_META=tables.meta.shape[1],
        META_FRAME=tables.meta.stride(0),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return Resolved(location, missed)
