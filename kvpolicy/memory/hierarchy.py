"""The KV hierarchy of one engine: host pool, device arena, and the requests between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicy.errors import CapacityError, IntegrityError
from kvpolicy.kernels.eviction import RULES
from kvpolicy.memory import accounting
from kvpolicy.memory.accounting import Reserve
from kvpolicy.memory.arena import Arena, Table
from kvpolicy.memory.counters import MemoryCounters, RetrievalCounters
from kvpolicy.memory.host_pool import HostPool
from kvpolicy.memory.hot_cache import keep_order
from kvpolicy.memory.layout import Layout, StoreLayout
from kvpolicy.memory.request import RequestMemory
from kvpolicy.memory.rule import CacheRule
from kvpolicy.memory.segments import Segment, SharedTables
from kvpolicy.memory.step import StepMemory


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Device bytes by use, as really allocated (whole frames), and host bytes.

    required: staging + in-flight + index keys + slot maps + pinned + the hot floor.
    optional: hot rows beyond the floor, all that a controller can give or take.
    """

    staging: int
    in_flight: int
    index_keys: int
    slot_maps: int
    pinned: int
    hot_floor: int
    optional: int
    free: int
    host_used: int
    host_free: int

    @property
    def required(self) -> int:
        fixed = self.staging + self.in_flight + self.index_keys + self.slot_maps
        return fixed + self.pinned + self.hot_floor

    @property
    def used(self) -> int:
        return self.required + self.optional


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.2f}"


class Hierarchy:
    """Owns all KV memory. Requests are admitted, stepped, committed, resized and released here.

    device_bytes, host_bytes: capacity of the two tiers. reserve: staging and in-flight rows.
    floor_rows: hot rows per request and store that no budget goes below. poison: see Arena.
    """

    def __init__(
        self,
        layout: Layout,
        device_bytes: int,
        host_bytes: int,
        reserve: Reserve,
        floor_rows: int,
        rule: CacheRule,
        device: torch.device,
        poison: bool = False,
    ) -> None:
        if reserve.staging_rows < layout.topk:
            raise CapacityError(
                "device",
                f"staging_rows = {reserve.staging_rows}: must be at least top-k = {layout.topk}",
            )
        self.layout = layout
        self.reserve = reserve
        self.floor_rows = floor_rows
        self.rule = rule
        self.counters = MemoryCounters(RetrievalCounters(), RetrievalCounters())
        self._check_fixed(device_bytes)
        self.arena = Arena(device_bytes, layout.frame_bytes, device, poison)
        self.host = HostPool(host_bytes, layout, pinned=device.type == "cuda")
        self.requests: dict[int, RequestMemory] = {}
        self._tables = self._shared_tables()

    def _check_fixed(self, device_bytes: int) -> None:
        frames = accounting.staging_frames(self.layout, self.reserve)
        frames += accounting.inflight_frames(self.layout, self.reserve)
        if frames * self.layout.frame_bytes > device_bytes:
            raise CapacityError(
                "device",
                f"device_kv_mib = {_mib(device_bytes)}: staging ({self.reserve.staging_rows} rows) and "
                f"in-flight rows ({self.reserve.inflight_rows}) alone take "
                f"{_mib(frames * self.layout.frame_bytes)} MiB",
            )

    def _shared_tables(self) -> SharedTables:
        """Staging frames are shared by one table per store: only one of them is in use at a time."""
        owner = Table(self.arena, self.layout.stores[0].record, ("staging",))
        frames = accounting.staging_frames(self.layout, self.reserve)
        owner.resize(frames * owner.item.per_frame)
        staging = tuple(
            Table.sharing(owner, store.record, self.reserve.staging_rows)
            for store in self.layout.stores
        )
        flying: list[Table] = []
        records = [s.record for s in self.layout.stores] + [p.record for p in self.layout.pinned]
        for record in records:
            table = Table(self.arena, record, ("in-flight", len(flying)))
            table.resize(self.reserve.inflight_rows)
            flying.append(table)
        stores = len(self.layout.stores)
        return SharedTables(staging, tuple(flying[:stores]), tuple(flying[stores:]))

    # --- admission -------------------------------------------------------------------------------

    def frames_of(self, max_tokens: int, rows: Sequence[int]) -> int:
        """Frames a request takes with these hot rows per store (required part included)."""
        hot = accounting.hot_frames(self.layout, self.clamp(rows), max_tokens)
        return accounting.request_frames(self.layout, max_tokens) + hot

    def clamp(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Rows per store, not below the floor."""
        return tuple(max(wanted, self.floor_rows) for wanted in rows)

    def check_fits_alone(self, max_tokens: int, rows: Sequence[int]) -> None:
        """CapacityError naming the tier if a request could never run, even on an empty engine."""
        shared = accounting.staging_frames(self.layout, self.reserve)
        shared += accounting.inflight_frames(self.layout, self.reserve)
        have = self.arena.frames.num_frames - shared
        need = self.frames_of(max_tokens, rows)
        if need > have:
            size = self.layout.frame_bytes
            raise CapacityError(
                "device",
                f"a request of {max_tokens} tokens needs {_mib(need * size)} MiB; device_kv_mib = "
                f"{_mib(self.arena.frames.num_frames * size)} leaves {_mib(have * size)} MiB beside "
                "staging and in-flight rows",
            )
        host = accounting.host_bytes(self.layout, max_tokens)
        if host > self.host.extents.capacity:
            raise CapacityError(
                "host",
                f"a request of {max_tokens} tokens needs {_mib(host)} MiB, host_kv_mib = "
                f"{_mib(self.host.extents.capacity)}",
            )

    def admit(self, request_id: int, max_tokens: int, rows: Sequence[int]) -> None:
        """Reserve host, index, map and first hot rows for a request, all or nothing.

        Raises CapacityError (naming the tier) and changes nothing if it does not fit now.
        """
        if request_id in self.requests:
            raise ValueError(f"request {request_id} is admitted already")
        need = self.frames_of(max_tokens, rows)
        if need > self.arena.frames.free:
            raise CapacityError("device", f"{need} frames needed, {self.arena.frames.free} free")
        request = RequestMemory(
            request_id, max_tokens, self.layout, self.arena, self.host, RULES[self.rule.eviction]
        )
        self.requests[request_id] = request
        self._resize(request, self.clamp(rows))

    def release(self, request_id: int) -> None:
        """Free everything a request holds. Releasing twice is harmless."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            request.release()

    # --- one step --------------------------------------------------------------------------------

    def begin_step(self, segments: Sequence[Segment], step: int) -> StepMemory:
        """Open a step over the given segments (consecutive rows from 0)."""
        rows = segments[-1].stop if segments else 0
        if rows > self.reserve.inflight_rows:
            raise CapacityError(
                "device", f"{rows} rows in one step, {self.reserve.inflight_rows} reserved"
            )
        requests = [self.requests[segment.request_id] for segment in segments]
        return StepMemory(
            self.layout, self.arena, self._tables, requests, segments, step, self.counters
        )

    def commit(self, step: StepMemory, accepted: Sequence[int]) -> None:
        """Make the first ``accepted[i]`` rows of segment i durable and visible; drop the others.

        Write-through: rows reach the host first, then the hot cache.
        """
        for request, segment, count in zip(step.requests, step.segments, accepted, strict=True):
            if request.request_id not in self.requests:
                continue
            if segment.position != request.committed or not 0 <= count <= segment.count:
                raise IntegrityError(
                    f"commit of {count} rows at {segment.position} does not fit {segment}"
                )
            for store in self.layout.stores:
                self._commit_store(step, request, segment, store, count)
            self._commit_pinned(request, segment, count)
            request.committed += count
            if segment.last_prompt_row:
                self._seed(step, request, segment)

    def _commit_store(
        self,
        step: StepMemory,
        request: RequestMemory,
        segment: Segment,
        store: StoreLayout,
        count: int,
    ) -> None:
        per = store.store.tokens_per_entry
        first = request.committed_entries(store.index)
        last = store.store.entries(request.committed + count)
        if last == first:
            return
        entries = torch.arange(first, last, device=self.arena.device)
        rows = entries * per + per - 1 - segment.position + segment.start
        records = self._tables.inflight[store.index].paged.get(rows)
        keys = request.keys[store.index].paged.get(entries)
        request.region.rows[store.index][first:last] = records.cpu()
        request.region.keys[store.index][first:last] = keys.cpu()
        copied = (last - first) * (store.record.bytes + store.key.bytes)
        self.counters.device_to_host_bytes += copied
        hot = request.hot[store.index]
        if segment.decode or hot.full:
            hot.append(entries, records, step.step, evict=self.rule.admit_newest)

    def _commit_pinned(self, request: RequestMemory, segment: Segment, count: int) -> None:
        for i, pinned in enumerate(self.layout.pinned):
            kept = min(count, pinned.rows)
            rows = torch.arange(count - kept, count, device=self.arena.device) + segment.start
            records = self._tables.inflight_pinned[i].paged.get(rows)
            ring = (rows - segment.start + segment.position) % pinned.rows
            request.pinned[i].paged.put(ring, records)

    def _seed(self, step: StepMemory, request: RequestMemory, segment: Segment) -> None:
        """Fill mapped hot caches once the prompt is done. Depends on the last row only, not on chunks."""
        for store in self.layout.stores:
            hot = request.hot[store.index]
            committed = request.committed_entries(store.index)
            chosen = [
                step.selection(selector)[segment.stop - 1]
                for selector in self.layout.geometry.selectors_of(store.store.name)
            ]
            recent = torch.unique(torch.cat(chosen))
            recent = recent[recent >= 0]
            request.recent[store.index] = recent
            if hot.full or not hot.capacity:
                continue
            if self.rule.seed == "first":
                entries = torch.arange(min(hot.capacity, committed), device=self.arena.device)
            else:
                entries = keep_order(recent, committed, hot.capacity, self.arena.device)
            hot.seed(entries, self._fetch(request, store, entries), step.step)

    # --- budgets ---------------------------------------------------------------------------------

    def set_budgets(self, budgets: Mapping[int, Sequence[int]]) -> None:
        """Apply projected budgets: hot rows per store of each request.

        What gives frames back comes first; a smaller budget may take some (the metadata of a cache
        that was full), a larger one may give some (promotion drops metadata).
        CapacityError if they do not fit together (projection has to see to that); what was
        resized until then stays resized, and consistent.
        """
        changes: list[tuple[int, RequestMemory, StoreLayout, int]] = []
        taken_back = False
        for number, budget in budgets.items():
            if number not in self.requests:
                continue
            request = self.requests[number]
            for store, rows in zip(self.layout.stores, self.clamp(budget), strict=True):
                hot = request.hot[store.index]
                change = store.hot_frames(min(rows, hot.max_entries), rows >= hot.max_entries)
                change -= hot.num_frames
                changes.append((change, request, store, rows))
                taken_back |= change < 0 and rows < hot.capacity
        self.counters.release_steps += taken_back
        for _, request, store, rows in sorted(changes, key=lambda change: change[0]):
            self._resize_store(request, store, rows)

    def _resize(self, request: RequestMemory, rows: Sequence[int]) -> None:
        for store, wanted in zip(self.layout.stores, rows, strict=True):
            self._resize_store(request, store, wanted)

    def _resize_store(self, request: RequestMemory, store: StoreLayout, rows: int) -> None:
        def fetch(entries: Tensor) -> Tensor:
            return self._fetch(request, store, entries)

        committed = request.committed_entries(store.index)
        request.hot[store.index].resize(rows, committed, fetch, request.recent[store.index])

    def _fetch(self, request: RequestMemory, store: StoreLayout, entries: Tensor) -> Tensor:
        """Bulk copy from the host for seeding and promotion, counted apart from misses."""
        self.counters.moved_rows += entries.numel() * store.store.n_layers
        self.counters.moved_bytes += entries.numel() * store.record.bytes
        return request.region.rows[store.index][entries.cpu()].to(self.arena.device)

    def set_rule(self, rule: CacheRule) -> None:
        """Change how hot caches behave, from the next step on, for running requests too."""
        self.rule = rule
        for request in self.requests.values():
            for hot in request.hot:
                hot.rule = RULES[rule.eviction]

    # --- reports ---------------------------------------------------------------------------------

    def usage(self) -> MemoryUsage:
        """Where every allocated byte is."""
        frames: dict[str, int] = {}
        for owner, count in self.arena.frames.owners().items():
            kind = owner[0] if isinstance(owner, tuple) else str(owner)
            frames[kind] = frames.get(kind, 0) + count
        size = self.layout.frame_bytes
        floor = sum(self._floor_frames(request) for request in self.requests.values())
        return MemoryUsage(
            staging=frames.get("staging", 0) * size,
            in_flight=frames.get("in-flight", 0) * size,
            index_keys=frames.get("keys", 0) * size,
            slot_maps=frames.get("map", 0) * size,
            pinned=frames.get("pinned", 0) * size,
            hot_floor=floor * size,
            optional=(frames.get("hot", 0) - floor) * size,
            free=self.arena.frames.free * size,
            host_used=self.host.extents.used,
            host_free=self.host.extents.free,
        )

    def optional_bytes(self) -> int:
        """Bytes of hot rows beyond the floor."""
        hot = sum(cache.num_frames for request in self.requests.values() for cache in request.hot)
        floor = sum(self._floor_frames(request) for request in self.requests.values())
        return (hot - floor) * self.layout.frame_bytes

    def _floor_frames(self, request: RequestMemory) -> int:
        """Frames of the protected minimum. A full cache has no metadata, so it may hold fewer."""
        total = 0
        for store, hot in zip(self.layout.stores, request.hot, strict=True):
            rows = min(self.floor_rows, hot.max_entries)
            total += min(store.hot_frames(rows, rows >= hot.max_entries), hot.num_frames)
        return total

    def check_integrity(self) -> None:
        """IntegrityError unless both tiers, all tables and all copies agree."""
        self.arena.frames.check_integrity()
        self.host.extents.check_integrity()
        for request in self.requests.values():
            request.check_integrity()
        expected = accounting.staging_frames(self.layout, self.reserve)
        expected += accounting.inflight_frames(self.layout, self.reserve)
        for request in self.requests.values():
            rows = tuple(hot.capacity for hot in request.hot)
            expected += accounting.request_frames(self.layout, request.max_tokens)
            expected += accounting.hot_frames(self.layout, rows, request.max_tokens)
        if expected != self.arena.frames.used:
            raise IntegrityError(
                f"accounting says {expected} frames, {self.arena.frames.used} are used"
            )
