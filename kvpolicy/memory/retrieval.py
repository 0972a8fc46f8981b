"""Exact retrieval: every selected row is on the device, bit for bit, when attention reads it.

Per selector and step: union of the selections of a request's rows -> look up -> fetch each miss
once from the host -> it stays in the hot cache while the budget allows, else it lies in *staging*.
Where the misses may overflow staging, rows are served in waves; each wave is complete before it is
read. A step whose misses cannot overflow it is served without waiting for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicy.geometry.geometry import Selector
from kvpolicy.kernels.eviction import EvictionRule
from kvpolicy.kernels.memory_ops import MemoryOps
from kvpolicy.kernels.paging import upload
from kvpolicy.kernels.resolve import PAD
from kvpolicy.memory.counters import MemoryCounters
from kvpolicy.memory.host_pool import HostPool
from kvpolicy.memory.layout import Layout, StoreLayout
from kvpolicy.memory.request import RequestMemory
from kvpolicy.memory.rows import StepRows
from kvpolicy.memory.segments import Segment, Wave
from kvpolicy.memory.tables import SharedTables


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows start..stop-1 of the step, of one request, that are retrieved together.

    bound: records that may have to be staged, at most.
    """

    start: int
    stop: int
    request: RequestMemory
    segment: Segment
    bound: int


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the pieces of a wave want of a store.

    entries: int64 [p, U] committed entries, ascending, PAD at the end. seats: int64 [p].
    admit: bool [p], whether misses may stay. count_rows: int64 [p], where each is counted.
    piece: int64 [m], the piece of every row of the wave.
    """

    entries: Tensor
    seats: Tensor
    admit: Tensor
    count_rows: Tensor
    piece: Tensor


class Retriever:
    """Serves the selections of one step, wave by wave. requests and segments go in pairs."""

    def __init__(
        self,
        layout: Layout,
        tables: SharedTables,
        host: HostPool,
        ops: MemoryOps,
        rule: EvictionRule,
        requests: tuple[RequestMemory, ...],
        segments: tuple[Segment, ...],
        rows: StepRows,
        step: int,
        counters: MemoryCounters,
    ) -> None:
        self._layout = layout
        self._tables = tables
        self._host = host
        self._ops = ops
        self._rule = rule
        self._pairs = tuple(zip(requests, segments, strict=True))
        self._rows = rows
        self._step = step
        self._counters = counters
        self._pages: dict[tuple[tuple[int, int], ...], tuple[Tensor, ...]] = {}

    def waves(self, selector: Selector, chosen: Tensor, first: bool) -> Iterator[Wave]:
        """Waves over all rows, in row order.

        chosen: int64 [n, k], the selection. first: admit misses and count; else look up only.
        """
        store = self._layout.of(selector)
        count = 0
        for pieces in self._packed(store, chosen):
            count += 1
            yield self._serve(store, chosen, pieces, first)
        self._counters.request_waves += max(0, count - 1)

    # --- which rows go together ------------------------------------------------------------------

    def _packed(self, store: StoreLayout, chosen: Tensor) -> Iterator[list[Piece]]:
        """Pieces in row order, as many at a time as cannot overflow staging."""
        room = self._tables.staging[store.index].items
        pieces: list[Piece] = []
        staged = 0
        for request, segment in self._pairs:
            for piece in self._cuts(store, request, segment, chosen, room):
                # A later piece of the same request may evict what an earlier one waits for.
                again = bool(pieces) and pieces[-1].request is request
                if pieces and (again or staged + piece.bound > room):
                    yield pieces
                    pieces, staged = [], 0
                pieces.append(piece)
                staged += piece.bound
        if pieces:
            yield pieces

    def _cuts(
        self,
        store: StoreLayout,
        request: RequestMemory,
        segment: Segment,
        chosen: Tensor,
        room: int,
    ) -> Iterator[Piece]:
        """Row ranges of a segment whose missing entries fit staging, the longest by halving."""
        hot = request.hot[store.index]
        committed = request.committed_entries(store.index)
        bound = 0 if hot.full else min(segment.count * chosen.shape[1], committed)
        if bound <= room:
            yield Piece(segment.start, segment.stop, request, segment, bound)
            return
        start = segment.start
        while start < segment.stop:
            count = segment.stop - start
            while True:
                rows = chosen[start : start + count]
                wanted = torch.unique(rows[(rows >= 0) & (rows < committed)])
                bound = hot.count_missing(wanted)
                if count == 1 or bound <= room:
                    break
                count = (count + 1) // 2
            yield Piece(start, start + count, request, segment, bound)
            start += count

    # --- one wave --------------------------------------------------------------------------------

    def _serve(self, store: StoreLayout, chosen: Tensor, pieces: list[Piece], first: bool) -> Wave:
        start, stop = pieces[0].start, pieces[-1].stop
        own = chosen[start:stop]
        old = (own >= 0) & (own < self._rows.committed(store, start, stop))
        wanted = self._wanted(own, old, pieces, start, first)
        tables = self._tables.stores[store.index]
        found = self._ops.resolve(
            tables.cache, wanted.seats, wanted.entries, wanted.admit, self._rule, self._step
        )
        staged = (found.location < 0) & (wanted.entries != PAD)
        where = self._fetch(store, wanted, found.location, found.missed, staged)
        if first:
            self._count(store, wanted, old, found.missed, staged)
        else:
            self._count_again(store, wanted, staged)
        locations = self._locations(own, old, wanted, where, pieces, start)
        flying = self._rows.inflight(self._tables.inflight[store.index], store, own, start, stop)
        return Wave(start, stop, torch.where(old, locations, flying), own >= 0)

    def _wanted(
        self, own: Tensor, old: Tensor, pieces: Sequence[Piece], start: int, first: bool
    ) -> _Wanted:
        """The union of each piece's rows. Pieces of one row need none, and do not wait for the
        device: it is their selection."""
        seats, admit, count_rows, piece = self._pages_of(pieces)
        if not first:
            admit = torch.zeros_like(admit)
        if own.shape[0] == len(pieces):
            return _Wanted(own.masked_fill(~old, PAD), seats, admit, count_rows, piece)
        unions = []
        for each in pieces:
            rows = slice(each.start - start, each.stop - start)
            if each.stop - each.start == 1:
                unions.append(own[rows].masked_fill(~old[rows], PAD).flatten())
            else:
                unions.append(torch.unique(own[rows][old[rows]]))
        width = max(union.numel() for union in unions)
        entries = own.new_full((len(pieces), max(width, 1)), PAD)
        for i, union in enumerate(unions):
            entries[i, : union.numel()] = union
        return _Wanted(entries, seats, admit, count_rows, piece)

    def _pages_of(self, pieces: Sequence[Piece]) -> tuple[Tensor, ...]:
        """Seats, admission, counter rows and the piece of each row, on the device: one upload per
        set of pieces and step, since all selectors of a plain decode step have the same ones."""
        key = tuple((piece.start, piece.stop) for piece in pieces)
        if key not in self._pages:
            row, device = self._counters.retrieval.row, self._rows.device
            seats = [piece.request.seat for piece in pieces]
            admit = [int(piece.segment.decode) for piece in pieces]
            counts = [row(p.request.seat, p.segment.decode) for p in pieces]
            numbers = upload([seats, admit, counts], device)
            owners = upload(
                [i for i, piece in enumerate(pieces) for _ in range(piece.stop - piece.start)],
                device,
            )
            self._pages[key] = (numbers[0], numbers[1].bool(), numbers[2], owners)
        return self._pages[key]

    def _fetch(
        self, store: StoreLayout, wanted: _Wanted, location: Tensor, missed: Tensor, staged: Tensor
    ) -> Tensor:
        """Copy what is missing, into its slot or into staging; locations of all: int64 [p, U]."""
        table = self._tables.staging[store.index]
        order = torch.cumsum(staged.flatten(), 0).view(staged.shape) - 1
        places = table.paged.locate(order.clamp(0, table.items - 1))
        where = torch.where(staged, places, location)
        source = self._tables.stores[store.index].host_row(wanted.seats[:, None], wanted.entries)
        target = torch.where(missed, where, -1)
        records = self._tables.stores[store.index].cache.records
        self._ops.host_to_arena(self._host.words, source.flatten(), records, target.flatten())
        return where

    def _locations(
        self,
        own: Tensor,
        old: Tensor,
        wanted: _Wanted,
        where: Tensor,
        pieces: Sequence[Piece],
        start: int,
    ) -> Tensor:
        """Locations of every row's committed entries: int64 [m, k], anything where not ``old``."""
        if own.shape[0] == len(pieces):
            return where
        parts = []
        for i, piece in enumerate(pieces):
            rows = slice(piece.start - start, piece.stop - start)
            if piece.stop - piece.start == 1:
                parts.append(where[i, None, : own.shape[1]])
                continue
            at = torch.searchsorted(wanted.entries[i], own[rows].masked_fill(~old[rows], 0))
            parts.append(where[i][at.clamp_max(where.shape[1] - 1)])
        return torch.cat(parts)

    # --- bookkeeping -----------------------------------------------------------------------------

    def _count(
        self, store: StoreLayout, wanted: _Wanted, old: Tensor, missed: Tensor, staged: Tensor
    ) -> None:
        """The first retrieval of a selection, counted on the device."""
        layers = store.store.n_layers
        selected = torch.zeros_like(wanted.seats)
        selected.index_add_(0, wanted.piece, old.sum(1))
        fetched = missed.sum(1)
        unique = (wanted.entries != PAD).sum(1)
        nothing = torch.zeros_like(fetched)
        counts = torch.stack([selected, unique, fetched, staged.sum(1), nothing], dim=1) * layers
        size = (fetched * store.record.bytes)[:, None]
        self._counters.retrieval.add(wanted.count_rows, torch.cat([counts, size], dim=1))

    def _count_again(self, store: StoreLayout, wanted: _Wanted, staged: Tensor) -> None:
        """Fetching again for a later layer."""
        again = staged.sum(1)
        counts = torch.zeros((again.shape[0], 6), dtype=torch.int64, device=again.device)
        counts[:, 4] = again * store.store.n_layers
        counts[:, 5] = again * store.record.bytes
        self._counters.retrieval.add(wanted.count_rows, counts)
