"""Exact retrieval: every selected row is on the device, bit for bit, when attention reads it.

Per selector and step: union of the selections of a request's rows -> look up -> fetch each miss
once from the host -> it stays in the hot cache while the budget allows, else it lies in staging.
A step whose misses overflow staging is served in waves; each wave is complete before it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvpolicy.kernels.paging import scatter
from kvpolicy.memory.arena import Arena
from kvpolicy.memory.counters import MemoryCounters, RetrievalCounters
from kvpolicy.memory.layout import StoreLayout
from kvpolicy.memory.request import RequestMemory
from kvpolicy.models.geometry import Selector

if TYPE_CHECKING:
    from kvpolicy.memory.step import Segment, StepMemory


@dataclass(frozen=True, slots=True)
class Wave:
    """Query rows start..stop-1 of the step, all of whose selected rows are on the device.

    locations: int64 [stop - start, k] in the arena; valid: bool, False where a row has fewer than
    k entries (the location then repeats a valid one).
    """

    start: int
    stop: int
    locations: Tensor
    valid: Tensor


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
    """Serves the selections of one step, wave by wave."""

    def __init__(self, step: StepMemory, arena: Arena, counters: MemoryCounters) -> None:
        self._step = step
        self._arena = arena
        self._counters = counters

    def waves(self, selector: Selector, first: bool) -> Iterator[Wave]:
        """Waves over all rows, in row order. first: admit misses and count; else look up only."""
        step = self._step
        store = step.layout.of(selector)
        room = self.staging_rows(store)
        pieces: list[_Piece] = []
        staged = waves = 0
        for request, segment in zip(step.requests, step.segments, strict=True):
            for start, stop in self._cuts(selector, store, request, segment, room):
                if pieces and pieces[-1].request is request:
                    # A later piece of the same request may evict what an earlier one waits for.
                    waves += 1
                    yield self._wave(selector, store, pieces)
                    pieces, staged = [], 0
                piece = self._resolve(selector, store, request, segment, (start, stop), first)
                if staged + piece.staged.numel() > room:
                    waves += 1
                    yield self._wave(selector, store, pieces)
                    pieces, staged = [], 0
                staged += self._stage(store, piece, staged)
                pieces.append(piece)
        if pieces:
            waves += 1
            yield self._wave(selector, store, pieces)
        self._counters.request_waves += max(0, waves - 1)

    def staging_rows(self, store: StoreLayout) -> int:
        """Records of a store that the staging area holds."""
        return self._step.tables.staging[store.index].items

    def _cuts(
        self,
        selector: Selector,
        store: StoreLayout,
        request: RequestMemory,
        segment: Segment,
        room: int,
    ) -> Iterator[tuple[int, int]]:
        """Row ranges of a segment whose missing entries fit staging, the longest by halving."""
        start = segment.start
        while start < segment.stop:
            count = segment.stop - start
            while count > 1:
                old = self._unique(selector, store, request, start, start + count)[1]
                if old.numel() <= room or request.hot[store.index].count_missing(old) <= room:
                    break
                count = (count + 1) // 2
            yield start, start + count
            start += count

    def _unique(
        self, selector: Selector, store: StoreLayout, request: RequestMemory, start: int, stop: int
    ) -> tuple[Tensor, Tensor]:
        """Distinct entries of some rows, ascending, and those of them that are not in flight."""
        chosen = self._step.selection(selector)[start:stop]
        unique = torch.unique(chosen[chosen >= 0])
        return unique, unique[unique < request.committed_entries(store.index)]

    def _resolve(
        self,
        selector: Selector,
        store: StoreLayout,
        request: RequestMemory,
        segment: Segment,
        rows: tuple[int, int],
        first: bool,
    ) -> _Piece:
        step = self._step
        unique, old = self._unique(selector, store, request, *rows)
        hot = request.hot[store.index]
        admit = torch.ones_like(old, dtype=torch.bool) if first and segment.decode else None
        found = hot.resolve(old, step.step, admit)
        kept = found.slot >= 0
        where = torch.empty_like(unique)
        where[: old.numel()][kept] = hot.locate(found.slot[kept])
        flying = unique[old.numel() :]
        where[old.numel() :] = self._in_flight(store, segment, flying)
        loaded = found.missed & kept
        if bool(loaded.any()):
            hot.write(found.slot[loaded], self.fetch(store, request, old[loaded]))
        staged = (~kept).nonzero()[:, 0]
        self._count(store, request, segment, rows, selector, found.missed, staged, first)
        if first:
            self._account(segment, RetrievalCounters(evicted_entries=found.evicted), request)
            request.recent[store.index] = old
        return _Piece(rows[0], rows[1], unique, where, staged, request)

    def _in_flight(self, store: StoreLayout, segment: Segment, entries: Tensor) -> Tensor:
        """Locations of entries that this step completes: the row of their last token."""
        per = store.store.tokens_per_entry
        row = entries * per + per - 1 - segment.position + segment.start
        return self._step.tables.inflight[store.index].paged.locate(row)

    def _stage(self, store: StoreLayout, piece: _Piece, offset: int) -> int:
        """Fetch what cannot stay into staging rows ``offset``...; returns how many."""
        count = piece.staged.numel()
        if count:
            table = self._step.tables.staging[store.index].paged
            places = torch.arange(offset, offset + count, device=self._arena.device)
            piece.where[piece.staged] = table.locate(places)
            records = self.fetch(store, piece.request, piece.unique[piece.staged])
            scatter(table.view, table.locate(places), records)
        return count

    def _wave(self, selector: Selector, store: StoreLayout, pieces: list[_Piece]) -> Wave:
        start, stop = pieces[0].start, pieces[-1].stop
        chosen = self._step.selection(selector)[start:stop]
        locations = []
        for piece in pieces:
            own = chosen[piece.start - start : piece.stop - start]
            if not piece.unique.numel():
                # Nothing visible yet (the first tokens of an entry): any finite row, never valid.
                row = torch.full((1,), piece.start, device=own.device)
                anywhere = self._step.tables.inflight[store.index].paged.locate(row)
                locations.append(anywhere.expand(own.shape))
                continue
            # Padding (-1) sorts before every entry: index 0 repeats the first valid location.
            at = torch.searchsorted(piece.unique, own.clamp_min(0).contiguous())
            at = torch.where(own >= 0, at, 0)
            locations.append(piece.where[at])
        return Wave(start, stop, torch.cat(locations), chosen >= 0)

    def fetch(self, store: StoreLayout, request: RequestMemory, entries: Tensor) -> Tensor:
        """Records of committed entries from the host: int64 [f] -> [f, layers, width], on the device."""
        records = request.region.rows[store.index][entries.cpu()]
        return records.to(self._arena.device)

    # --- counting --------------------------------------------------------------------------------

    def _count(
        self,
        store: StoreLayout,
        request: RequestMemory,
        segment: Segment,
        rows: tuple[int, int],
        selector: Selector,
        missed: Tensor,
        staged: Tensor,
        first: bool,
    ) -> None:
        layers = store.store.n_layers
        fetched = int(missed.sum())
        if not first:
            again = int(staged.numel())
            count = RetrievalCounters(
                refetched_rows=again * layers, host_to_device_bytes=again * store.record.bytes
            )
            self._account(segment, count, request)
            return
        chosen = self._step.selection(selector)[rows[0] : rows[1]]
        old = (chosen >= 0) & (chosen < request.committed_entries(store.index))
        count = RetrievalCounters(
            selected_rows=int(old.sum()) * layers,
            unique_rows=int(missed.numel()) * layers,
            fetched_rows=fetched * layers,
            staged_rows=int(staged.numel()) * layers,
            host_to_device_bytes=fetched * store.record.bytes,
        )
        self._account(segment, count, request)

    def _account(self, segment: Segment, count: RetrievalCounters, request: RequestMemory) -> None:
        total = self._counters.decode if segment.decode else self._counters.prefill
        total.add(count)
        if segment.decode:
            request.counters.add(count)
