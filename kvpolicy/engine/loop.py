"""The control loop: observe, decide, project, apply, and remember why."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvpolicy.control.decision import Decision, DecisionWriter
from kvpolicy.control.observation import Observation, RequestView, StoreView
from kvpolicy.controllers.base import Controller, cache_rule, initial_rows, wants_curves
from kvpolicy.controllers.decider import Decider
from kvpolicy.controllers.process import PATIENCE, SUPPORTED, ProcessController
from kvpolicy.controllers.registry import ControllerLike, is_foreign, make
from kvpolicy.engine.following import Follower
from kvpolicy.engine.reload import RunTimeChanges
from kvpolicy.engine.request import Request, State
from kvpolicy.engine.speculation import Counts
from kvpolicy.memory.counters import Counted, RetrievalCounters
from kvpolicy.memory.hierarchy import Hierarchy
from kvpolicy.memory.layout import Layout
from kvpolicy.memory.rule import Admission, CacheRule, Eviction
from kvpolicy.telemetry.slo import Slo


@dataclass(frozen=True, slots=True)
class _Baseline:
    """Counters at the last observation."""

    step: int = 0
    host_to_device_bytes: int = 0
    arrivals: int = 0
    finished: int = 0
    seconds: float = 0.0
    shortages: int = 0
    preemptions: int = 0
    tokens: int = 0
    cycles: int = 0
    committed: int = 0
    verify_rows: int = 0


@dataclass(frozen=True, slots=True)
class LoadView:
    """What the control loop must know of the engine besides memory; counts since the start.

    queue_bytes: device bytes that waiting requests need to start, in order, as many as have seats.
    late: the device runs ahead; its counters are taken as last sent. speculation: counts, with a drafter.
    """

    step: int
    running: Sequence[Request]
    waiting: Sequence[Request]
    seats_free: int
    queue_bytes: tuple[int, ...]
    arrivals: int
    finished: int
    preemptions: int
    tokens: int
    seconds: float
    late: bool = False
    speculation: Counts | None = None


DecisionListener = Callable[[Decision], None]
"""Told of every decision when its budgets have been applied. Must not wait for the device."""


def store_views(layout: Layout) -> tuple[StoreView, ...]:
    """The stores of a model as controllers see them."""
    return tuple(
        StoreView(
            name=store.store.name,
            layers=store.store.n_layers,
            topk=max(s.topk for s in layout.geometry.selectors_of(store.store.name)),
            record_bytes=store.record.bytes,
            rows_per_frame=store.record.per_frame,
            meta_per_frame=store.meta.per_frame,
        )
        for store in layout.stores
    )


class ControlLoop:
    """Observes, asks the :class:`Decider`, applies.

    deadline: seconds a decision may take, 0 for none. decision_log: a file that every decision is
    appended to, None for none. admission: None leaves it to the controller's rule. isolate: with a
    deadline, foreign code that a spec names gets a process.
    """

    def __init__(
        self,
        spec: ControllerLike,
        interval: int,
        layout: Layout,
        eviction: Eviction | None,
        deadline: float = 0.0,
        decision_log: str | None = None,
        isolate: bool = True,
        admission: Admission | None = None,
    ) -> None:
        self._admission = admission
        self.interval = interval
        self._deadline = deadline
        self._isolate = isolate and SUPPORTED and deadline > 0
        self.stores = store_views(layout)
        self._eviction = eviction
        self._base = _Baseline()
        # Verified tokens of a request per step, at most, as the last decision said; None: no cap.
        self.draft_tokens: int | None = None
        self._seen: dict[int, RetrievalCounters] = {}
        self._due = True
        self.slo: Slo | None = None
        self.listeners: list[DecisionListener] = []
        controller, self._initial, self.rule = self._checked(spec, eviction, admission)
        self._most_entries = max(
            s.store.entries(layout.geometry.max_context) for s in layout.stores
        )
        self._follower = self._new_follower(controller)
        writer = DecisionWriter(decision_log) if decision_log else None
        self.decider = Decider(controller, deadline, writer=writer)

    def set_controller(self, spec: ControllerLike) -> None:
        """Swap the controller; it decides at the next step. UserError leaves the old one in place."""
        controller, initial, rule = self._checked(spec, self._eviction, self._admission)
        self._follower = self._new_follower(controller)
        self._initial, self.rule = initial, rule
        self.decider.set_controller(controller)
        self._due = True

    def apply(self, changes: RunTimeChanges) -> None:
        """Take over what a new config changes; all of it, or nothing and a UserError."""
        swapped = "controller" in changes.names
        spec = changes.controller if swapped else self.controller
        controller, initial, rule = self._checked(spec, changes.eviction, changes.admission)
        if swapped:
            self._follower = self._new_follower(controller)
            self.decider.set_controller(controller)
        self._initial, self.rule = initial, rule
        self._eviction, self._admission = changes.eviction, changes.admission
        self.interval = changes.control_interval
        self._due = True

    def _checked(
        self, spec: ControllerLike, eviction: Eviction | None, admission: Admission | None
    ) -> tuple[Controller, tuple[float, ...], CacheRule]:
        """A controller, the rows it wants at admission, and its cache rule."""
        controller = self._make(spec)
        initial, rule = initial_rows(controller, self.stores), cache_rule(controller)
        if eviction is not None:
            rule = replace(rule, eviction=eviction)
        if admission is not None:
            rule = replace(rule, admission=admission)
        return controller, initial, rule

    def _make(self, spec: ControllerLike) -> Controller:
        if isinstance(spec, str) and self._isolate and is_foreign(spec):
            patience = max(PATIENCE, 2 * self._deadline)
            return ProcessController(spec, self.stores, patience=patience)
        return make(spec)

    def _new_follower(self, controller: Controller) -> Follower | None:
        """Who measures miss curves, for a controller that asks for them; nobody else pays."""
        return Follower(self.stores, self._most_entries) if wants_curves(controller) else None

    @property
    def controller(self) -> Controller:
        """The controller that is asked."""
        return self.decider.controller

    @property
    def log(self) -> deque[Decision]:
        """The last decisions, oldest first."""
        return self.decider.log

    @property
    def decisions(self) -> int:
        """How often a plan was asked for."""
        return self.decider.decisions

    @property
    def projections(self) -> int:
        """How often a plan was altered to fit."""
        return self.decider.projections

    @property
    def fallbacks(self) -> int:
        """How often the fallback decided because the controller failed."""
        return self.decider.fallbacks

    def close(self) -> None:
        """Let go of the controller's thread, without waiting for it, or end its process."""
        self.decider.close()

    @property
    def promised(self) -> tuple[float, ...]:
        """Rows per store that every running request has been promised, inf for all of them."""
        return self._initial

    def initial_rows(self, max_entries: tuple[int, ...]) -> tuple[int, ...]:
        """Rows per store that admission must reserve for a request with these many entries."""
        each = zip(self._initial, max_entries, strict=True)
        return tuple(int(min(rows, most)) for rows, most in each)

    def wake(self) -> None:
        """Ask for a decision at the next step, whatever the interval (a request came or went)."""
        self._due = True

    def is_due(self, step: int) -> bool:
        """Whether a decision is wanted now."""
        return self._due or step - self._base.step >= self.interval

    def step(self, memory: Hierarchy, load: LoadView) -> None:
        """Decide and apply."""
        observation = self.observe(memory, load)
        if observation is not None:
            self.act(memory, observation)

    def act(self, memory: Hierarchy, observation: Observation) -> None:
        """Decide on what :meth:`observe` gave, and apply it."""
        decision = self.decider.decide(observation)
        memory.set_budgets(decision.projected.budgets)
        self.draft_tokens = decision.projected.draft_tokens
        for listener in self.listeners:
            listener(decision)

    def observe(self, memory: Hierarchy, load: LoadView) -> Observation | None:
        """What the next decision is about, None where nothing runs. The next observation counts from
        here on."""
        if not load.running:
            return None
        step = load.step
        counted = memory.counters.retrieval.received() if load.late else memory.counted()
        now = _Baseline(
            step,
            counted.host_to_device_bytes + memory.counters.moved_bytes,
            load.arrivals,
            load.finished,
            load.seconds,
            memory.counters.shortages,
            load.preemptions,
            load.tokens,
            *(load.speculation.totals if load.speculation else ()),
        )
        observation = self._observe(now, memory, load, counted)
        if self._follower is not None:
            curves = self._follower.curves(memory, observation.requests, load.late)
            observation = replace(observation, curves=curves)
        self._base, self._due = now, False
        return observation

    def _observe(
        self, now: _Baseline, memory: Hierarchy, load: LoadView, counted: Counted
    ) -> Observation:
        usage, waiting = memory.usage(), load.waiting
        base = self._base
        steps = now.step - base.step
        return Observation(
            step=now.step,
            interval=steps,
            frame_bytes=memory.layout.frame_bytes,
            pool_bytes=usage.used + usage.free,
            required_bytes=usage.required,
            optional_bytes=usage.optional,
            free_bytes=usage.free,
            floor_rows=memory.floor_rows,
            waiting=len(waiting),
            oldest_wait=now.step - waiting[0].waiting_since if waiting else 0,
            arrivals=now.arrivals - base.arrivals,
            finished=now.finished - base.finished,
            step_seconds=(now.seconds - base.seconds) / steps if steps else 0.0,
            host_to_device_bytes=now.host_to_device_bytes - base.host_to_device_bytes,
            stores=self.stores,
            requests=tuple(self._view(r, memory, now.step, counted) for r in load.running),
            seats_free=load.seats_free,
            queue_bytes=load.queue_bytes,
            shortages=now.shortages - base.shortages,
            preemptions=now.preemptions - base.preemptions,
            tokens=now.tokens - base.tokens,
            cycles=now.cycles - base.cycles,
            committed=now.committed - base.committed,
            verify_rows=now.verify_rows - base.verify_rows,
            slo_tpot=None if self.slo is None else self.slo.tpot,
            slo_ttft=None if self.slo is None else self.slo.ttft,
        )

    def _view(
        self, request: Request, memory: Hierarchy, step: int, counted: Counted
    ) -> RequestView:
        held = memory.requests[request.id]
        seen = self._seen.get(request.id, RetrievalCounters())
        count = counted.by_request.get(request.id, seen)
        new = count.since(seen)
        self._seen[request.id] = count
        return RequestView(
            request_id=request.id,
            context=held.committed,
            max_rows=tuple(hot.max_entries for hot in held.hot),
            budget=tuple(hot.capacity for hot in held.hot),
            decoding=request.state is State.DECODE,
            age=step - request.admitted_step,
            generated=len(request.tokens),
            selected_rows=new.selected_rows,
            unique_rows=new.unique_rows,
            fetched_rows=new.fetched_rows,
            rows_now=tuple(hot.room for hot in held.hot),
        )

    def forget(self, request_id: int) -> None:
        """Drop what was kept about a request that has left the device."""
        self._seen.pop(request_id, None)
        self._due = True
