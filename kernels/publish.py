"""Publish: the accepted rows of a decode step become durable on the host, then part of the hot caches."""

from __future__ import annotations

import torch
from torch import Tensor

from .copy import arena_to_arena, arena_to_host, words_of
from .eviction import EvictionRule, stamp_of
from .paging import Paged
from .resolve import make_room, place
from .retrieve import DecodeRows, StoreMemory


def publish(
    store: StoreMemory,
    rows: DecodeRows,
    accepted: Tensor,
    rule: EvictionRule,
    evict: bool = True,
) -> None:
    """Make the first ``accepted[i]`` rows of piece i durable and visible.

    accepted: int32 or int64 [p], 0..q. Of every entry that they complete: the record goes from its last
    token's in-flight row to the host, the index key from the arena to the host, and the record into a full
    cache at its place, or into a mapped one: a free slot, else with ``evict`` that of a victim, which may
    be any row. Padded pieces write nothing. ``rows.committed`` is not changed.
    """
    per = store.tokens_per_entry
    pairs = zip(rows.seat.tolist(), rows.committed.tolist(), accepted.tolist(), strict=True)
    for piece, (seat, tokens, count) in enumerate(pairs):
        first, after = tokens // per, (tokens + count) // per
        if seat >= 0 and after > first:
            entries = torch.arange(first, after, device=store.row_base.device)
            index = entries * per + per - 1 - tokens + piece * rows.q
            flying = Paged(store.cache.records, store.inflight).locate(index)
            _write_through(store, seat, entries, flying)
            _offer(store, seat, entries, flying, rule, int(rows.step), evict)


def _write_through(store: StoreMemory, seat: int, entries: Tensor, flying: Tensor) -> None:
    words, key_words = words_of(store.cache.records).shape[2], words_of(store.keys).shape[2]
    home = store.row_base[seat] + entries * words
    arena_to_host(store.cache.records, flying, store.host, home)
    keys = Paged(store.keys, store.key_frames[seat]).locate(entries)
    arena_to_host(store.keys, keys, store.host, store.key_base[seat] + entries * key_words)


def _offer(
    store: StoreMemory,
    seat: int,
    entries: Tensor,
    flying: Tensor,
    rule: EvictionRule,
    step: int,
    evict: bool,
) -> None:
    cache = store.cache
    slots = entries
    if not bool(cache.full[seat]):
        state = cache.state(seat)
        if not state.capacity:
            return
        slots = make_room(state, rule, step, entries.numel(), keep=None, evict=evict)
        place(state, entries[: slots.numel()], slots, stamp_of(step, hit=False))
        cache.keep(seat, state)
    where = Paged(cache.records, cache.row_frames[seat]).locate(slots)
    arena_to_arena(cache.records, flying[: slots.numel()], where)
