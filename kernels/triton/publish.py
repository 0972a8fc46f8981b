"""Publish in Triton: one launch per store writes a step's accepted rows to the host and offers them to the
caches. One program serves one piece."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..copy import check_host, words_of
from ..eviction import EvictionRule
from ..retrieve import DecodeRows, StoreMemory
from .admission import find_victims
from .copy import arena_side, host_side, plan, word_at
from .eviction import device_key
from .tables import (
    check_tables,
    location_of,
    table_arguments,
    table_constants,
    table_strides,
    word_of,
)

BLOCK = 1024
WARPS = 4


@triton.jit
def _take_slots(
    maps, meta, map_frames, meta_frames, room, used_at, hand_at, draws_at, age_at,
    used, hand, draws, age, first, count, capacity, step,
    EVICT: tl.constexpr, KEY: tl.constexpr, PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr,
    PER_META: tl.constexpr, META_FRAME: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Slots for entries first..first+count-1 of a mapped cache with room, into ``room``, and their map and
    metadata; what finds none is left out. Returns how many did."""
    tl.debug_barrier()  # a scalar load is done by every thread: all have read used, hand, draws and age
    free = tl.minimum(capacity - used, count)
    granted = free
    if EVICT:  # noqa: SIM102 - a condition of the compiler's
        if count > free:
            granted += find_victims(
                maps, meta, map_frames, meta_frames, room + free, hand_at, draws_at, age_at,
                hand, draws, age, capacity, used, step, count - free, -1, KEY, False,
                PER_MAP, MAP_FRAME, PER_META, META_FRAME, BLOCK,
            )  # fmt: skip
            tl.debug_barrier()
    if free > 0:
        tl.store(used_at, used + free)
    rank = tl.arange(0, MOST)
    evicted = (rank >= free) & (rank < granted)
    slot = tl.load(room + rank, mask=evicted, other=0, cache_modifier=".cg")
    slot = tl.where(rank < free, used + rank, slot)
    kept = rank < granted
    tl.store(room + rank, slot, mask=rank < free)
    at = word_of(map_frames, first + rank, kept, PER_MAP, MAP_FRAME, 1)
    tl.store(maps + at, slot, mask=kept)
    at = word_of(meta_frames, slot, kept, PER_META, META_FRAME, 2)
    tl.store(meta + at, first + rank, mask=kept)
    tl.store(meta + at + 1, tl.zeros([MOST], tl.int32) + 2 * step, mask=kept)
    tl.debug_barrier()
    return granted


@triton.jit
def _move(
    source, come, target, go, WORDS: tl.constexpr, WIDTH: tl.constexpr, SLICES: tl.constexpr
):  # fmt: skip
    """One item; come, go: its first words."""
    for piece in tl.static_range(SLICES):
        word = piece * WIDTH + tl.arange(0, WIDTH)
        value = tl.load(source + come + word, mask=word < WORDS)
        tl.store(target + go + word, value, mask=word < WORDS)


@triton.jit
def _flying_word(
    inflight, entry, tokens, first_row,
    TOKENS: tl.constexpr, PER: tl.constexpr, FRAME: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    """Where the in-flight record begins that an entry's last token left."""
    row = entry * TOKENS + TOKENS - 1 - tokens + first_row
    return word_at(location_of(inflight, row, row >= 0, PER), PER, FRAME, RECORD)


@triton.jit
def _publish_piece(
    maps, meta, row_frames, map_frames, meta_frames, capacity, whole, used_at, hand_at, draws_at, age_at,
    used, hand, draws, age,
    records, keys, key_frames, host, home, key_home, inflight, room,
    first, after, tokens, first_row, step,
    EVICT: tl.constexpr, KEY: tl.constexpr, TOKENS: tl.constexpr, PER_ROW: tl.constexpr,
    PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr,
    PER_META: tl.constexpr, META_FRAME: tl.constexpr,
    FRAME: tl.constexpr, RECORD: tl.constexpr, ALIGNED: tl.constexpr,
    WORDS: tl.constexpr, WIDTH: tl.constexpr, SLICES: tl.constexpr,
    KEY_PER: tl.constexpr, KEY_FRAME: tl.constexpr, KEY_RECORD: tl.constexpr,
    KEY_ALIGNED: tl.constexpr, KEY_WORDS: tl.constexpr, KEY_WIDTH: tl.constexpr,
    KEY_SLICES: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Entries first..after-1: to the host, which is far away, before a place here is looked for."""
    entry = first
    while entry < after:
        come = _flying_word(inflight, entry, tokens, first_row, TOKENS, PER_ROW, FRAME, RECORD)
        go = word_at(home + entry.to(tl.int64) * WORDS, 0, 0, ALIGNED)
        _move(records, come, host, go, WORDS, WIDTH, SLICES)
        come = location_of(key_frames, entry, entry >= 0, KEY_PER)
        come = word_at(come, KEY_PER, KEY_FRAME, KEY_RECORD)
        go = word_at(key_home + entry.to(tl.int64) * KEY_WORDS, 0, 0, KEY_ALIGNED)
        _move(keys, come, host, go, KEY_WORDS, KEY_WIDTH, KEY_SLICES)
        entry += 1
    granted = tl.where(whole != 0, after - first, 0)
    if (whole == 0) & (capacity > 0):
        granted = _take_slots(
            maps, meta, map_frames, meta_frames, room, used_at, hand_at, draws_at, age_at,
            used, hand, draws, age, first, after - first,
            capacity, step, EVICT, KEY, PER_MAP, MAP_FRAME, PER_META, META_FRAME, MOST, BLOCK,
        )  # fmt: skip
    entry = first
    while entry < first + granted:
        slot = entry
        if whole == 0:
            slot = tl.load(room + entry - first, cache_modifier=".cg")
        go = location_of(row_frames, slot, slot >= 0, PER_ROW)
        come = _flying_word(inflight, entry, tokens, first_row, TOKENS, PER_ROW, FRAME, RECORD)
        _move(records, come, records, word_at(go, PER_ROW, FRAME, RECORD), WORDS, WIDTH, SLICES)
        entry += 1


@triton.jit(do_not_specialize=["row_seat", "map_seat", "meta_seat", "key_seat", "q"])
def _publish(
    maps, meta, row_frames, map_frames, meta_frames, capacity, full, used, hand, draws, age,
    seats, committed, accepted, step_at, records, keys, key_frames, host, row_base, key_base,
    inflight, room, row_seat, map_seat, meta_seat, key_seat, q,
    EVICT: tl.constexpr, KEY: tl.constexpr, TOKENS: tl.constexpr, PER_ROW: tl.constexpr,
    PER_MAP: tl.constexpr, MAP_FRAME: tl.constexpr,
    PER_META: tl.constexpr, META_FRAME: tl.constexpr,
    FRAME: tl.constexpr, RECORD: tl.constexpr, ALIGNED: tl.constexpr,
    WORDS: tl.constexpr, WIDTH: tl.constexpr, SLICES: tl.constexpr,
    KEY_PER: tl.constexpr, KEY_FRAME: tl.constexpr, KEY_RECORD: tl.constexpr,
    KEY_ALIGNED: tl.constexpr, KEY_WORDS: tl.constexpr, KEY_WIDTH: tl.constexpr,
    KEY_SLICES: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """room: int32 [p, MOST], scratch. key_seat: from one seat to the next in key_frames."""
    piece = tl.program_id(0).to(tl.int64)
    seat = tl.load(seats + piece).to(tl.int64)
    tokens = tl.load(committed + piece).to(tl.int32)
    after = (tokens + tl.load(accepted + piece).to(tl.int32)) // TOKENS
    first = tokens // TOKENS
    if (seat >= 0) & (after > first):
        _publish_piece(
            maps, meta, row_frames + seat * row_seat, map_frames + seat * map_seat,
            meta_frames + seat * meta_seat, tl.load(capacity + seat),
            tl.load(full + seat).to(tl.int32), used + seat, hand + seat, draws + seat, age + seat,
            tl.load(used + seat), tl.load(hand + seat), tl.load(draws + seat), tl.load(age + seat),
            records, keys, key_frames + seat * key_seat, host, tl.load(row_base + seat),
            tl.load(key_base + seat), inflight, room + piece * MOST,
            first, after, tokens, piece.to(tl.int32) * q, tl.load(step_at).to(tl.int32),
            EVICT, KEY, TOKENS, PER_ROW, PER_MAP, MAP_FRAME, PER_META, META_FRAME,
            FRAME, RECORD, ALIGNED, WORDS, WIDTH, SLICES,
            KEY_PER, KEY_FRAME, KEY_RECORD, KEY_ALIGNED, KEY_WORDS, KEY_WIDTH, KEY_SLICES,
            MOST, BLOCK,
        )  # fmt: skip


def _item(words: Tensor, prefix: str = "") -> dict[str, int]:
    """How items lie in the arena and on the host, and in how many slices they move."""
    width = words.shape[2]
    constants = plan(arena_side(words), host_side(width), width)
    names = {
        "FRAME": "SOURCE_FRAME", "RECORD": "SOURCE_RECORD", "ALIGNED": "TARGET_RECORD",
        "WORDS": "WORDS", "WIDTH": "PIECE", "SLICES": "PIECES",
    }  # fmt: skip
    return {prefix + name: constants[key] for name, key in names.items()}


def publish(
    store: StoreMemory,
    rows: DecodeRows,
    accepted: Tensor,
    rule: EvictionRule,
    evict: bool = True,
) -> None:
    """See :func:`kvpolicy.kernels.publish.publish`: the same in every bit of everything."""
    cache = store.cache
    check_tables(cache)
    check_host(store.host)
    pieces = rows.seat.shape[0]
    if not pieces:
        return
    most = max(2, int(triton.next_power_of_2(rows.q)))
    room = torch.empty((pieces, most), dtype=torch.int32, device=rows.seat.device)
    records, keys = words_of(cache.records), words_of(store.keys)
    kernel: Any = _publish
    kernel[(pieces,)](
        *table_arguments(cache),
        rows.seat,
        rows.committed,
        accepted,
        rows.step,
        records,
        keys,
        store.key_frames,
        store.host,
        store.row_base,
        store.key_base,
        store.inflight,
        room,
        *table_strides(cache),
        store.key_frames.stride(0),
        rows.q,
        EVICT=evict,
        KEY=device_key(rule),
        TOKENS=store.tokens_per_entry,
        **table_constants(cache),
        **_item(records),
        KEY_PER=keys.shape[1],
        **_item(keys, "KEY_"),
        MOST=most,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
