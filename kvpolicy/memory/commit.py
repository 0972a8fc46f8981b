"""Commit: the rows of a step become durable on the host, then part of the hot caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicy.kernels.eviction import EvictionRule
from kvpolicy.kernels.memory_ops import MemoryOps
from kvpolicy.kernels.paging import upload
from kvpolicy.kernels.retrieve import DecodeRows, StoreMemory
from kvpolicy.memory.counters import MemoryCounters
from kvpolicy.memory.host_pool import HostPool
from kvpolicy.memory.layout import StoreLayout
from kvpolicy.memory.segments import Accepted
from kvpolicy.memory.step import StepMemory


@dataclass(frozen=True, slots=True)
class _New:
    """Completed entries of one store, all prompts together: row of the step, seat, entry; int64 [m].

    home: location in a full cache, for entries of such, else -1.
    """

    row: Tensor
    seat: Tensor
    entry: Tensor
    home: Tensor


class Committer:
    """Writes accepted rows through to the host and offers those of generations to the hot caches.

    stores: as decode kernels see them, one per store of the layout.
    """

    def __init__(
        self,
        host: HostPool,
        ops: MemoryOps,
        stores: Sequence[StoreMemory],
        counters: MemoryCounters,
        device: torch.device,
    ) -> None:
        self._host = host
        self._ops = ops
        self._stores = tuple(stores)
        self._counters = counters
        self._device = device

    def commit(
        self, step: StepMemory, accepted: Sequence[Accepted], rule: EvictionRule, evict: bool
    ) -> None:
        """All stores and pinned sets. evict: a new row may displace another from a hot cache."""
        prompts = [one for one in accepted if not one.segment.decode]
        for store in step.layout.stores:
            self._write_prompts(step, store, prompts)
            done = sum(len(one.entries(store)) for one in accepted)
            self._counters.device_to_host_bytes += done * (store.record.bytes + store.key.bytes)
        self._publish(step, [one for one in accepted if one.segment.decode], rule, evict)
        for one in accepted:
            self._commit_pinned(step, one)

    def _publish(
        self, step: StepMemory, accepted: Sequence[Accepted], rule: EvictionRule, evict: bool
    ) -> None:
        """Rows of generations, as a decode step publishes them: every row of the step is a piece, those
        that are not to be published are padding. A request is in a call once: its rows take turns."""
        for turn in range(max((one.count for one in accepted), default=0)):
            taken = [0] * step.rows
            for one in accepted:
                if turn < one.count:
                    taken[one.segment.start + turn] = 1
            numbers = upload([*taken, step.step], self._device)
            accept, number = numbers[:-1], numbers[-1:]
            seat = torch.where(accept > 0, step.numbers.seat, -1)
            rows = DecodeRows(seat, step.positions, number, accept > 0)
            for store in self._stores:
                self._ops.publish(store, rows, accept, rule, evict)

    def _write_prompts(
        self, step: StepMemory, store: StoreLayout, accepted: Sequence[Accepted]
    ) -> None:
        """Rows of prompts: to the host and into full caches; mapped ones wait for the prompt's end."""
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
        self._ops.arena_to_arena(tables.cache.records, flying, new.home)

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

    def _commit_pinned(self, step: StepMemory, one: Accepted) -> None:
        segment, count = one.segment, one.count
        for i, pinned in enumerate(step.layout.pinned):
            kept = min(count, pinned.rows)
            rows = torch.arange(count - kept, count, device=self._device) + segment.start
            records = step.tables.inflight_pinned[i].paged.get(rows)
            ring = (rows - segment.start + segment.position) % pinned.rows
            one.request.pinned[i].paged.put(ring, records)
