"""Retrieve in Triton: resolve, then fetch over the pieces' own lists of missing records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..copy import check_host, words_of
from ..eviction import EvictionRule
from ..retrieve import DecodeRows, StoreMemory
from .copy import MOST_ROWS, TILE_WORDS, arena_side, host_side, plan, word_at
from .eviction import device_key
from .launch import blocks, power_of_two
from .lists import Lists, decode_arguments
from .resolve import PART_COUNTS, _resolve, scratch_of
from .tables import check_tables, table_arguments, table_constants, table_strides
from .union import resolve_union


@dataclass(frozen=True, slots=True)
class Shape:
    """How retrieval is cut into programs. parts, block, warps: of resolve, per piece. tile: slots and missing
    entries that it sees at a time. programs, rows, fetch_warps: of fetch: most programs, records that each
    moves at a time (0: as many as fit a tile). fused: one launch for both, with the warps of resolve."""

    parts: int
    block: int
    warps: int
    programs: int
    rows: int
    fetch_warps: int = 4
    fused: bool = False
    tile: int = 1024


@triton.jit
def copy_segments(
    source, target, misses, host, records, program, programs, pieces, segment,
    PIECES: tl.constexpr, PER: tl.constexpr, FRAME: tl.constexpr, RECORD: tl.constexpr,
    ALIGNED: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Copy the listed records, piece after piece: a narrow window that goes through host memory in the
    order of addresses (42-48 M rows/s over a PCIe 5 link against 28-33 M at random)."""
    request = tl.arange(0, PIECES)
    listed = tl.load(misses + request, mask=request < pieces, other=0, cache_modifier=".cg")
    ends = tl.cumsum(listed, 0)
    total = tl.sum(listed, 0)
    column = tl.arange(0, WIDTH)
    start = program * ROWS
    while start < total:
        item = start + tl.arange(0, ROWS)
        there = item < total
        before = ends[None, :] <= item[:, None]
        owner = tl.sum(before.to(tl.int32), 1)
        first = tl.max(tl.where(before, ends[None, :], 0), 1)
        at = owner.to(tl.int64) * segment + item - first
        come = tl.load(source + at, mask=there, other=0, cache_modifier=".cg")
        go = tl.load(target + at, mask=there, other=0, cache_modifier=".cg").to(tl.int64)
        come = word_at(come, 0, 0, ALIGNED)
        go = word_at(go, PER, FRAME, RECORD)
        for piece in tl.static_range(SLICES):
            word = piece * WIDTH + column
            mask = there[:, None] & (word < WORDS)[None, :]
            value = tl.load(host + come[:, None] + word[None, :], mask=mask)
            tl.store(records + go[:, None] + word[None, :], value, mask=mask)
        start += programs * ROWS


@triton.jit(do_not_specialize=["pieces", "segment"])
def _fetch(
    source, target, misses, host, records, pieces, segment,
    PIECES: tl.constexpr, PER: tl.constexpr, FRAME: tl.constexpr, RECORD: tl.constexpr,
    ALIGNED: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    copy_segments(
        source, target, misses, host, records, tl.program_id(0), tl.num_programs(0), pieces, segment,
        PIECES, PER, FRAME, RECORD, ALIGNED, WORDS, ROWS, WIDTH, SLICES,
    )  # fmt: skip


def fetch_constants(store: StoreMemory, pieces: int, rows: int) -> dict[str, int]:
    """How records lie on both sides, and how many move at a time."""
    words = words_of(store.cache.records)
    width = words.shape[2]
    constants = plan(host_side(width), arena_side(words), width)
    return {
        "PIECES": max(2, int(triton.next_power_of_2(pieces))),
        "PER": constants["TARGET_PER"],
        "FRAME": constants["TARGET_FRAME"],
        "RECORD": constants["TARGET_RECORD"],
        "ALIGNED": constants["SOURCE_RECORD"],
        "WORDS": width,
        "ROWS": rows or constants["ROWS"],
        "WIDTH": constants["PIECE"],
        "SLICES": constants["PIECES"],
    }


def resolve_rows(
    store: StoreMemory,
    rows: DecodeRows,
    chosen: Tensor,
    rule: EvictionRule,
    first: bool,
    resident: bool,
    shape: Shape,
) -> tuple[Tensor, Lists]:
    """One launch: locations as :func:`retrieve` gives them, and what is to be fetched."""
    key = device_key(rule)
    cache = store.cache
    check_tables(cache)
    pieces, width = rows.seat.shape[0], chosen.shape[1]
    segment = store.segment(pieces, width)
    device = chosen.device
    location = torch.empty(chosen.shape, dtype=torch.int32, device=device)
    lists = Lists.empty(pieces, width, device)
    scratch = scratch_of(pieces, width, device)
    kernel: Any = _resolve
    kernel[(pieces * shape.parts,)](
        *table_arguments(cache),
        *decode_arguments(store, rows, chosen, location, scratch, lists),
        store.arrivals,
        scratch,  # flags of misses are not asked for
        width,
        *table_strides(cache),
        segment,
        TOUCH=rule.touch,
        KEY=key,
        LAZY=rule.lazy,
        DECODE=True,
        FIRST=first,
        RESIDENT=resident,
        PARTS=shape.parts,
        TOKENS=store.tokens_per_entry,
        LAYERS=store.layers,
        WORDS=words_of(cache.records).shape[2],
        **table_constants(cache),
        BLOCK=shape.block,
        TILE=shape.tile,
        NEAR=device.type == "cuda",
        EXTRA=PART_COUNTS,
        num_warps=shape.warps,
    )
    return location, lists


def fetch_lists(store: StoreMemory, lists: Lists, shape: Shape) -> None:
    """One launch: the listed records come from the host."""
    check_host(store.host)
    pieces, width = lists.source.shape
    constants = fetch_constants(store, pieces, shape.rows)
    programs = min(shape.programs, triton.cdiv(pieces * width, constants["ROWS"]))
    kernel: Any = _fetch
    kernel[(programs,)](
        lists.source, lists.target, lists.misses, store.host, words_of(store.cache.records),
        pieces, width, **constants, num_warps=shape.fetch_warps,
    )  # fmt: skip


# Most pieces, and for so many: programs per piece, warps and tile of resolve; programs and warps of fetch.
# us on one H200 (top-k 2048, 4096 slots, records of 2624 bytes, in a CUDA graph; resolve when all hit,
# then resolve + fetch with 14 % missing: in two launches, in one): batch 1: 3.9, 28.7, 29.2; 16: 5.3, 254,
# 256; 128: 11.3, 1936, 1938. So one launch for both wins nowhere. Two parts at 128: 11.7, and 22 instead
# of 19 with misses. Fetch at 128: 48 programs x 4 warps 1936, 16 x 16 warps 1939, 24 x 4 2369; the smaller
# grid leaves the other SMs to what runs beside it. Records of 1152 bytes at 128: 883 (16 x 16 warps, 16 at
# a time) to 936.
# Launching fetch early (programmatic dependent launch) cost 0.2.
CUTS = (
    (24, 8, 8, 512, 132, 4),
    (64, 4, 8, 512, 16, 16),
    (1 << 30, 1, 16, 1024, 16, 16),
)
# Columns that a program looks up at least, and most at a time.
LEAST_COLUMNS, MOST_COLUMNS = 128, 2048
# Words that a warp of fetch moves at a time, unless records are this long: then a program takes one tile.
WORDS_PER_WARP, LONG_RECORD = 512, 1024


def shape_for(pieces: int, width: int, words: int) -> Shape:
    """The cut for so many pieces, selected entries of each and words of a record."""
    cut = next(cut for most, *cut in CUTS if pieces <= most)
    parts, warps, tile, programs, fetch_warps = cut
    while parts > 1 and width < parts * LEAST_COLUMNS:
        parts //= 2
    block = min(power_of_two(blocks(width, parts), 16), MOST_COLUMNS)
    warps = max(4, min(warps, block // 32))
    size = power_of_two(words)
    tile_words = TILE_WORDS if size >= LONG_RECORD else fetch_warps * WORDS_PER_WARP
    most = max(1, tile_words // size)
    return Shape(parts, block, warps, programs, min(most, MOST_ROWS), fetch_warps, tile=tile)


def retrieve(
    store: StoreMemory,
    rows: DecodeRows,
    chosen: Tensor,
    rule: EvictionRule,
    first: bool = True,
    resident: bool = False,
    shape: Shape | None = None,
) -> Tensor:
    """See :func:`kvpolicy.kernels.retrieve.retrieve`: the same in every bit of everything."""
    words = words_of(store.cache.records).shape[2]
    cut = shape or shape_for(rows.seat.shape[0], chosen.shape[1], words)
    if rows.q > 1:
        location, lists = resolve_union(store, rows, chosen, rule, first)
        fetch_lists(store, lists, cut)
        return location
    if cut.fused and not resident:
        from .fused_retrieval import retrieve_fused

        return retrieve_fused(store, rows, chosen, rule, first, cut)
    location, lists = resolve_rows(store, rows, chosen, rule, first, resident, cut)
    if not resident:
        fetch_lists(store, lists, cut)
    return location
