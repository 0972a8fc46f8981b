"""Commit: the rows of a step become durable on the host, then part of the hot caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicy.kernels.eviction import EvictionRule
from kvpolicy.kernels.memory_ops import MemoryOps
from kvpolicy.kernels.paging import upload
from kvpolicy.kernels.resolve import PAD
from kvpolicy.memory.counters import MemoryCounters
from kvpolicy.memory.host_pool import HostPool
from kvpolicy.memory.layout import StoreLayout
from kvpolicy.memory.request import RequestMemory
from kvpolicy.memory.segments import Segment
from kvpolicy.memory.step import StepMemory


@dataclass(frozen=True, slots=True)
class Accepted:
    """The first ``count`` rows of a segment are to stay."""

    request: RequestMemory
    segment: Segment
    count: int

    def entries(self, store: StoreLayout) -> range:
        """Entries of a store that these rows complete."""
        first = self.request.committed_entries(store.index)
        return range(first, store.store.entries(self.request.committed + self.count))


@dataclass(frozen=True, slots=True)
class _New:
    """Completed entries of one store, all requests together: row of the step, seat, entry; int64 [m].

    home: location in a full cache, for entries of such, else -1.
    """

    row: Tensor
    seat: Tensor
    entry: Tensor
    home: Tensor


class Committer:
    """Writes accepted rows through to the host and offers them to the hot caches."""

    def __init__(
        self, host: HostPool, ops: MemoryOps, counters: MemoryCounters, device: torch.device
    ) -> None:
        self._host = host
        self._ops = ops
        self._counters = counters
        self._device = device

    def commit(
        self, step: StepMemory, accepted: Sequence[Accepted], rule: EvictionRule, evict: bool
    ) -> None:
        """All stores and pinned sets. evict: a new row may displace another from a hot cache."""
        for store in step.layout.stores:
            self._commit_store(step, store, accepted, rule, evict)
        for one in accepted:
            self._commit_pinned(step, one)

    def _commit_store(
        self,
        step: StepMemory,
        store: StoreLayout,
        accepted: Sequence[Accepted],
        rule: EvictionRule,
        evict: bool,
    ) -> None:
        new = self._new(step, store, accepted)
        if new is None:
            return
        tables = step.tables.stores[store.index]
        flying = step.tables.inflight[store.index].paged.locate(new.row)
        home, words = tables.host_row(new.seat, new.entry), self._host.words
        self._ops.arena_to_host(tables.cache.records, flying, words, home)
        keys, key_home = (
            tables.key_location(new.seat, new.entry),
            tables.host_key(new.seat, new.entry),
        )
        self._ops.arena_to_host(tables.keys.view, keys, words, key_home)
        copied = new.row.shape[0] * (store.record.bytes + store.key.bytes)
        self._counters.device_to_host_bytes += copied
        self._ops.arena_to_arena(tables.cache.records, flying, new.home)
        self._offer(step, store, accepted, rule, evict)

    def _new(
        self, step: StepMemory, store: StoreLayout, accepted: Sequence[Accepted]
    ) -> _New | None:
        per = store.store.tokens_per_entry
        rows: list[int] = []
        seats: list[int] = []
        entries: list[int] = []
        full: list[int] = []
        for one in accepted:
            own = one.entries(store)
            shift = one.segment.start - one.segment.position + per - 1
            rows += [entry * per + shift for entry in own]
            seats += [one.request.seat] * len(own)
            entries += own
            full += [int(one.request.hot[store.index].full)] * len(own)
        if not rows:
            return None
        row, seat, entry, whole = upload([rows, seats, entries, full], self._device)
        tables = step.tables.stores[store.index]
        if not any(full):
            return _New(row, seat, entry, torch.full_like(entry, -1))
        # Seats of mapped caches have fewer row frames: entry 0 stands in where nothing is copied.
        home = tables.row_location(seat, entry * whole)
        return _New(row, seat, entry, torch.where(whole > 0, home, -1))

    def _offer(
        self,
        step: StepMemory,
        store: StoreLayout,
        accepted: Sequence[Accepted],
        rule: EvictionRule,
        evict: bool,
    ) -> None:
        """New rows of generations enter mapped caches; prompt rows wait for the end of the prompt."""
        per = store.store.tokens_per_entry
        offers = [
            (one, own)
            for one in accepted
            if one.segment.decode
            and not one.request.hot[store.index].full
            and one.request.hot[store.index].capacity
            and (own := one.entries(store))
        ]
        if not offers:
            return
        width = max(len(own) for _, own in offers)
        padded = [[*own, *[PAD] * (width - len(own))] for _, own in offers]
        shifts = [one.segment.start - one.segment.position + per - 1 for one, _ in offers]
        seats = [one.request.seat for one, _ in offers]
        numbers = upload(
            [[seat, shift, *own] for seat, shift, own in zip(seats, shifts, padded, strict=True)],
            self._device,
        )
        seat, shift, entries = numbers[:, 0], numbers[:, 1:2], numbers[:, 2:]
        may = torch.ones_like(seat, dtype=torch.bool)
        tables = step.tables.stores[store.index].cache
        found = self._ops.resolve(tables, seat, entries.contiguous(), may, rule, step.step, evict)
        rows = torch.where(entries == PAD, 0, entries * per + shift)
        flying = step.tables.inflight[store.index].paged.locate(rows)
        self._ops.arena_to_arena(tables.records, flying.flatten(), found.location.flatten())

    def _commit_pinned(self, step: StepMemory, one: Accepted) -> None:
        segment, count = one.segment, one.count
        for i, pinned in enumerate(step.layout.pinned):
            kept = min(count, pinned.rows)
            rows = torch.arange(count - kept, count, device=self._device) + segment.start
            records = step.tables.inflight_pinned[i].paged.get(rows)
            ring = (rows - segment.start + segment.position) % pinned.rows
            one.request.pinned[i].paged.put(ring, records)
