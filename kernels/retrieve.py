"""Retrieve: what the rows of a decode step selected is brought to the device, found, and counted.

One call serves p *pieces* (requests) of q query rows each, in one store. Everything that changes from step
to step lies in device tensors, so a call may be captured in a CUDA graph and replayed. A padded piece (seat
-1) reads and writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .copy import host_to_arena, words_of
from .eviction import EvictionRule
from .paging import Paged
from .resolve import ABSENT, CacheTables, resolve

COUNTERS = 6


@dataclass(frozen=True, slots=True)
class StoreMemory:
    """One store as decode kernels see it. Every tensor keeps its address as long as the store lives.

    cache: hot caches of all seats. keys: arena view of index keys [F, per, *item]; key_frames: int64
    [seats, most]. host: int32 [words], the host pool; row_base, key_base: int64 [seats], where a seat's
    records and keys begin in it, in words. staging, inflight: int64 [n], the frames of these two tables,
    of the same records as the cache; staging_rows: records that staging holds.
    counts: int64 [>= seats, COUNTERS], by seat: selected, unique, fetched, staged and refetched rows, bytes.
    arrivals: int64 [seats + 2], zeros, where programs meet: each launch leaves zeros.
    layers: rows of one record, as counters count them. tokens_per_entry: tokens that make one entry.
    """

    cache: CacheTables
    keys: Tensor
    key_frames: Tensor
    host: Tensor
    row_base: Tensor
    key_base: Tensor
    staging: Tensor
    staging_rows: int
    inflight: Tensor
    counts: Tensor
    arrivals: Tensor
    layers: int = 1
    tokens_per_entry: int = 1

    def segment(self, pieces: int, width: int) -> int:
        """Staging places of one piece. ValueError unless each may stage ``width`` records."""
        places = self.staging_rows // pieces if pieces else self.staging_rows
        if places < width and pieces:
            raise ValueError(
                f"staging_rows = {self.staging_rows}: {pieces} pieces of {width} entries need "
                f"{pieces * width}"
            )
        return places


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """p pieces of q rows: row i * q + j of the step is row j of piece i, and lies in flight there.

    seat: int32 or int64 [p], distinct, -1 for a padded piece. committed: int32 or int64 [p], tokens
    before this step, the position of a piece's first row. step: int32 or int64 [1], in [0, 2**30).
    admit: bool [p], may missing records stay.
    """

    seat: Tensor
    committed: Tensor
    step: Tensor
    admit: Tensor
    q: int = 1


def retrieve(
    store: StoreMemory,
    rows: DecodeRows,
    chosen: Tensor,
    rule: EvictionRule,
    first: bool = True,
    resident: bool = False,
) -> Tensor:
    """Locations of the records that the rows selected, all of them on the device afterwards.

    chosen: int32 or int64 [p * q, k], entries of each row, distinct; negative where there are fewer. The
    union of a piece's rows, in the order of their first appearance, is looked up, stamped and counted once
    (:func:`kvpolicy.kernels.resolve.resolve`); each missing record is copied from the host once, into its
    slot or into staging, where piece i owns the places from i * (staging_rows // p) on. Entries that this
    step completes are in flight.
    first: admit and count; else look up only, stage what is missing and count it as refetched. resident:
    every live seat is full, which the caller must know: nothing is looked up.
    Returns int32 [p * q, k], ABSENT where nothing was selected. ValueError if staging may overflow.
    """
    pieces, width = rows.seat.shape[0], rows.q * chosen.shape[1]
    place = store.segment(pieces, width)
    location = torch.full(chosen.shape, ABSENT, dtype=torch.int32, device=chosen.device)
    for piece, seat in enumerate(rows.seat.tolist()):
        if seat >= 0:
            own = slice(piece * rows.q, (piece + 1) * rows.q)
            _retrieve_piece(
                store,
                rows,
                piece,
                seat,
                chosen[own].long(),
                rule,
                first,
                piece * place,
                location[own],
            )
    return location


def _retrieve_piece(
    store: StoreMemory,
    rows: DecodeRows,
    piece: int,
    seat: int,
    chosen: Tensor,
    rule: EvictionRule,
    first: bool,
    place: int,
    location: Tensor,
) -> None:
    """One piece. chosen: int64 [q, k]; location: int32 [q, k], written."""
    tokens, per = int(rows.committed[piece]), store.tokens_per_entry
    old = (chosen >= 0) & (chosen < tokens // per)
    flying = chosen >= tokens // per
    index = chosen * per + per - 1 - tokens + piece * rows.q
    location[flying] = Paged(store.cache.records, store.inflight).locate(index[flying]).int()
    wanted, at = first_appearances(chosen[old])
    slots = Paged(store.cache.records, store.cache.row_frames[seat])
    missed = torch.zeros_like(wanted, dtype=torch.bool)
    if bool(store.cache.full[seat]):
        where = slots.locate(wanted)
    else:
        state = store.cache.state(seat)
        stays = first and bool(rows.admit[piece])
        found = resolve(wanted, state, rule, int(rows.step), stays)
        store.cache.keep(seat, state)
        missed = found.missed
        staged = found.slot < 0
        where = torch.empty_like(wanted)
        where[~staged] = slots.locate(found.slot[~staged])
        places = torch.arange(int(staged.sum()), device=where.device) + place
        where[staged] = Paged(store.cache.records, store.staging).locate(places)
        _fetch(store, seat, wanted[missed], where[missed])
    location[old] = where[at].int()
    staged_rows = int((missed & (found.slot < 0)).sum()) if missed.any() else 0
    _count(store, seat, int(old.sum()), wanted.numel(), int(missed.sum()), staged_rows, first)


def first_appearances(entries: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct numbers of int64 [n] in the order in which they first appear, and for each of the n
    which of them it is."""
    ascending, inverse = torch.unique(entries, return_inverse=True)
    first = torch.full_like(ascending, entries.numel())
    order = torch.arange(entries.numel(), device=entries.device)
    first.scatter_reduce_(0, inverse, order, "amin")
    turn = torch.argsort(first)
    rank = torch.empty_like(turn)
    rank[turn] = torch.arange(turn.numel(), device=turn.device)
    return ascending[turn], rank[inverse]


def _fetch(store: StoreMemory, seat: int, entries: Tensor, where: Tensor) -> None:
    width = words_of(store.cache.records).shape[2]
    host_to_arena(store.host, store.row_base[seat] + entries * width, store.cache.records, where)


def _count(
    store: StoreMemory,
    seat: int,
    selected: int,
    unique: int,
    fetched: int,
    staged: int,
    first: bool,
) -> None:
    size = words_of(store.cache.records).shape[2] * 4
    rows = [selected, unique, fetched, staged, 0] if first else [0, 0, 0, 0, fetched]
    counts = [count * store.layers for count in rows] + [fetched * size]
    store.counts[seat] += torch.tensor(counts, device=store.counts.device)
