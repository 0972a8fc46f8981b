"""Retrieve in one launch: look-up, victims, lists, gather from the host and counters.

The same programs first serve pieces, then meet, then copy. A program waits only for pieces that programs of
lower or neighbouring numbers serve without waiting, and only COPIERS of them wait at all, fewer than the
device holds at a time: so all arrive. In the interpreter programs run one after the other; there the last
one copies everything.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..copy import check_host, words_of
from ..eviction import EvictionRule
from ..retrieve import DecodeRows, StoreMemory
from .eviction import device_key
from .lists import Lists, decode_arguments
from .look_up import fill_absent, first_tile
from .resolve import PART_COUNTS, scratch_of, serve_piece
from .retrieve import Shape, copy_segments, fetch_constants
from .tables import check_tables, table_arguments, table_constants, table_strides


@triton.jit
def _meet(meeting, pieces, COPIERS: tl.constexpr):
    """Wait until all pieces are served; the last to leave makes both counters ready for the next launch."""
    served = tl.atomic_add(meeting, 0, sem="acquire")
    while served < pieces:
        served = tl.atomic_add(meeting, 0, sem="acquire")
    left = tl.atomic_add(meeting + 1, 1, sem="acq_rel")
    if left == COPIERS - 1:
        tl.store(meeting, 0)
        tl.store(meeting + 1, 0)


@triton.jit(
    do_not_specialize=["pieces", "width", "row_seat", "map_seat", "meta_seat", "segment"]
)  # fmt: skip
def _fused(
    maps, meta, row_frames, map_frames, meta_frames, capacity, full, used, hand, draws, age,
    seats, wanted, admit, step_at, location, scratch, committed, inflight, staging, row_base,
    source, target, misses, counts, arrivals, meeting, host, records,
    pieces, width, row_seat, map_seat, meta_seat, segment,
    TOUCH: tl.constexpr, KEY: tl.constexpr, LAZY: tl.constexpr, FIRST: tl.constexpr,
    PARTS: tl.constexpr, TOKENS: tl.constexpr, LAYERS: tl.constexpr, WORDS: tl.constexpr,
    PER_ROW: tl.constexpr, PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr,
    PER_META: tl.constexpr, META_FRAME: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    NEAR: tl.constexpr, EXTRA: tl.constexpr, COPIERS: tl.constexpr, WAIT: tl.constexpr,
    PIECES: tl.constexpr, PER: tl.constexpr, FRAME: tl.constexpr, RECORD: tl.constexpr,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Arguments as in ``_resolve`` and ``_fetch``. meeting: int64 [2], zeros before and after."""
    program = tl.program_id(0)
    if program < pieces * PARTS:
        piece = (program // PARTS).to(tl.int64)
        part = program % PARTS
        entry = first_tile(wanted + piece * width, part, width, PARTS, BLOCK)
        seat = tl.load(seats + piece).to(tl.int64)
        if seat < 0:
            fill_absent(location + piece * width, part, width, PARTS, BLOCK)
            last = part == 0
            if last:
                tl.store(misses + piece, 0)
        else:
            last = serve_piece(
                maps, meta, row_frames, map_frames, meta_frames, capacity, full, used, hand, draws,
                age, seat, wanted + piece * width, entry, admit, step_at, location + piece * width,
                location, scratch + piece * (3 * width + EXTRA), committed, inflight, staging, row_base,
                source + piece * width, target + piece * width, misses, counts, arrivals,
                piece, part, width, row_seat, map_seat, meta_seat, segment,
                TOUCH, KEY, LAZY, True, FIRST, False, PARTS, TOKENS, LAYERS, WORDS, PER_ROW,
                PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK, TILE, NEAR,
            )  # fmt: skip
        if last:
            tl.debug_barrier()  # all threads' lists come before the piece is called served
            tl.atomic_add(meeting, 1, sem="release")
    if WAIT:
        if program < COPIERS:
            _meet(meeting, pieces, COPIERS)
            copy_segments(
                source, target, misses, host, records, program, COPIERS, pieces, width,
                PIECES, PER, FRAME, RECORD, ALIGNED, WORDS, ROWS, WIDTH, SLICES,
            )  # fmt: skip
    elif program == tl.num_programs(0) - 1:
        _meet(meeting, pieces, 1)
        copy_segments(
            source, target, misses, host, records, 0, 1, pieces, width,
            PIECES, PER, FRAME, RECORD, ALIGNED, WORDS, ROWS, WIDTH, SLICES,
        )  # fmt: skip


def retrieve_fused(
    store: StoreMemory,
    rows: DecodeRows,
    chosen: Tensor,
    rule: EvictionRule,
    first: bool,
    shape: Shape,
) -> Tensor:
    """See :func:`kvpolicy.kernels.retrieve.retrieve`, for one row a piece. shape.programs: copiers."""
    cache = store.cache
    check_tables(cache)
    check_host(store.host)
    pieces, width = rows.seat.shape[0], chosen.shape[1]
    device = chosen.device
    location = torch.empty(chosen.shape, dtype=torch.int32, device=device)
    lists = Lists.empty(pieces, width, device)
    scratch = scratch_of(pieces, width, device)
    constants = fetch_constants(store, pieces, shape.rows)
    kernel: Any = _fused
    kernel[(max(pieces * shape.parts, shape.programs),)](
        *table_arguments(cache),
        *decode_arguments(store, rows, chosen, location, scratch, lists),
        store.arrivals,
        store.arrivals[-2:],
        store.host,
        words_of(cache.records),
        pieces,
        width,
        *table_strides(cache),
        store.segment(pieces, width),
        TOUCH=rule.touch,
        KEY=device_key(rule),
        LAZY=rule.lazy,
        FIRST=first,
        PARTS=shape.parts,
        TOKENS=store.tokens_per_entry,
        LAYERS=store.layers,
        **table_constants(cache),
        BLOCK=shape.block,
        TILE=shape.tile,
        NEAR=device.type == "cuda",
        EXTRA=PART_COUNTS,
        COPIERS=shape.programs,
        WAIT=device.type == "cuda",
        **constants,
        num_warps=shape.warps,
    )
    return location
