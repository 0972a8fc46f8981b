"""The memory of one request: its region of the host pool and its tables in the device arena."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.errors import CapacityError, IntegrityError
from kvpolicy.kernels.eviction import EvictionRule
from kvpolicy.memory.arena import Arena, Table
from kvpolicy.memory.counters import RetrievalCounters
from kvpolicy.memory.host_pool import HostPool
from kvpolicy.memory.hot_cache import HotCache
from kvpolicy.memory.layout import Layout


class RequestMemory:
    """Allocates everything a request needs for ``max_tokens`` tokens, or raises and takes nothing.

    committed: tokens whose rows are durable on the host. recent: per store, the entries that the
    last step selected. counters: decode retrieval of this request.
    """

    def __init__(
        self,
        request_id: int,
        max_tokens: int,
        layout: Layout,
        arena: Arena,
        host: HostPool,
        rule: EvictionRule,
    ) -> None:
        self.request_id = request_id
        self.max_tokens = max_tokens
        self.layout = layout
        self.committed = 0
        self.counters = RetrievalCounters()
        self.recent: list[Tensor | None] = [None] * len(layout.stores)
        self._recent_step = [-1] * len(layout.stores)
        self._host = host
        self.region = host.reserve(max_tokens)
        self.keys: list[Table] = []
        self.maps: list[Table] = []
        self.pinned: list[Table] = []
        self.hot: list[HotCache] = []
        try:
            self._allocate(arena, rule)
        except CapacityError:
            self.release()
            raise

    def _allocate(self, arena: Arena, rule: EvictionRule) -> None:
        for store in self.layout.stores:
            entries = store.store.entries(self.max_tokens)
            name = (self.request_id, store.store.name)
            for tables, item, kind in (
                (self.keys, store.key, "keys"),
                (self.maps, store.slot_map, "map"),
            ):
                table = Table(arena, item, (kind, *name))
                tables.append(table)
                table.resize(entries)
            self.hot.append(HotCache(arena, store, self.maps[-1], entries, rule, name))
        for pinned in self.layout.pinned:
            table = Table(arena, pinned.record, ("pinned", self.request_id, pinned.pinned.name))
            self.pinned.append(table)
            table.resize(pinned.rows)

    def committed_entries(self, store: int) -> int:
        """Entries of a store that are complete and durable."""
        return self.layout.stores[store].store.entries(self.committed)

    def note_selected(self, store: int, step: int, entries: Tensor) -> None:
        """Remember what a step selected of a store; all its selectors and waves together."""
        known = self.recent[store]
        if known is not None and self._recent_step[store] == step:
            entries = torch.unique(torch.cat([known, entries]))
        self.recent[store] = entries
        self._recent_step[store] = step

    def release(self) -> None:
        """Give everything back; a second call does nothing."""
        for hot in self.hot:
            hot.release()
        for table in (*self.keys, *self.maps, *self.pinned):
            table.resize(0)
        self.hot, self.keys, self.maps, self.pinned = [], [], [], []
        if self.region is not None:
            self._host.release(self.region)
            self.region = None  # type: ignore[assignment]

    def check_integrity(self) -> None:
        """Hot rows and index keys equal the host's copy; maps and slots mirror each other."""
        for i, hot in enumerate(self.hot):
            entries = self.committed_entries(i)
            hot.check_integrity(entries, self.region.rows[i])
            keys = self.keys[i].paged.prefix(entries).cpu()
            truth = self.region.keys[i][:entries]
            if not bool(((keys == truth) | (keys.isnan() & truth.isnan())).all()):
                raise IntegrityError(
                    f"request {self.request_id}: an index key differs from the host's"
                )
