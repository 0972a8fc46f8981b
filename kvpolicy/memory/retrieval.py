"""Exact retrieval: every selected row is on the device, bit for bit, when attention reads it.

Per selector and step: union of the selections of a request's rows -> look up -> fetch each miss
once from the host -> it stays in the hot cache while the budget allows, else it lies in staging.
A step whose misses overflow staging is served in waves; each wave is complete before it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicy.geometry.geometry import Selector
from kvpolicy.kernels.paging import scatter
from kvpolicy.memory.arena import Arena
from kvpolicy.memory.counters import MemoryCounters, RetrievalCounters
from kvpolicy.memory.layout import Layout, StoreLayout
from kvpolicy.memory.request import RequestMemory
from kvpolicy.memory.segments import Segment, SharedTables, Wave


@dataclass(frozen=True, slots=True)
class _Piece:
    """Resolved rows of one segment: locations per row, and what must still go to staging."""

    start: int
    stop: int
    unique: Tensor
    where: Tensor
    staged: Tensor
    request: RequestMemory


class Retriever:
    """Serves the selections of one step, wave by wave. requests and segments go in pairs."""

    def __init__(
        self,
        layout: Layout,
        arena: Arena,
        tables: SharedTables,
        requests: tuple[RequestMemory, ...],
        segments: tuple[Segment, ...],
        step: int,
        counters: MemoryCounters,
    ) -> None:
        self._layout = layout
        self._arena = arena
        self._tables = tables
        self._pairs = tuple(zip(requests, segments, strict=True))
        self._step = step
        self._counters = counters

    def waves(self, selector: Selector, chosen: Tensor, first: bool) -> Iterator[Wave]:
        """Waves over all rows, in row order.

        chosen: int64 [n, k], the selection. first: admit misses and count; else look up only.
        """
        store = self._layout.of(selector)
        room = self._tables.staging[store.index].items
        pieces: list[_Piece] = []
        staged = waves = 0
        for request, segment in self._pairs:
            for rows, unique in self._cuts(store, request, segment, chosen, room):
                if pieces and pieces[-1].request is request:
                    # A later piece of the same request may evict what an earlier one waits for.
                    waves += 1
                    yield self._wave(store, chosen, pieces)
                    pieces, staged = [], 0
                piece = self._resolve(store, request, segment, chosen, rows, unique, first)
                if staged + piece.staged.numel() > room:
                    waves += 1
                    yield self._wave(store, chosen, pieces)
                    pieces, staged = [], 0
                staged += self._stage(store, piece, staged)
                pieces.append(piece)
        if pieces:
            waves += 1
            yield self._wave(store, chosen, pieces)
        self._counters.request_waves += max(0, waves - 1)

    def _cuts(
        self,
        store: StoreLayout,
        request: RequestMemory,
        segment: Segment,
        chosen: Tensor,
        room: int,
    ) -> Iterator[tuple[tuple[int, int], Tensor]]:
        """Row ranges of a segment whose missing entries fit staging, the longest by halving, each
        with its distinct entries, ascending."""
        hot = request.hot[store.index]
        committed = request.committed_entries(store.index)
        start = segment.start
        while start < segment.stop:
            count = segment.stop - start
            while True:
                rows = chosen[start : start + count]
                unique = torch.unique(rows[rows >= 0])
                old = unique[unique < committed]
                if count == 1 or old.numel() <= room or hot.count_missing(old) <= room:
                    break
                count = (count + 1) // 2
            yield (start, start + count), unique
            start += count

    def _resolve(
        self,
        store: StoreLayout,
        request: RequestMemory,
        segment: Segment,
        chosen: Tensor,
        rows: tuple[int, int],
        unique: Tensor,
        first: bool,
    ) -> _Piece:
        committed = request.committed_entries(store.index)
        old = unique[unique < committed]
        hot = request.hot[store.index]
        admit = torch.ones_like(old, dtype=torch.bool) if first and segment.decode else None
        found = hot.resolve(old, self._step, admit)
        kept = found.slot >= 0
        where = torch.empty_like(unique)
        where[: old.numel()][kept] = hot.locate(found.slot[kept])
        where[old.numel() :] = self._in_flight(store, segment, unique[old.numel() :])
        loaded = found.missed & kept
        if bool(loaded.any()):
            hot.write(found.slot[loaded], self._fetch(store, request, old[loaded]))
        staged = (~kept).nonzero()[:, 0]
        if first:
            request.note_selected(store.index, self._step, old)
            wanted = chosen[rows[0] : rows[1]]
            selected = int(((wanted >= 0) & (wanted < committed)).sum())
            count = _first_count(store, selected, found.missed, staged)
        else:
            count = _repeat_count(store, staged)
        total = self._counters.decode if segment.decode else self._counters.prefill
        total.add(count)
        if segment.decode:
            request.counters.add(count)
        return _Piece(rows[0], rows[1], unique, where, staged, request)

    def _in_flight(self, store: StoreLayout, segment: Segment, entries: Tensor) -> Tensor:
        """Locations of entries that this step completes: the row of their last token."""
        per = store.store.tokens_per_entry
        row = entries * per + per - 1 - segment.position + segment.start
        return self._tables.inflight[store.index].paged.locate(row)

    def _stage(self, store: StoreLayout, piece: _Piece, offset: int) -> int:
        """Fetch what cannot stay into staging rows ``offset``...; returns how many."""
        count = piece.staged.numel()
        if count:
            table = self._tables.staging[store.index].paged
            places = torch.arange(offset, offset + count, device=self._arena.device)
            piece.where[piece.staged] = table.locate(places)
            records = self._fetch(store, piece.request, piece.unique[piece.staged])
            scatter(table.view, table.locate(places), records)
        return count

    def _wave(self, store: StoreLayout, chosen: Tensor, pieces: list[_Piece]) -> Wave:
        start, stop = pieces[0].start, pieces[-1].stop
        locations = []
        for piece in pieces:
            own = chosen[piece.start : piece.stop]
            if not piece.unique.numel():
                # Nothing visible yet (the first tokens of an entry): any finite row, never valid.
                row = torch.full((1,), piece.start, device=own.device)
                anywhere = self._tables.inflight[store.index].paged.locate(row)
                locations.append(anywhere.expand(own.shape))
                continue
            # Padding (-1) takes index 0: it repeats the first valid location.
            at = torch.searchsorted(piece.unique, own.clamp_min(0).contiguous())
            at = torch.where(own >= 0, at, 0)
            locations.append(piece.where[at])
        return Wave(start, stop, torch.cat(locations), chosen[start:stop] >= 0)

    def _fetch(self, store: StoreLayout, request: RequestMemory, entries: Tensor) -> Tensor:
        """Records of committed entries from the host: int64 [f] -> [f, layers, width], on the device."""
        records = request.region.rows[store.index][entries.cpu()]
        return records.to(self._arena.device)


def _first_count(
    store: StoreLayout, selected: int, missed: Tensor, staged: Tensor
) -> RetrievalCounters:
    """What the first retrieval of a selection adds."""
    layers, fetched = store.store.n_layers, int(missed.sum())
    return RetrievalCounters(
        selected_rows=selected * layers,
        unique_rows=missed.numel() * layers,
        fetched_rows=fetched * layers,
        staged_rows=staged.numel() * layers,
        host_to_device_bytes=fetched * store.record.bytes,
    )


def _repeat_count(store: StoreLayout, staged: Tensor) -> RetrievalCounters:
    """What fetching again for a later layer adds."""
    again = staged.numel()
    return RetrievalCounters(
        refetched_rows=again * store.store.n_layers,
        host_to_device_bytes=again * store.record.bytes,
    )
