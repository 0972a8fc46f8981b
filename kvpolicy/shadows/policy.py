"""One controller in the shadow of another: its decisions, its caches, what it would have fetched."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvpolicy.config import EngineConfig
from kvpolicy.control.observation import MissCurve, Observation, RequestView
from kvpolicy.controllers.base import wants_curves
from kvpolicy.controllers.registry import ControllerLike
from kvpolicy.engine.parts import make_control
from kvpolicy.memory.cuts import Cut, Holding, cuts_for
from kvpolicy.memory.layout import Layout
from kvpolicy.recording.caches import rule_named
from kvpolicy.recording.lanes import Entries
from kvpolicy.shadows.events import Decided, Joined, Stepped, Work
from kvpolicy.shadows.holding import Count, ShadowRequest

__all__ = ["ShadowPolicy", "Totals"]


@dataclass(slots=True)
class Totals:
    """Since the start. fetched_rows: for attention while decoding; promoted_rows: because a cache came to
    hold everything. moved_bytes: copied for other reasons than attention.

    shortages: times that growing contexts took rows back. squeezed: admissions for which the shadow
    had no room. early: steps in which a request waited though the shadow had room for it.
    """

    unique_rows: int = 0
    fetched_rows: int = 0
    promoted_rows: int = 0
    host_to_device_bytes: int = 0
    moved_bytes: int = 0
    shortages: int = 0
    squeezed: int = 0
    early: int = 0


class ShadowPolicy:
    """Goes through the events of an engine with caches and decisions of its own.

    spec: of the controller. config: of the engine it stands beside. UserError for a controller that
    cannot be had, or whose eviction rule has no form on arrays (a plug-in's).
    """

    def __init__(self, spec: ControllerLike, config: EngineConfig, layout: Layout) -> None:
        self.spec = spec
        self.name = spec if isinstance(spec, str) else type(spec).__name__
        own = config.model_copy(update={"controller": spec, "decision_log": None})
        self.control = make_control(own, layout)
        self.rule = rule_named(self.control.rule.eviction)
        self.wants_curves = wants_curves(self.control.controller)
        self.totals = Totals()
        self.seconds = 0.0
        self._layout, self._floor = layout, config.floor_rows
        self._requests: dict[int, ShadowRequest] = {}
        self._saved: dict[int, list[Entries]] = {}
        self._room = 0
        self._asked = Totals()
        self._steps = self._frame_steps = 0

    # --- memory ----------------------------------------------------------------------------------

    @property
    def frames(self) -> int:
        """Frames of all its hot caches."""
        return sum(request.num_frames for request in self._requests.values())

    @property
    def optional_bytes(self) -> int:
        """Bytes of hot rows beyond the floor, now."""
        return (self.frames - self._floors()) * self._layout.frame_bytes

    def _floors(self) -> int:
        if not self._floor:
            return 0
        return sum(request.floor_frames(self._floor) for request in self._requests.values())

    def _sync(self, event: Decided | Stepped) -> None:
        """Who is on the device, with how much room, is as the engine found it."""
        self._room = event.room
        self.keep(event.running, event.alive)
        for joined in event.joined:
            self._join(joined)
        for number, tokens in event.running.items():
            self._requests[number].grow(tokens)

    def keep(self, running: Collection[int], alive: Collection[int]) -> None:
        """Only these are on the device still. alive: of all that have not ended, who may come back."""
        for gone in [number for number in self._requests if number not in running]:
            request = self._requests.pop(gone)
            if gone in alive:
                self._saved[gone] = [cache.recent for cache in request.hot]
        for past in [number for number in self._saved if number not in alive]:
            del self._saved[past]

    def _join(self, joined: Joined) -> None:
        saved = self._saved.pop(joined.request_id, [])
        request = ShadowRequest(self._layout, self.rule, joined.max_tokens, joined.seat, saved)
        request.committed = joined.committed
        request.grow(joined.reserved)
        most = tuple(cache.max_entries for cache in request.hot)
        for store, rows in enumerate(self.control.initial_rows(most)):
            cache, committed = request.hot[store], request.entries(store)
            moved = cache.come_back(max(rows, self._floor), committed, joined.seat)
            self.totals.moved_bytes += moved * cache.store.record.bytes
            if cache.full and joined.decoding:
                self.totals.promoted_rows += moved * cache.store.store.n_layers
        self._requests[joined.request_id] = request
        self.totals.squeezed += self.frames > self._room

    def _fit(self) -> None:
        """Contexts have grown: what does not fit is taken back, as ``Residents.grow`` does it."""
        missing = self.frames - self._room
        if missing <= 0:
            return
        self.totals.shortages += 1
        for keep in (self.control.promised, (0.0,) * len(self._layout.stores)):
            if cuts := self._cuts(keep, missing):
                for cut in cuts:
                    request, cache = self._owner(cut)
                    index = cache.store.index
                    cache.resize(cut.rows, request.entries(index), self._room - self.frames)
                return

    def _cuts(self, keep: Sequence[float], missing: int) -> list[Cut]:
        holdings = [
            Holding(request, store, cache, max(rows, self._floor))  # type: ignore[arg-type]
            for request in self._requests.values()
            for store, cache, rows in zip(self._layout.stores, request.hot, keep, strict=True)
        ]
        return cuts_for(holdings, missing)

    def _owner(self, cut: Cut) -> Any:
        return cut.holding.request, cut.holding.hot

    # --- decisions -------------------------------------------------------------------------------

    def decide(self, event: Decided, queue_bytes: tuple[int, ...], curves: Any) -> None:
        """Observe its own memory, decide, and give its caches the budgets."""
        began = time.perf_counter()
        self._sync(event)
        observation = self._observation(event, queue_bytes, curves if self.wants_curves else ())
        self._apply(self.control.decider.decide(observation).projected.budgets)
        self._asked = replace(self.totals)
        self.seconds += time.perf_counter() - began

    def _observation(
        self, event: Decided, queue_bytes: tuple[int, ...], curves: tuple[MissCurve, ...]
    ) -> Observation:
        live, size = event.observation, self._layout.frame_bytes
        frames, floors = self.frames, self._floors()
        now, before = self.totals, self._asked
        moved = now.host_to_device_bytes + now.moved_bytes
        moved -= before.host_to_device_bytes + before.moved_bytes
        return replace(
            live,
            required_bytes=live.pool_bytes - (event.room - floors) * size,
            optional_bytes=(frames - floors) * size,
            free_bytes=max(0, event.room - frames) * size,
            host_to_device_bytes=moved,
            requests=tuple(self._view(view) for view in live.requests),
            queue_bytes=queue_bytes,
            shortages=now.shortages - before.shortages,
            curves=curves,
        )

    def _view(self, live: RequestView) -> RequestView:
        request = self._requests[live.request_id]
        seen, request.seen = request.seen, Count()
        return replace(
            live,
            budget=tuple(cache.capacity for cache in request.hot),
            selected_rows=seen.unique,
            unique_rows=seen.unique,
            fetched_rows=seen.fetched,
        )

    def _apply(self, budgets: dict[int, tuple[int, ...]]) -> None:
        """In the order of ``Hierarchy.set_budgets``."""
        changes = []
        for number, budget in budgets.items():
            request = self._requests[number]
            for cache, rows in zip(request.hot, budget, strict=True):
                rows = max(rows, self._floor)
                changes.append((cache.frames_for(rows) - cache.num_frames, request, cache, rows))
        for _, request, cache, rows in sorted(changes, key=lambda change: change[0]):
            before = cache.lane.promoted
            free = self._room - self.frames if cache.full else 0
            cache.resize(rows, request.entries(cache.store.index), free)
            moved = cache.lane.promoted - before
            self.totals.moved_bytes += moved * cache.store.record.bytes
            if request.decoding:
                self.totals.promoted_rows += moved * cache.store.store.n_layers

    # --- steps -----------------------------------------------------------------------------------

    def step(self, event: Stepped, queue_bytes: tuple[int, ...]) -> None:
        """Count what the step would have fetched. queue_bytes: what waits still, see Observation."""
        began = time.perf_counter()
        self._sync(event)
        self._fit()
        free = (self._room - self.frames) * self._layout.frame_bytes
        self.totals.early += bool(queue_bytes) and queue_bytes[0] <= free
        for work in event.work:
            self._work(work, event.step)
        self._steps += 1
        self._frame_steps += self.frames - self._floors()
        self.seconds += time.perf_counter() - began

    def _work(self, work: Work, step: int) -> None:
        request, rule, totals = self._requests[work.request_id], self.control.rule, self.totals
        request.committed = work.before
        request.decoding = request.decoding or work.decode
        for store, cache in enumerate(request.hot):
            record, layers = cache.store.record.bytes, cache.store.store.n_layers
            before = request.entries(store)
            after = cache.store.store.entries(work.after)
            recent = work.recent[store] if work.recent else None
            if work.decode:
                missed = cache.lane.step(work.calls[store], before, after, step, rule.admit_newest)
                unique = sum(call.size for call in work.calls[store]) * layers
                totals.unique_rows += unique
                totals.fetched_rows += missed * layers
                totals.host_to_device_bytes += missed * record
                request.seen.unique += unique
                request.seen.fetched += missed * layers
            elif recent is not None:
                totals.moved_bytes += cache.lane.seed(recent, after, step, rule.seed) * record
            if recent is not None:
                cache.recent = recent
        request.committed = work.after

    # --- reports ---------------------------------------------------------------------------------

    def sample(self, live: dict[str, Any]) -> dict[str, Any]:
        """The engine's sample with the shadow's numbers in it."""
        optional = self.optional_bytes
        return {
            **live,
            "optional_bytes": optional,
            "free_bytes": live["free_bytes"] + live["optional_bytes"] - optional,
            "selected_rows": self.totals.unique_rows,
            "unique_rows": self.totals.unique_rows,
            "fetched_rows": self.totals.fetched_rows,
            "host_to_device_bytes": self.totals.host_to_device_bytes + self.totals.moved_bytes,
        }

    def report(self) -> dict[str, Any]:
        """JSON-ready. exact: a live run of this controller on this batch schedule misses these very rows;
        else the counts beside it say how often its own memory would have made another schedule."""
        totals = asdict(self.totals)
        unique, control = self.totals.unique_rows, self.control
        mean = self._frame_steps * self._layout.frame_bytes / self._steps if self._steps else 0.0
        return {
            "controller": self.name,
            "eviction": control.rule.eviction,
            "exact": not (self.totals.shortages or self.totals.squeezed or self.totals.early),
            **totals,
            "miss_rate": self.totals.fetched_rows / unique if unique else 0.0,
            "optional_bytes_mean": mean,
            "controller_decisions": control.decisions,
            "controller_projections": control.projections,
            "controller_fallbacks": control.fallbacks,
            "seconds": self.seconds,
        }

    def close(self) -> None:
        """Let go of the controller."""
        self.control.close()
