"""Bulk copies from the host besides retrieval: a request comes back, a cache is filled or becomes full."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.kernels.memory_ops import MemoryOps
from kvpolicy.memory.counters import MemoryCounters
from kvpolicy.memory.dummy_context import DummyContexts
from kvpolicy.memory.host_pool import HostPool
from kvpolicy.memory.hot_cache import Load, keep_order
from kvpolicy.memory.layout import Layout, StoreLayout
from kvpolicy.memory.request import RequestMemory
from kvpolicy.memory.rule import Seed
from kvpolicy.memory.tables import SharedTables


class Mover:
    """Fills caches and tables of requests from the host, and counts it apart from misses."""

    def __init__(
        self,
        layout: Layout,
        host: HostPool,
        tables: SharedTables,
        ops: MemoryOps,
        counters: MemoryCounters,
        device: torch.device,
    ) -> None:
        self._layout, self._host, self._tables = layout, host, tables
        self._ops, self._counters, self._device = ops, counters, device
        self._contexts = DummyContexts(layout)

    def invent(self, request: RequestMemory, tokens: int) -> None:
        """Give a new request a history of so many tokens that nobody computed (see DummyContexts)."""
        if not tokens:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # a step that is still running may write to who was there before
        self._contexts.fill(request.region, tokens, request.request_id)
        request.committed = request.ring_first = tokens

    def restore(self, request: RequestMemory) -> None:
        """Bring to the device what a request with a history needs there besides hot rows."""
        for store in self._layout.stores:
            entries = torch.arange(request.committed_entries(store.index), device=self._device)
            if not entries.numel():
                continue
            tables = self._tables.stores[store.index]
            seats = torch.full_like(entries, request.seat)
            self._ops.host_to_arena(
                self._host.words,
                tables.host_key(seats, entries),
                tables.keys.view,
                tables.key_location(seats, entries),
            )
            self._counters.moved_bytes += entries.numel() * store.key.bytes
        for table, saved in zip(request.pinned, request.saved_pinned, strict=False):
            every = torch.arange(table.items, device=self._device)
            table.paged.put(every, saved.to(self._device))
        request.saved_pinned = []
        ring = request.region.ring
        if request.ring is not None and ring is not None and request.ring_saved:
            every = torch.arange(request.ring.items, device=self._device)
            request.ring.paged.put(every, ring.to(self._device))
            self._counters.moved_bytes += ring.nbytes
            request.ring_saved = False

    def warm(self, request: RequestMemory) -> None:
        """A mapped cache of a request that comes back starts with its last selections."""
        for store in self._layout.stores:
            hot, recent = request.hot[store.index], request.recent(store.index)
            if recent is not None and hot.capacity and not hot.full:
                entries = recent.to(self._device)[-hot.capacity :]
                hot.seed(entries, self._loader(request, store), step=0)

    def seed(self, request: RequestMemory, step: int, how: Seed) -> None:
        """Fill mapped hot caches once the prompt is done. Depends on the last row only, not on chunks."""
        for store in self._layout.stores:
            hot = request.hot[store.index]
            if hot.full or not hot.capacity:
                continue
            committed = request.committed_entries(store.index)
            if how == "first":
                entries = torch.arange(min(hot.capacity, committed), device=self._device)
            else:
                recent = request.recent(store.index)
                entries = keep_order(recent, committed, hot.capacity, self._device)
            hot.seed(entries, self._loader(request, store), step)

    def resize(self, request: RequestMemory, store: StoreLayout, rows: int) -> None:
        """Another number of hot rows in one store; what a cache grows by to become full is copied."""
        hot = request.hot[store.index]
        if rows == hot.capacity or (hot.full and rows >= hot.max_entries):
            return
        recent = request.recent(store.index) if hot.full else None
        if recent is not None:
            recent = recent.to(self._device)
        committed = request.committed_entries(store.index)
        hot.resize(rows, committed, self._loader(request, store), recent)

    def _loader(self, request: RequestMemory, store: StoreLayout) -> Load:
        """Bulk copies from the host for seeding and promotion, counted apart from misses."""
        tables = self._tables.stores[store.index]

        def load(entries: Tensor, locations: Tensor) -> None:
            self._counters.moved_rows += entries.numel() * store.store.n_layers
            self._counters.moved_bytes += entries.numel() * store.record.bytes
            home = tables.host_row(torch.full_like(entries, request.seat), entries)
            self._ops.host_to_arena(self._host.words, home, tables.cache.records, locations)

        return load
