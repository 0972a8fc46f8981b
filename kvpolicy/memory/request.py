"""The memory of one request: its region of the host pool and its tables in the device arena."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from kvpolicy.errors import IntegrityError
from kvpolicy.memory import accounting
from kvpolicy.memory.arena import Arena, Table
from kvpolicy.memory.host_pool import HostPool
from kvpolicy.memory.hot_cache import HotCache
from kvpolicy.memory.layout import Layout
from kvpolicy.memory.tables import SharedTables

# Device tables grow by room for this many tokens at a time, so that most steps need none.
GROWTH_TOKENS = 64
# Selections kept of a request that is followed, at most: 64 steps of four stores, 256 KiB at k = 128.
TRACE_LENGTH = 256
NOWHERE = -1

Selected = tuple[int, int, int, Tensor]
"""(store, step, committed tokens, chosen) of one decode row; all selectors of the store together."""
SelectionTrace = deque[Selected]


class RequestMemory:
    """A request's memory in both tiers: on the host from the start and to the end, for all its
    ``max_tokens``; on the device while it has a seat, for ``reserved`` tokens, growing.

    committed: tokens whose rows are durable on the host. ring: what its drafter keeps; ring_first: the
    first position that it has ever been given. seat: its place among the requests on the
    device, or NOWHERE. trace: its last selections, while somebody follows it (:meth:`follow`).
    Raises CapacityError (host) and takes nothing if the host has no room.
    """

    def __init__(self, request_id: int, max_tokens: int, layout: Layout, host: HostPool) -> None:
        self.request_id = request_id
        self.max_tokens = max_tokens
        self.layout = layout
        self.committed = 0
        self.reserved = 0
        self.seat = NOWHERE
        self._host = host
        self.region = host.reserve(max_tokens)
        self.keys: list[Table] = []
        self.maps: list[Table] = []
        self.pinned: list[Table] = []
        self.ring: Table | None = None
        self.ring_first = 0
        self.ring_saved = False
        self.hot: list[HotCache] = []
        self.saved_pinned: list[Tensor] = []
        self._tables: SharedTables | None = None
        self._saved_recent: list[Tensor] = []
        self.has_selected = False
        self.trace: SelectionTrace | None = None

    # --- the device part -------------------------------------------------------------------------

    def place(self, arena: Arena, tables: SharedTables, seat: int, tokens: int) -> None:
        """Take a seat, with room for ``tokens`` tokens and empty hot caches. The frames must be free."""
        self.seat, self.reserved, self._tables = seat, tokens, tables
        tables.requests[seat].fill_(self.request_id)
        for own, saved in zip(tables.stores, self._saved_recent, strict=False):
            own.recent[seat] = saved.to(own.recent.device)
        self._saved_recent = []
        self._allocate(arena, tables)

    def _allocate(self, arena: Arena, tables: SharedTables) -> None:
        seat = self.seat
        for own in tables.stores:
            store = own.layout
            room = store.store.entries(self.reserved)
            name = (self.request_id, store.store.name)
            keys = Table(arena, store.key, ("keys", *name), own.keys.frames[seat])
            maps = Table(arena, store.slot_map, ("map", *name), own.cache.map_frames[seat])
            self.keys.append(keys)
            self.maps.append(maps)
            keys.resize(room)
            maps.resize(room)
            most = store.store.entries(self.max_tokens)
            self.hot.append(HotCache(arena, own, seat, maps, room, most, name))
            at = store.index
            own.set_home(seat, self.region.row_base[at], self.region.key_base[at])
        for pinned in self.layout.pinned:
            table = Table(arena, pinned.record, ("pinned", self.request_id, pinned.pinned.name))
            self.pinned.append(table)
            table.resize(pinned.rows)
        if tables.rings is not None:
            frames = tables.rings.frames[seat]
            self.ring = Table(arena, tables.rings.layout.item, ("ring", self.request_id), frames)
            self.ring.resize(tables.rings.layout.items)
            tables.rings.start(seat, self.ring_first)

    def growth(self, tokens: int) -> int:
        """Frames that room for ``tokens`` tokens takes beyond what is held."""
        required = accounting.request_frames
        more = required(self.layout, tokens) - required(self.layout, self.reserved)
        for store, hot in zip(self.layout.stores, self.hot, strict=True):
            if hot.full:
                room = store.store.entries(tokens)
                more += store.hot_frames(room, True) - store.hot_frames(hot.room, True)
        return more

    def grow(self, tokens: int) -> None:
        """Room for ``tokens`` tokens. The frames must be free: see :meth:`growth`."""
        self.reserved = tokens
        for store, keys, maps, hot in zip(
            self.layout.stores, self.keys, self.maps, self.hot, strict=True
        ):
            room = store.store.entries(tokens)
            keys.resize(room)
            maps.resize(room)
            hot.grow(room)

    def leave(self) -> None:
        """Give up the seat and everything on the device; a second call does nothing."""
        for hot in self.hot:
            hot.release()
        for table in (*self.keys, *self.maps, *self.pinned, *((self.ring,) if self.ring else ())):
            table.resize(0)
        self.hot, self.keys, self.maps, self.pinned, self.ring = [], [], [], [], None
        self.seat, self.reserved = NOWHERE, 0

    def suspend(self) -> None:
        """Leave the device, with all that only the device had saved on the host."""
        self.saved_pinned = [table.paged.prefix(table.items).cpu() for table in self.pinned]
        if self.ring is not None and self.region.ring is not None:
            self.region.ring.copy_(self.ring.paged.prefix(self.ring.items))
            self.ring_saved = True
        assert self._tables is not None
        self._saved_recent = [own.recent[self.seat].cpu() for own in self._tables.stores]
        self.trace = None
        self.leave()

    def release(self) -> None:
        """Give everything back; a second call does nothing."""
        self.leave()
        if self.region is not None:
            self._host.release(self.region)
            self.region = None  # type: ignore[assignment]

    # --- what is known of it ---------------------------------------------------------------------

    def committed_entries(self, store: int) -> int:
        """Entries of a store that are complete and durable."""
        return self.layout.stores[store].store.entries(self.committed)

    def advance(self, tokens: int, step: int, decode: bool) -> None:
        """``tokens`` more are committed, whose last row has selected. Nothing waits for the device."""
        if decode and self.trace is not None and self._tables is not None:
            for own in self._tables.stores:
                chosen = own.recent[self.seat].clone()
                self.trace.append((own.layout.index, step, self.committed, chosen))
        self.committed += tokens
        self.has_selected = True

    def follow(self) -> None:
        """Keep the selections from now on in ``trace``, as many as TRACE_LENGTH."""
        self.trace = deque(maxlen=TRACE_LENGTH)

    def recent(self, store: int) -> Tensor | None:
        """Committed entries that the last row selected, ascending; None if nothing was selected."""
        if not self.has_selected or self._tables is None:
            return None
        entries: Tensor = torch.unique(self._tables.stores[store].recent[self.seat])
        return entries[(entries >= 0) & (entries < self.committed_entries(store))]

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
