"""The hierarchy's books without its rows: the same admissions, growth, budgets and misses, in numpy.

:class:`TwinMemory` answers what the control loop, the scheduler's residents and the metrics ask of
:class:`kvpolicy.memory.hierarchy.Hierarchy`, with the same numbers: frames by the accounting that the runtime
is held to, cuts by the runtime's own rule, misses by caches that equal its own. A test runs both.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvpolicy.errors import CapacityError, IntegrityError
from kvpolicy.memory import accounting
from kvpolicy.memory.accounting import Reserve
from kvpolicy.memory.counters import Counted
from kvpolicy.memory.cuts import Cut, Holding, cuts_for, cuts_of_full
from kvpolicy.memory.extents import ExtentAllocator
from kvpolicy.memory.layout import Layout, StoreLayout
from kvpolicy.memory.needs import Capacity, Needs
from kvpolicy.memory.rule import CacheRule
from kvpolicy.memory.usage import MemoryUsage, all_floors
from kvpolicy.recording.caches import keep_order, rule_named
from kvpolicy.twin.requests import TwinCounters, TwinFrames, TwinHot, TwinRequest
from kvpolicy.twin.slots import SlotPool
from kvpolicy.twin.streams import Assigned, Streams

__all__ = ["TwinMemory"]

Ints = NDArray[np.integer[Any]]


class TwinMemory(Needs):
    """Owns the books of all requests. Arguments as of ``Hierarchy``; streams: what requests select.
    most_tokens: longest request where streams are stretched.

    committed: tokens by seat, int64 [seats]. full: by lane (seat x stores + store), bool.
    """

    def __init__(
        self,
        layout: Layout,
        device_bytes: int,
        host_bytes: int,
        reserve: Reserve,
        floor_rows: int,
        rule: CacheRule,
        streams: Streams,
        most_tokens: int = 0,
    ) -> None:
        shared = accounting.check_fixed(layout, reserve, device_bytes)
        self.layout, self.reserve, self.floor_rows = layout, reserve, floor_rows
        self.rule, self.streams, self.unit = rule, streams, streams.unit
        self.arena = TwinFrames(device_bytes // layout.frame_bytes, layout.frame_bytes)
        self.frames = self.arena.frames
        self.frames.take(shared)
        self._shared = shared
        self._extents = ExtentAllocator(host_bytes)
        self.requests: dict[int, TwinRequest] = {}
        self.suspended: dict[int, TwinRequest] = {}
        seats, stores = reserve.seats, len(layout.stores)
        self._seats = list(range(seats))
        self.counters = TwinCounters(seats)
        self._per = np.array([s.store.tokens_per_entry for s in layout.stores]) * self.unit
        self._layers = np.array([s.store.n_layers for s in layout.stores])
        self._bytes = np.array([s.record.bytes for s in layout.stores]) * self.unit
        self._waves = _waves(layout)
        self._columns = [
            np.concatenate([columns[own == store.index] for own, columns in self._waves])
            for store in layout.stores
        ]
        units = max(streams.units, most_tokens // self.unit + 1)
        self.pool = SlotPool(rule_named(rule.eviction), seats * stores, units, units)
        self.committed = np.zeros(seats, dtype=np.int64)
        self.full = np.zeros(seats * stores, dtype=bool)

    @property
    def capacity(self) -> Capacity:
        return Capacity(self.frames.num_frames, self._shared, self._extents.capacity)

    # --- admission -------------------------------------------------------------------------------

    def replay(self, request_id: int, assigned: Assigned) -> None:
        """What a request that will be admitted selects."""
        self.counters.assigned[request_id] = assigned

    def admit(
        self,
        request_id: int,
        max_tokens: int,
        rows: Sequence[int],
        tokens: int | None = None,
        context: int = 0,
    ) -> None:
        """As ``Hierarchy.admit``: all or nothing, CapacityError if it does not fit now."""
        tokens = max_tokens if tokens is None else tokens
        need = self.frames_of(max_tokens, rows, tokens)
        if need > self.frames.free:
            raise CapacityError("device", f"{need} frames needed, {self.frames.free} free")
        if not self._seats:
            raise CapacityError("device", f"all {self.reserve.seats} seats are taken")
        request = self.suspended.pop(request_id, None)
        if request is None:
            extent = self._extents.allocate(accounting.host_bytes(self.layout, max_tokens))
            assigned = self.counters.assigned[request_id]
            request = TwinRequest(request_id, max_tokens, assigned, extent)
            request.committed = context
            self.counters.entered_tokens += context
        self._place(request, heapq.heappop(self._seats), tokens)
        for store, wanted in zip(self.layout.stores, self.clamp(rows), strict=True):
            self._resize(request, store, wanted)
        self._warm(request)

    def _place(self, request: TwinRequest, seat: int, tokens: int) -> None:
        request.seat, request.reserved = seat, tokens
        self.requests[request.request_id] = request
        self.committed[seat] = request.committed
        self.frames.take(accounting.request_frames(self.layout, tokens))
        for store in self.layout.stores:
            room, most = store.store.entries(tokens), store.store.entries(request.max_tokens)
            lane = seat * len(self.layout.stores) + store.index
            self.pool.start(lane)
            self.full[lane] = False
            request.hot.append(TwinHot(store, lane, room, most))
            key_bytes = store.store.entries(request.committed) * store.key.bytes
            self.counters.moved_bytes += key_bytes

    def _warm(self, request: TwinRequest) -> None:
        """A mapped cache of a request that comes back starts with its last selections."""
        for store, hot in zip(self.layout.stores, request.hot, strict=True):
            recent = self._recent(request, store)
            slots = hot.capacity // self.unit
            if recent is not None and slots and not hot.full:
                self._seed(hot, recent[max(recent.size - slots, 0) :], 0)

    def preempt(self, request_id: int) -> None:
        """Take a request off the device; the host keeps all of it."""
        request = self.requests.pop(request_id)
        self._leave(request)
        self.suspended[request_id] = request

    def release(self, request_id: int) -> None:
        """Free everything a request holds. Releasing twice is harmless."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            self._leave(request)
        else:
            request = self.suspended.pop(request_id, None)
        if request is not None:
            self._extents.release(request.extent)
        self.counters.assigned.pop(request_id, None)

    def _leave(self, request: TwinRequest) -> None:
        self.counters.retrieval.end(request.seat)
        for hot in request.hot:
            self.pool.clear(hot.lane)
            self.frames.give(hot.num_frames, hot=True)
        self.frames.give(accounting.request_frames(self.layout, request.reserved))
        heapq.heappush(self._seats, request.seat)
        request.leave()

    # --- growth ----------------------------------------------------------------------------------

    def grow(self, request_id: int, tokens: int) -> int:
        """Room for ``tokens`` tokens. Returns how many frames are missing: with any nothing changes."""
        request = self.requests[request_id]
        if tokens <= request.reserved:
            return 0
        missing = 0
        for room in (self.room_for(request.max_tokens, tokens), tokens):
            required, hot = self._growth(request, room)
            missing = required + hot - self.frames.free
            if missing <= 0:
                self.frames.take(required)
                self.frames.take(hot, hot=True)
                request.reserved = room
                for store, own in zip(self.layout.stores, request.hot, strict=True):
                    own.room = store.store.entries(room)
                return 0
        return missing

    def _growth(self, request: TwinRequest, tokens: int) -> tuple[int, int]:
        required = accounting.request_frames
        more = required(self.layout, tokens) - required(self.layout, request.reserved)
        hot = 0
        for store, own in zip(self.layout.stores, request.hot, strict=True):
            if own.full:
                hot += store.hot_frames(store.store.entries(tokens), True) - own.num_frames
        return more, hot

    def take_back(self, frames: int, keep: Sequence[float]) -> bool:
        """As ``Hierarchy.take_back``."""
        return self._cut(cuts_for(self._holdings(keep), frames))

    def leave_full(self) -> bool:
        """As ``Hierarchy.leave_full``."""
        return self._cut(cuts_of_full(self._holdings((0,) * len(self.layout.stores))))

    def _holdings(self, keep: Sequence[float]) -> list[Holding]:
        return [
            Holding(cast(Any, request), store, cast(Any, hot), max(rows, self.floor_rows))
            for request in self.requests.values()
            for store, hot, rows in zip(self.layout.stores, request.hot, keep, strict=True)
        ]

    def _cut(self, cuts: Sequence[Cut]) -> bool:
        self.counters.release_steps += bool(cuts)
        self.counters.forced_frames += sum(cut.holding.gain(cut.rows) for cut in cuts)
        for cut in cuts:
            self._resize(cast(TwinRequest, cut.holding.request), cut.holding.store, cut.rows)
        return bool(cuts)

    # --- budgets ---------------------------------------------------------------------------------

    def set_budgets(self, budgets: Mapping[int, Sequence[int]]) -> None:
        """Apply projected budgets, what gives frames back first. CapacityError if they do not fit."""
        changes: list[tuple[int, TwinRequest, StoreLayout, int]] = []
        taken_back = False
        for number, budget in budgets.items():
            request = self.requests.get(number)
            if request is None:
                continue
            for store, hot, wanted in zip(self.layout.stores, request.hot, budget, strict=True):
                rows = max(wanted, self.floor_rows)
                if rows == hot.capacity or (hot.full and rows >= hot.max_entries):
                    continue
                change = hot.frames_for(rows) - hot.num_frames
                changes.append((change, request, store, rows))
                taken_back |= change < 0 and rows < hot.capacity
        self.counters.release_steps += taken_back
        for _, request, store, rows in sorted(changes, key=lambda change: change[0]):
            self._resize(request, store, rows)

    def _resize(self, request: TwinRequest, store: StoreLayout, rows: int) -> None:
        """As ``Mover.resize`` and ``HotCache.resize``."""
        hot = request.hot[store.index]
        if rows == hot.capacity or (hot.full and rows >= hot.max_entries):
            return
        before = hot.num_frames
        if rows >= hot.max_entries:
            self.frames.require(hot.frames_for(rows) - before)
            self.pool.clear(hot.lane)
            hot.capacity, hot.full = hot.max_entries, True
            self._moved(store, store.store.entries(request.committed))
        elif hot.full:
            rows = self._leave_full(request, store, hot, rows)
        else:
            if rows > hot.capacity:
                self.frames.require(hot.frames_for(rows) - before)
            hot.capacity = rows
            self.pool.resize(hot.lane, rows // self.unit)
        self.full[hot.lane] = hot.full
        self.frames.take(hot.num_frames - before, hot=True)

    def _leave_full(self, request: TwinRequest, store: StoreLayout, hot: TwinHot, rows: int) -> int:
        allowed = self.frames.free + hot.num_frames
        while rows and store.hot_frames(rows, False) > allowed:
            rows = max(0, rows - store.record.per_frame)
        recent, slots = self._recent(request, store), rows // self.unit
        entries = keep_order(recent, self._units(request, store), slots)
        hot.capacity, hot.full = rows, False
        self.pool.leave_full(hot.lane, slots, entries, recent)
        return rows

    def _units(self, request: TwinRequest, store: StoreLayout) -> int:
        return int(request.committed // self._per[store.index])

    def _recent(self, request: TwinRequest, store: StoreLayout) -> Ints | None:
        """Committed units that the last row selected, ascending; None if nothing was selected."""
        if request.last_row < 0:
            return None
        return self.selected(request.last_row, store.index, self._units(request, store))

    def selected(self, row: int, store: int, committed: int) -> Ints:
        """Units below ``committed`` that a row of the streams selects of a store, ascending."""
        entries = self.streams.table[row, self._columns[store]]
        entries = entries[0] if len(entries) == 1 else np.unique(entries)
        return entries[(entries >= 0) & (entries < committed)]

    def _seed(self, hot: TwinHot, entries: Ints, step: int) -> None:
        self.pool.fill(hot.lane, entries, 2 * step)
        self._moved(hot.layout, entries.size * self.unit)

    def _moved(self, store: StoreLayout, entries: int) -> None:
        self.counters.moved_rows += entries * store.store.n_layers
        self.counters.moved_bytes += entries * store.record.bytes

    def set_rule(self, rule: CacheRule) -> None:
        """Change how hot caches behave, from the next step on."""
        self.rule = rule
        self.pool.rule = rule_named(rule.eviction)

    def stop_following(self) -> None:
        """As ``Hierarchy.stop_following``."""
        for request in self.requests.values():
            request.trace = None

    # --- a step ----------------------------------------------------------------------------------

    def prompt(self, request: TwinRequest, count: int, last: bool, step: int) -> int:
        """``count`` prompt rows are computed and committed; with the last one caches are seeded. Returns
        the layers of mapped caches, whose history came over the link."""
        request.committed += count
        self.committed[request.seat] = request.committed
        mapped = sum(
            s.store.n_layers
            for s, h in zip(self.layout.stores, request.hot, strict=True)
            if not h.full
        )
        if not last:
            return mapped
        request.last_row = request.assigned.seed
        for store, hot in zip(self.layout.stores, request.hot, strict=True):
            slots = hot.capacity // self.unit
            if hot.full or not slots:
                continue
            units = self._units(request, store)
            if self.rule.seed == "first":
                self._seed(hot, np.arange(min(slots, units)), step)
            else:
                self._seed(hot, keep_order(self._recent(request, store), units, slots), step)
        return mapped

    def decode(self, requests: Sequence[TwinRequest], step: int) -> tuple[int, int]:
        """One decode row of each: look up, fetch, commit. Returns the rows attended, per layer, and those
        of them that were looked up in mapped caches."""
        seats = np.array([request.seat for request in requests])
        rows = [request.next_row() for request in requests]
        stores = len(self.layout.stores)
        committed = self.committed[seats]
        chosen = self.streams.table[rows]
        padding = self.pool.entries
        fetched = np.zeros((len(requests), stores), dtype=np.int64)
        counted = np.zeros((len(requests), stores), dtype=np.int64)
        for own, columns in self._waves:
            wanted = chosen[:, columns] if len(columns) < chosen.shape[1] else chosen
            units = (committed[:, None] // self._per[own])[:, :, None]
            if self.streams.context is None:
                known = (wanted < units) & (wanted >= 0)
                valid = np.count_nonzero(known, axis=2)
                if valid.min() < wanted.shape[2]:
                    wanted = np.where(known, wanted, padding)
            else:  # all of a stretched row lies within the context
                valid = np.full(wanted.shape[:2], wanted.shape[2])
            lanes = (seats[:, None] * stores + own).ravel()
            mapped = np.flatnonzero(~self.full[lanes])
            if mapped.size:
                due = (step + lanes[mapped] // stores) % self.pool.rule.lazy == 0
                flat = wanted.reshape(lanes.size, -1)
                if mapped.size < lanes.size:
                    flat = flat[mapped]
                missed = np.zeros(lanes.size, dtype=np.int64)
                missed[mapped] = self.pool.resolve(lanes[mapped], flat, step, due)
                fetched[:, own] += missed.reshape(-1, len(own))
            counted[:, own] += valid
        self._commit(requests, seats, committed, step)
        moved = fetched @ self._bytes
        weight = self._layers * self.unit
        looked_up = counted * ~self.full[seats[:, None] * stores + np.arange(stores)]
        self.counters.retrieval.add(seats, counted @ weight, fetched @ weight, moved)
        return int((counted @ weight).sum()), int((looked_up @ weight).sum())

    def _commit(
        self, requests: Sequence[TwinRequest], seats: Ints, committed: Ints, step: int
    ) -> None:
        """The rows are durable; those that complete an entry are offered to mapped caches."""
        self.committed[seats] = committed + 1
        stores = len(self.layout.stores)
        whole = (committed[:, None] + 1) % self._per == 0
        lanes = seats[:, None] * stores + np.arange(stores)
        whole &= ~self.full[lanes]
        if whole.any():
            units = (committed[:, None] // self._per)[whole]
            self.pool.offer(lanes[whole], units, step, self.rule.admit_newest)
        for request in requests:
            if request.trace is not None:
                for store in range(stores):
                    request.trace.append((store, step, request.committed, request.last_row))
            request.committed += 1

    # --- reports ---------------------------------------------------------------------------------

    def _seats_taken(self) -> dict[int, int]:
        return {number: request.seat for number, request in self.requests.items()}

    def counted(self) -> Counted:
        """What retrieval did so far."""
        return self.counters.retrieval.read(self._seats_taken())

    def send_counts(self) -> None:
        """As ``Hierarchy.send_counts``: the next decision sees what has been counted until now."""
        self.counters.retrieval.sent = self.counted()

    def usage(self) -> MemoryUsage:
        """Where every byte is (index keys, maps and windows together as index keys)."""
        size = self.layout.frame_bytes
        floor = all_floors(cast(Any, self.requests.values()), self.floor_rows)
        fixed = self._shared
        return MemoryUsage(
            staging=fixed * size,
            in_flight=0,
            index_keys=(self.frames.used - self.frames.hot - fixed) * size,
            slot_maps=0,
            pinned=0,
            rings=0,
            hot_floor=floor * size,
            optional=(self.frames.hot - floor) * size,
            free=self.frames.free * size,
            host_used=self._extents.used,
            host_free=self._extents.free,
        )

    def optional_bytes(self) -> int:
        """Bytes of hot rows beyond the floor."""
        floor = all_floors(cast(Any, self.requests.values()), self.floor_rows)
        return (self.frames.hot - floor) * self.layout.frame_bytes

    def check_integrity(self) -> None:
        """IntegrityError unless frames, seats and caches agree."""
        self._extents.check_integrity()
        expected = self._shared
        for request in self.requests.values():
            rows = tuple(hot.capacity for hot in request.hot)
            expected += self.frames_of(request.max_tokens, rows, request.reserved)
            for hot in request.hot:
                slots = 0 if hot.full else hot.capacity // self.unit
                if self.pool.capacity[hot.lane] != slots or self.full[hot.lane] != hot.full:
                    raise IntegrityError(f"request {request.request_id}: lane {hot.lane} differs")
        if expected != self.frames.used:
            raise IntegrityError(f"accounting says {expected} frames, {self.frames.used} are used")
        seats = sorted([*self._seats, *(request.seat for request in self.requests.values())])
        if seats != list(range(self.reserve.seats)):
            raise IntegrityError(f"seats {seats} are not each free or taken once")
        self.pool.check_integrity()


def _waves(layout: Layout) -> list[tuple[Ints, Ints]]:
    """Selectors in calls: (stores, selectors) such that no call names a store twice, in the order in which
    the model asks."""
    names = [store.store.name for store in layout.stores]
    seen: dict[int, int] = {}
    waves: list[tuple[list[int], list[int]]] = []
    for column, selector in enumerate(layout.geometry.selectors):
        store = names.index(selector.store)
        turn = seen[store] = seen.get(store, -1) + 1
        if turn == len(waves):
            waves.append(([], []))
        waves[turn][0].append(store)
        waves[turn][1].append(column)
    return [(np.array(stores), np.array(columns)) for stores, columns in waves]
