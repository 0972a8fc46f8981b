"""The control loop: observe, decide, project, apply, and remember why."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, replace

from kvpolicy.control.observation import Observation, RequestView, StoreView
from kvpolicy.control.plan import Plan
from kvpolicy.control.projection import ProjectedPlan, project
from kvpolicy.controllers.base import Controller, cache_rule, initial_rows
from kvpolicy.controllers.registry import ControllerLike, make
from kvpolicy.engine.reload import RunTimeChanges
from kvpolicy.engine.request import Request, State
from kvpolicy.memory.counters import RetrievalCounters
from kvpolicy.memory.hierarchy import Hierarchy
from kvpolicy.memory.layout import Layout
from kvpolicy.memory.rule import CacheRule, Eviction

log = logging.getLogger(__name__)

# Decisions kept for inspection. One of 128 requests takes about 50 KB.
LOG_LENGTH = 256


@dataclass(frozen=True, slots=True)
class Decision:
    """One entry of the decision log. reason: why the plan was changed or replaced, or empty."""

    step: int
    observation: Observation
    plan: Plan
    projected: ProjectedPlan
    reason: str


@dataclass(frozen=True, slots=True)
class _Baseline:
    """Counters at the last observation."""

    step: int = 0
    host_to_device_bytes: int = 0
    arrivals: int = 0
    finished: int = 0
    seconds: float = 0.0


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
    """Owns the controller and its log.

    decisions, projections, fallbacks: how often a plan was asked for, altered to fit, and replaced
    because the controller failed (then every request keeps its budget).
    """

    def __init__(
        self, spec: ControllerLike, interval: int, layout: Layout, eviction: Eviction | None
    ) -> None:
        self.interval = interval
        self.stores = store_views(layout)
        self.log: deque[Decision] = deque(maxlen=LOG_LENGTH)
        self.decisions = self.projections = self.fallbacks = 0
        self._eviction = eviction
        self._base = _Baseline()
        self._seen: dict[int, RetrievalCounters] = {}
        self._due = True
        self.rule = CacheRule()
        self._initial: tuple[float, ...] = ()
        self.set_controller(spec)

    def set_controller(self, spec: ControllerLike) -> None:
        """Swap the controller; it decides at the next step. UserError leaves the old one in place."""
        self._use(make(spec), self._eviction)

    def apply(self, changes: RunTimeChanges) -> None:
        """Take over what a new config changes; all of it, or nothing and a UserError."""
        swapped = "controller" in changes.names
        self._use(make(changes.controller) if swapped else self.controller, changes.eviction)
        self.interval = changes.control_interval

    def _use(self, controller: Controller, eviction: Eviction | None) -> None:
        initial, rule = initial_rows(controller, self.stores), cache_rule(controller)
        if eviction is not None:
            rule = replace(rule, eviction=eviction)
        self.controller, self._initial, self.rule = controller, initial, rule
        self._eviction = eviction
        self._due = True

    def initial_rows(self, max_entries: tuple[int, ...]) -> tuple[int, ...]:
        """Rows per store that admission must reserve for a request with these many entries."""
        each = zip(self._initial, max_entries, strict=True)
        return tuple(int(min(rows, most)) for rows, most in each)

    def wake(self) -> None:
        """Ask for a decision at the next step, whatever the interval (a request came or went)."""
        self._due = True

    def step(
        self,
        step: int,
        memory: Hierarchy,
        running: list[Request],
        waiting: list[Request],
        arrivals: int,
        finished: int,
        seconds: float,
    ) -> None:
        """Decide and apply, if it is time."""
        if not self._due and step - self._base.step < self.interval:
            return
        if not running:
            return
        now = _Baseline(step, memory.counters.host_to_device_bytes, arrivals, finished, seconds)
        observation = self._observe(now, memory, running, waiting)
        self._base, self._due = now, False
        plan, projected, reason = self._ask(observation)
        self.decisions += 1
        self.projections += projected.changed
        self.log.append(Decision(step, observation, plan, projected, reason or projected.reason))
        memory.set_budgets(projected.budgets)

    def _ask(self, observation: Observation) -> tuple[Plan, ProjectedPlan, str]:
        """The controller's plan made feasible; what every request has now if it gives none."""
        try:
            plan: object = self.controller.decide(observation)
            if not isinstance(plan, Plan):
                raise TypeError(f"decide() returned {type(plan).__name__}, not a Plan")
            projected = project(plan, observation)
        except Exception as error:  # a foreign plug-in may raise anything
            reason = f"{type(error).__name__}: {error}"
            self.fallbacks += 1
            log.warning("controller failed at step %d, budgets kept: %s", observation.step, reason)
            kept = Plan.keep(observation)
            return kept, project(kept, observation), reason
        if projected.changed:
            log.info("plan of step %d was altered: %s", observation.step, projected.reason)
        return plan, projected, ""

    def _observe(
        self, now: _Baseline, memory: Hierarchy, running: list[Request], waiting: list[Request]
    ) -> Observation:
        usage = memory.usage()
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
            oldest_wait=now.step - waiting[0].arrived_step if waiting else 0,
            arrivals=now.arrivals - base.arrivals,
            finished=now.finished - base.finished,
            step_seconds=(now.seconds - base.seconds) / steps if steps else 0.0,
            host_to_device_bytes=now.host_to_device_bytes - base.host_to_device_bytes,
            stores=self.stores,
            requests=tuple(self._view(request, memory, now.step) for request in running),
        )

    def _view(self, request: Request, memory: Hierarchy, step: int) -> RequestView:
        held = memory.requests[request.id]
        seen = self._seen.get(request.id, RetrievalCounters())
        count = held.counters
        view = RequestView(
            request_id=request.id,
            context=held.committed,
            max_rows=tuple(hot.max_entries for hot in held.hot),
            budget=tuple(hot.capacity for hot in held.hot),
            decoding=request.state is State.DECODE,
            age=step - request.admitted_step,
            generated=len(request.tokens),
            selected_rows=count.selected_rows - seen.selected_rows,
            unique_rows=count.unique_rows - seen.unique_rows,
            fetched_rows=count.fetched_rows - seen.fetched_rows,
        )
        copy = RetrievalCounters()
        copy.add(count)
        self._seen[request.id] = copy
        return view

    def forget(self, request_id: int) -> None:
        """Drop what was kept about a request that has ended."""
        self._seen.pop(request_id, None)
        self._due = True
