"""Device tables of all seats: from a seat to its rows, slots, keys and its place in the host pool.

A *seat* is a place among the requests on the device; kernels that serve many requests at once find
each by its seat. A seat's tables are written when its request is admitted, grows or is resized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicy.geometry.geometry import Selector
from kvpolicy.kernels.indexer import KeyPages
from kvpolicy.kernels.memory_ops import MemoryOps, memory_ops
from kvpolicy.kernels.resolve import CacheTables
from kvpolicy.kernels.retrieve import StoreMemory
from kvpolicy.memory.accounting import Reserve, staging_frames
from kvpolicy.memory.arena import Arena, Table
from kvpolicy.memory.draft_ring import DraftRings
from kvpolicy.memory.host_pool import HostPool
from kvpolicy.memory.layout import Item, Layout, StoreLayout


class StoreTables:
    """One store. cache: rows, maps and metadata. keys: pages of index keys, a row per seat.
    row_base, key_base: int64 [seats], where a seat's records and keys begin in the host pool, in
    words. recent: int64 [seats + 1, selectors, k], what each selector chose for a seat's last row, -1
    after the last one; the last row of the table is nobody's."""

    def __init__(
        self,
        arena: Arena,
        layout: StoreLayout,
        seats: int,
        max_tokens: int,
        selectors: Sequence[Selector] = (),
        ops: MemoryOps | None = None,
    ) -> None:
        entries = layout.store.entries(max_tokens)
        device = arena.device

        def block(item: Item) -> Tensor:
            width = min(item.frames(entries), arena.frames.num_frames)
            return torch.zeros((seats, max(width, 1)), dtype=torch.int64, device=device)

        def per_seat(dtype: torch.dtype) -> Tensor:
            return torch.zeros(seats, dtype=dtype, device=device)

        self.layout = layout
        self.ops = ops or memory_ops("reference")
        self.cache = CacheTables(
            records=arena.view(layout.record),
            maps=arena.view(layout.slot_map),
            meta=arena.view(layout.meta),
            row_frames=block(layout.record),
            map_frames=block(layout.slot_map),
            meta_frames=block(layout.meta),
            capacity=per_seat(torch.int32),
            full=per_seat(torch.bool),
            used=per_seat(torch.int32),
            hand=per_seat(torch.int32),
            draws=per_seat(torch.int32),
            age=per_seat(torch.int32),
        )
        self.keys = KeyPages(arena.view(layout.key), block(layout.key))
        self.selectors = tuple(selector.name for selector in selectors)
        widest = max((selector.topk for selector in selectors), default=0)
        shape = (seats + 1, len(selectors), widest)
        self.recent = torch.full(shape, -1, dtype=torch.int64, device=device)
        self.row_base = per_seat(torch.int64)
        self.key_base = per_seat(torch.int64)

    def set_form(self, seat: int, capacity: int, full: bool) -> None:
        """Tell kernels how many slots a seat's cache has, and whether it is the identity."""
        # Not by assignment: that copies a number from the host, and waits for the device.
        self.cache.capacity[seat].fill_(capacity)
        self.cache.full[seat].fill_(full)

    def set_home(self, seat: int, row_base: int, key_base: int) -> None:
        """Tell kernels where a seat's records and keys are on the host."""
        self.row_base[seat].fill_(row_base)
        self.key_base[seat].fill_(key_base)

    def as_kernels_see_it(
        self, host: HostPool, staging: Table, inflight: Table, counts: Tensor
    ) -> StoreMemory:
        """For kernels that retrieve and publish. counts: int64 [>= seats, COUNTERS]."""
        return StoreMemory(
            cache=self.cache,
            keys=self.keys.view,
            key_frames=self.keys.frames,
            host=host.words,
            row_base=self.row_base,
            key_base=self.key_base,
            staging=staging.paged.frames,
            staging_rows=staging.items,
            inflight=inflight.paged.frames,
            counts=counts,
            arrivals=torch.zeros(
                self.row_base.shape[0] + 2, dtype=torch.int64, device=self.row_base.device
            ),
            layers=self.layout.store.n_layers,
            tokens_per_entry=self.layout.store.tokens_per_entry,
        )

    def note_selected(self, selector: Selector, seats: Tensor, chosen: Tensor) -> None:
        """Remember selections. seats: int64 [n], distinct or -1 (nobody's); chosen: int64 [n, k]."""
        self.recent[seats, self.selectors.index(selector.name), : chosen.shape[1]] = chosen

    def host_row(self, seat: Tensor, entry: Tensor) -> Tensor:
        """Word offsets of records in the host pool; shapes broadcast."""
        return self.row_base[seat] + entry * self.layout.record.words

    def host_key(self, seat: Tensor, entry: Tensor) -> Tensor:
        """Word offsets of index keys in the host pool; shapes broadcast."""
        return self.key_base[seat] + entry * self.layout.key.words

    def key_location(self, seat: Tensor, entry: Tensor) -> Tensor:
        """Arena locations of index keys; seat and entry have equal shapes."""
        per = self.layout.key.per_frame
        return self.keys.frames[seat, entry // per] * per + entry % per

    def row_location(self, seat: Tensor, entry: Tensor) -> Tensor:
        """Arena locations of entries in full caches; seat and entry have equal shapes."""
        per = self.layout.record.per_frame
        return self.cache.row_frames[seat, entry // per] * per + entry % per


@dataclass(frozen=True, slots=True)
class SharedTables:
    """Frames that every step uses in turn: staging, and in-flight rows per store and pinned set.
    stores: the tables of all seats. requests: int64 [seats + 1], who sits there; the last is nobody.
    rings: the draft rings of all seats, None where nobody drafts."""

    staging: tuple[Table, ...]
    inflight: tuple[Table, ...]
    inflight_pinned: tuple[Table, ...]
    stores: tuple[StoreTables, ...]
    requests: Tensor
    rings: DraftRings | None = None

    def as_kernels_see_them(self, host: HostPool, counts: Tensor) -> tuple[StoreMemory, ...]:
        """All stores; see :meth:`StoreTables.as_kernels_see_it`."""
        own = zip(self.stores, self.staging, self.inflight, strict=True)
        return tuple(
            store.as_kernels_see_it(host, staging, inflight, counts)
            for store, staging, inflight in own
        )


def make_tables(layout: Layout, arena: Arena, reserve: Reserve, ops: MemoryOps) -> SharedTables:
    """Allocate what all steps share. Staging frames serve one table per store: only one of them is
    in use at a time."""
    seats = reserve.seats
    owner = Table(arena, layout.stores[0].record, ("staging",))
    owner.resize(staging_frames(layout, reserve) * owner.item.per_frame)
    staging = tuple(
        Table.sharing(owner, store.record, reserve.staging_rows) for store in layout.stores
    )
    flying: list[Table] = []
    records = [s.record for s in layout.stores] + [p.record for p in layout.pinned]
    for record in records:
        table = Table(arena, record, ("in-flight", len(flying)))
        table.resize(reserve.inflight_rows)
        flying.append(table)
    count, most = len(layout.stores), layout.geometry.max_context
    stores = tuple(
        StoreTables(arena, store, seats, most, layout.geometry.selectors_of(store.store.name), ops)
        for store in layout.stores
    )
    requests = torch.zeros(seats + 1, dtype=torch.int64, device=arena.device)
    rings = DraftRings(arena, layout.ring, seats, ops) if layout.ring else None
    return SharedTables(
        staging, tuple(flying[:count]), tuple(flying[count:]), stores, requests, rings
    )
