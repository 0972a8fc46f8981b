"""The KV hierarchy of one engine: host pool, device arena, and the requests between them."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import torch

from kvpolicy.errors import CapacityError, IntegrityError
from kvpolicy.kernels.eviction import RULES
from kvpolicy.kernels.memory_ops import MemoryOps, memory_ops
from kvpolicy.memory import accounting
from kvpolicy.memory.accounting import Reserve
from kvpolicy.memory.arena import Arena
from kvpolicy.memory.calibration import calibrate
from kvpolicy.memory.commit import Committer
from kvpolicy.memory.counters import Counted, MemoryCounters
from kvpolicy.memory.cuts import Cut, Holding, cuts_for, cuts_of_full
from kvpolicy.memory.decode import DecodeInputs, DecodeStep
from kvpolicy.memory.host_pool import HostPool
from kvpolicy.memory.layout import Layout, StoreLayout
from kvpolicy.memory.mover import Mover
from kvpolicy.memory.needs import Capacity, Needs
from kvpolicy.memory.request import RequestMemory
from kvpolicy.memory.rule import CacheRule
from kvpolicy.memory.segments import Accepted, Segment
from kvpolicy.memory.step import StepMemory
from kvpolicy.memory.tables import SharedTables, make_tables
from kvpolicy.memory.usage import MemoryUsage, all_floors, measure
from kvpolicy.memory.verify import VerifyRows, VerifyStep


class Hierarchy(Needs):
    """Owns all KV memory. Requests are admitted, stepped, committed, resized, preempted and released
    here.

    device_bytes, host_bytes: capacity of the two tiers. reserve: staging, in-flight rows and seats.
    floor_rows: hot rows per request and store that no budget goes below. ops: the kernels, None for
    plain torch. poison: see Arena. link: how fast rows come from the host, None where that is not measured.
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
        ops: MemoryOps | None = None,
    ) -> None:
        self._shared = accounting.check_fixed(layout, reserve, device_bytes)
        self.layout = layout
        self.reserve = reserve
        self.floor_rows = floor_rows
        self.rule = rule
        self.ops = ops or memory_ops("reference")
        self.counters = MemoryCounters(reserve.seats, device)
        self.arena = Arena(device_bytes, layout.frame_bytes, device, poison)
        self.host = HostPool(host_bytes, layout, pinned=device.type == "cuda")
        self.link = calibrate(self.host.words, self.ops, device)
        self.requests: dict[int, RequestMemory] = {}
        self.suspended: dict[int, RequestMemory] = {}
        # Per store tokens of an entry, and bytes that the host gets of one.
        self._entry_bytes = [
            (s.store.tokens_per_entry, s.record.bytes + s.key.bytes) for s in layout.stores
        ]
        self._seats = list(range(reserve.seats))  # a heap: the lowest free seat first
        self._tables = make_tables(layout, self.arena, reserve, self.ops)
        counts = self.counters.retrieval.by_seat
        self._stores = self._tables.as_kernels_see_them(self.host, counts)
        self._mover = Mover(layout, self.host, self._tables, self.ops, self.counters, device)
        self._committer = Committer(self.host, self.ops, self._stores, self.counters, device)

    @property
    def tables(self) -> SharedTables:
        """The device tables of all seats."""
        return self._tables

    @property
    def capacity(self) -> Capacity:
        return Capacity(self.arena.frames.num_frames, self._shared, self.host.extents.capacity)

    # --- admission -------------------------------------------------------------------------------

    def admit(
        self,
        request_id: int,
        max_tokens: int,
        rows: Sequence[int],
        tokens: int | None = None,
        context: int = 0,
    ) -> None:
        """Reserve host memory for ``max_tokens``, and a seat with index, map and first hot rows for
        ``tokens`` tokens (None: all of them); all or nothing. A preempted request comes back with
        everything it had committed; a new one with ``context`` tokens that nobody computed, see
        :meth:`Mover.invent`.

        Raises CapacityError (naming the tier) and changes nothing if it does not fit now.
        """
        if request_id in self.requests:
            raise ValueError(f"request {request_id} is admitted already")
        tokens = max_tokens if tokens is None else tokens
        need = self.frames_of(max_tokens, rows, tokens)
        if need > self.arena.frames.free:
            raise CapacityError("device", f"{need} frames needed, {self.arena.frames.free} free")
        if not self._seats:
            raise CapacityError("device", f"all {self.reserve.seats} seats are taken")
        request = self.suspended.pop(request_id, None)
        if request is None:
            request = RequestMemory(request_id, max_tokens, self.layout, self.host)
            self._mover.invent(request, context)
        request.place(self.arena, self._tables, heapq.heappop(self._seats), tokens)
        self.requests[request_id] = request
        self._mover.restore(request)
        for store, wanted in zip(self.layout.stores, self.clamp(rows), strict=True):
            self._mover.resize(request, store, wanted)
        self._mover.warm(request)

    def preempt(self, request_id: int) -> None:
        """Take a request off the device; the host keeps all of it until it is admitted again."""
        request = self.requests.pop(request_id)
        self._leave(request)
        request.suspend()
        self.suspended[request_id] = request

    def release(self, request_id: int) -> None:
        """Free everything a request holds. Releasing twice is harmless."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            self._leave(request)
            request.release()
        suspended = self.suspended.pop(request_id, None)
        if suspended is not None:
            suspended.release()

    def _leave(self, request: RequestMemory) -> None:
        self.counters.retrieval.end(request.seat)
        heapq.heappush(self._seats, request.seat)

    # --- growth ----------------------------------------------------------------------------------

    def grow(self, request_id: int, tokens: int) -> int:
        """Room for ``tokens`` tokens of a request. Returns how many frames are missing: with any
        missing nothing changes."""
        request = self.requests[request_id]
        if tokens <= request.reserved:
            return 0
        for room in (self.room_for(request.max_tokens, tokens), tokens):
            missing = request.growth(room) - self.arena.frames.free
            if missing <= 0:
                request.grow(room)
                return 0
        return missing

    def take_back(self, frames: int, keep: Sequence[float]) -> bool:
        """Free at least ``frames`` frames of optional rows, from all requests in proportion, leaving
        each at least ``keep`` rows per store. False, and no change, if there are not so many."""
        return self._cut(cuts_for(self._holdings(keep), frames))

    def leave_full(self) -> bool:
        """Full caches go to the floor where that takes no more frames, so that growth needs fewer.
        False, and no change, if there is none."""
        return self._cut(cuts_of_full(self._holdings((0,) * len(self.layout.stores))))

    def _holdings(self, keep: Sequence[float]) -> list[Holding]:
        return [
            Holding(request, store, request.hot[store.index], max(rows, self.floor_rows))
            for request in self.requests.values()
            for store, rows in zip(self.layout.stores, keep, strict=True)
        ]

    def _cut(self, cuts: Sequence[Cut]) -> bool:
        self.counters.release_steps += bool(cuts)
        self.counters.forced_frames += sum(cut.holding.gain(cut.rows) for cut in cuts)
        for cut in cuts:
            self._mover.resize(cut.holding.request, cut.holding.store, cut.rows)
        return bool(cuts)

    # --- one step --------------------------------------------------------------------------------

    def begin_step(self, segments: Sequence[Segment], step: int) -> StepMemory:
        """Open a step over the given segments (consecutive rows from 0). Every request must have
        room for its rows: see :meth:`grow`."""
        rows = segments[-1].stop if segments else 0
        if rows > self.reserve.inflight_rows:
            raise CapacityError(
                "device", f"{rows} rows in one step, {self.reserve.inflight_rows} reserved"
            )
        requests = [self.requests[segment.request_id] for segment in segments]
        for request, segment in zip(requests, segments, strict=True):
            if segment.position + segment.count > request.reserved:
                raise IntegrityError(f"{segment} exceeds the room for {request.reserved} tokens")
        return StepMemory(
            self.layout,
            self._tables,
            self.host,
            self.ops,
            RULES[self.rule.eviction],
            requests,
            segments,
            step,
            self.counters,
            self.arena.device,
        )

    def commit(self, step: StepMemory, accepted: Sequence[int]) -> None:
        """Make the first ``accepted[i]`` rows of segment i durable and visible; drop the others.

        Write-through: rows reach the host first, then the hot cache.
        """
        kept: list[Accepted] = []
        for request, segment, count in zip(step.requests, step.segments, accepted, strict=True):
            if self.requests.get(request.request_id) is not request:
                continue
            if segment.position != request.committed or not 0 <= count <= segment.count:
                raise IntegrityError(
                    f"commit of {count} rows at {segment.position} does not fit {segment}"
                )
            kept.append(Accepted(request, segment, count))
        rule = RULES[self.rule.eviction]
        if self.rule.admission == "accepted":
            step.demote(self._stores, kept)
        self._committer.commit(step, kept, rule, self.rule.admit_newest)
        step.note_accepted(accepted)
        for one in kept:
            one.request.advance(one.count, step.step, one.segment.decode)
            if one.segment.last_prompt_row:
                self._mover.seed(one.request, step.step, self.rule.seed)

    # --- one step of plain decoding --------------------------------------------------------------

    def decodes_at_once(self, rows: int) -> bool:
        """Whether staging holds all that ``rows`` rows of plain decoding can miss."""
        return rows * self.layout.topk <= self.reserve.staging_rows

    def decode_step(
        self, inputs: DecodeInputs, most_tokens: int, segments: Sequence[Segment] = ()
    ) -> DecodeStep:
        """A step of one row per request; see DecodeStep. Nothing is read or written before it is used."""
        return DecodeStep(
            self.layout,
            self._tables,
            self._stores,
            self.ops,
            RULES[self.rule.eviction],
            self.rule.admit_newest,
            inputs,
            most_tokens,
            segments,
        )

    def verify_step(self, rows: VerifyRows, most_tokens: int) -> VerifyStep:
        """A step of some rows per request; see VerifyStep."""
        return VerifyStep(
            self.layout,
            self._tables,
            self._stores,
            self.ops,
            RULES[self.rule.eviction],
            self.rule.admit_newest,
            rows,
            most_tokens,
            self.rule.admission,
        )

    def decoding(self, request_id: int, rows: int = 1) -> RequestMemory:
        """A request that may decode so many more rows: IntegrityError without room for them."""
        request = self.requests[request_id]
        if request.committed + rows > request.reserved:
            raise IntegrityError(
                f"request {request_id} has no room beyond {request.reserved} tokens"
            )
        return request

    def advance(
        self, requests: Sequence[RequestMemory], step: int, rows: Sequence[int] | None = None
    ) -> None:
        """Each of these requests has committed one row in a decode step, or as many as ``rows`` says."""
        rows = rows or [1] * len(requests)
        for per, size in self._entry_bytes:
            if per == 1:
                done = sum(rows)
            else:
                both = zip(requests, rows, strict=True)
                done = sum((r.committed + n) // per - r.committed // per for r, n in both)
            self.counters.device_to_host_bytes += done * size
        for request, count in zip(requests, rows, strict=True):
            request.advance(count, step, decode=True)

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
            budget = self.clamp(budget)
            if budget == tuple(hot.capacity for hot in request.hot):
                continue
            for store, rows in zip(self.layout.stores, budget, strict=True):
                hot = request.hot[store.index]
                change = hot.frames_for(rows) - hot.num_frames
                changes.append((change, request, store, rows))
                taken_back |= change < 0 and rows < hot.capacity
        self.counters.release_steps += taken_back
        for _, request, store, rows in sorted(changes, key=lambda change: change[0]):
            self._mover.resize(request, store, rows)

    def set_rule(self, rule: CacheRule) -> None:
        """Change how hot caches behave, from the next step on, for running requests too."""
        self.rule = rule

    def stop_following(self) -> None:
        """Drop the selections kept for whoever followed a request: a swap may leave nobody who does."""
        for request in self.requests.values():
            request.trace = None

    def close(self) -> None:
        """Free both tiers, once nothing runs and every request is released; counters and books stay
        readable. A second call does nothing."""
        for name in (
            "_tables",
            "_stores",
            "_mover",
            "_committer",
        ):  # all that has views of the buffers
            self.__dict__.pop(name, None)
        self.arena.close()
        self.host.close()

    # --- counters --------------------------------------------------------------------------------

    def _seats_taken(self) -> dict[int, int]:
        return {number: request.seat for number, request in self.requests.items()}

    def counted(self) -> Counted:
        """What retrieval did so far; waits for the device."""
        return self.counters.retrieval.read(self._seats_taken())

    def send_counts(self) -> None:
        """Have it counted up to the work launched so far, for :meth:`RetrievalCounts.received`."""
        self.counters.retrieval.send(self._seats_taken())

    # --- reports ---------------------------------------------------------------------------------

    def usage(self) -> MemoryUsage:
        """Where every allocated byte is."""
        return measure(self.layout, self.arena, self.host, self.requests.values(), self.floor_rows)

    def optional_bytes(self) -> int:
        """Bytes of hot rows beyond the floor."""
        floor = all_floors(self.requests.values(), self.floor_rows)
        return (self.arena.frames.held_for("hot") - floor) * self.layout.frame_bytes

    def check_integrity(self) -> None:
        """IntegrityError unless both tiers, all tables and all copies agree."""
        if self.arena.device.type == "cuda":
            torch.cuda.synchronize()  # rows are written to the host by kernels
        self.arena.frames.check_integrity()
        self.host.extents.check_integrity()
        expected = self._shared
        for request in self.requests.values():
            request.check_integrity()
            rows = tuple(hot.capacity for hot in request.hot)
            expected += self.frames_of(request.max_tokens, rows, request.reserved)
        if expected != self.arena.frames.used:
            raise IntegrityError(
                f"accounting says {expected} frames, {self.arena.frames.used} are used"
            )
        seats = sorted([*self._seats, *(request.seat for request in self.requests.values())])
        if seats != list(range(self.reserve.seats)):
            raise IntegrityError(f"seats {seats} are not each free or taken once")
