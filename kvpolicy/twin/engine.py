"""The engine's step without a model: the runtime's scheduler, residents, control loop and projection, over
recorded selections, on a clock that a fitted cost model moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from kvpolicy.config import EngineConfig, SamplingParams
from kvpolicy.control.observation import MissCurve, Observation, RequestView, StoreView
from kvpolicy.controllers import ControllerLike
from kvpolicy.controllers.base import Controller
from kvpolicy.engine.clock import STEP_SECONDS
from kvpolicy.engine.following import Follower
from kvpolicy.engine.handle import RequestHandle
from kvpolicy.engine.loop import ControlLoop, LoadView
from kvpolicy.engine.metrics import Metrics, Sample
from kvpolicy.engine.parts import MIB
from kvpolicy.engine.request import Request, State
from kvpolicy.engine.residents import Residents
from kvpolicy.engine.scheduler import Batch, Scheduler
from kvpolicy.errors import UserError
from kvpolicy.memory.accounting import Reserve
from kvpolicy.memory.hierarchy import Hierarchy
from kvpolicy.memory.layout import Layout
from kvpolicy.speculative.registry import NONE
from kvpolicy.telemetry.slo import Slo
from kvpolicy.twin.cost import CostModel, Work
from kvpolicy.twin.memory import TwinMemory
from kvpolicy.twin.requests import TwinRequest
from kvpolicy.twin.streams import Streams

__all__ = ["TwinClock", "TwinEngine", "refuse_drafter"]


def refuse_drafter(config: EngineConfig) -> None:
    """UserError for settings with a drafter: a twin has one row per request and step."""
    if config.drafter != NONE:
        name = config.model_dump()["drafter"]
        raise UserError(
            f"drafter = {name!r}: a twin has one row per request and step, it must be {NONE!r}"
        )


class TwinClock:
    """Seconds that the cost model has counted, or steps where ``kind`` is ``steps``."""

    def __init__(self, kind: str) -> None:
        self.counts_steps = kind == "steps"
        self.steps = 0
        self.seconds = 0.0

    def now(self) -> float:
        """Seconds since the start."""
        return self.steps * STEP_SECONDS if self.counts_steps else self.seconds


class TwinFollower(Follower):
    """Miss curves from the streams' selections; of units, given out in rows."""

    def __init__(self, stores: Sequence[StoreView], entries: int, streams: Streams) -> None:
        self._streams, self._unit = streams, streams.unit
        super().__init__(
            [_in_units(store, self._unit) for store in stores], max(1, entries // self._unit)
        )

    def curves(
        self, memory: Hierarchy, requests: Sequence[RequestView], late: bool = False
    ) -> tuple[MissCurve, ...]:
        """As :meth:`Follower.curves`."""
        curves = super().curves(memory, requests, late=False)
        unit = self._unit
        if unit == 1:
            return curves
        return tuple(
            MissCurve(tuple(r * unit for r in c.rows), tuple(m * unit for m in c.misses), c.steps)
            for c in curves
        )

    def _send(self, memory: Hierarchy, followed: int) -> None:
        request = cast(TwinRequest, memory.requests[followed])
        if request.trace is None:
            self._sampler.begin(followed)
            return
        trace, request.trace = list(request.trace), None
        stores = memory.layout.stores
        selected = cast(TwinMemory, memory).selected
        for store, step, tokens, row in trace:
            committed = stores[store].store.entries(tokens) // self._unit
            old = selected(row, store, committed).astype(np.int64)
            self._sampler.note(store, step, old, committed)


def _in_units(store: StoreView, unit: int) -> StoreView:
    return replace(store, topk=max(1, store.topk // unit))


class TwinControl(ControlLoop):
    """The runtime's control loop, which follows streams for miss curves."""

    def __init__(self, streams: Streams, *args: Any, **extra: Any) -> None:
        self._streams = streams
        super().__init__(*args, **extra)

    def _new_follower(self, controller: Controller) -> Follower | None:
        if super()._new_follower(controller) is None:
            return None
        return TwinFollower(self.stores, self._most_entries, self._streams)


@dataclass(slots=True)
class _Open:
    """A step that has begun: the observation that a plan is due for, if one is."""

    observation: Observation | None
    launched: Batch | None


class TwinEngine:
    """Steps like :class:`kvpolicy.engine.engine.Engine`, in a millisecond for 32 requests.

    config: of the engine it stands for (``clock: wall`` is the cost model's). layout: its rows. streams:
    what requests select. cost: seconds of a step. runs_ahead: as an engine on a GPU, where decisions
    come behind the launch. most_tokens: longest request where streams are stretched. first: number of
    the first request. UserError for a config with a drafter.
    """

    def __init__(
        self,
        config: EngineConfig,
        layout: Layout,
        streams: Streams,
        cost: CostModel,
        runs_ahead: bool = False,
        most_tokens: int = 0,
        first: int = 0,
    ) -> None:
        refuse_drafter(config)
        self.config, self.streams, self.cost = config, streams, cost
        self.clock = TwinClock(config.clock)
        self.runs_ahead = runs_ahead and config.clock == "wall"
        self._most_tokens = most_tokens
        self.control = TwinControl(
            streams,
            config.controller,
            config.control_interval,
            layout,
            config.eviction,
            decision_log=config.decision_log,
            isolate=False,
        )
        staging = config.staging_rows or config.max_concurrency * layout.topk
        self.memory = TwinMemory(
            layout,
            int(config.device_kv_mib * MIB),
            int(config.host_kv_mib * MIB),
            Reserve(staging, config.max_concurrency + config.prefill_chunk, config.max_concurrency),
            config.floor_rows,
            self.control.rule,
            streams,
            most_tokens,
        )
        self._memory = cast(Hierarchy, self.memory)
        self.scheduler = Scheduler(config.max_concurrency, config.prefill_chunk)
        self.totals = Metrics()
        self.residents = Residents(self._memory, self.scheduler, self.control, self.totals)
        self.requests: dict[int, Request] = {}
        self._layers = sum(s.store.n_layers for s in layout.stores)
        self._selectors = len(layout.geometry.selectors)
        self._next_id = self._first = first
        self._open: _Open | None = None
        self.last_work = Work()
        self._moved = self._entered = 0

    @property
    def steps(self) -> int:
        """Engine steps so far, skipped ones included."""
        return self.clock.steps

    def prepare(self, sampled: bool = False, contexts: Sequence[int] = ()) -> None:
        """Nothing to prepare."""

    def submit(
        self, prompt: bytes, params: SamplingParams | None = None, context: int = 0
    ) -> RequestHandle:
        """Queue a request; its lengths are the stream's (see :meth:`Streams.assign`)."""
        params = SamplingParams() if params is None else params
        number = self._next_id
        own = self.streams.assign(number, len(prompt), params.max_new_tokens, context)
        if own.output_tokens != params.max_new_tokens:
            params = params.model_copy(update={"max_new_tokens": own.output_tokens})
        request = Request(
            id=number,
            prompt=(0,) * own.prompt_tokens,
            params=params,
            eos=(),
            stops=(),
            arrived_step=self.steps,
            clock=cast(Any, self.clock),
            context=context,
        )
        if self.streams.context is not None and request.max_tokens > self._most_tokens:
            raise UserError(
                f"a request of {request.max_tokens} tokens: at most {self._most_tokens}"
            )
        self.memory.check_fits_alone(request.max_tokens, self.residents.initial_rows(request))
        self.memory.replay(number, own)
        self._next_id += 1
        self.requests[number] = request
        self.totals.submit(request)
        self.scheduler.add(request)
        self.control.wake()
        return RequestHandle(request, self.step, self._cancel)

    def _cancel(self, request: Request) -> None:
        if not request.finished:
            request.finish("cancelled")
            self._retire(request)

    # --- one step --------------------------------------------------------------------------------

    def step(self) -> bool:
        """One step, its controller asked as the engine asks it. False when nothing was left to do."""
        observation = self.begin()
        if observation is not None:
            self.control.act(self._memory, observation)
        return self.finish()

    def begin(self) -> Observation | None:
        """The step up to its decision: the observation, None if no decision is due."""
        decided = self.control.is_due(self.steps)
        observation, batch = None, None
        if decided and not self.runs_ahead:
            observation = self.control.observe(self._memory, self._load())
        if self.runs_ahead:
            batch = self._launch()
            if decided and batch is not None:
                observation = self.control.observe(self._memory, self._load())
                self.memory.send_counts()
        self._open = _Open(observation, batch)
        return observation

    def act(self, observation: Observation) -> None:
        """Have the controller decide on what :meth:`begin` gave."""
        self.control.act(self._memory, observation)

    def finish(self) -> bool:
        """The rest of the step that :meth:`begin` began. False when nothing was left to do."""
        opened = self._open
        if opened is None:
            raise UserError("finish() without begin()")
        self._open = None
        batch = opened.launched if self.runs_ahead else self._launch()
        if batch is None:
            return False
        self._account(batch)
        return True

    def _launch(self) -> Batch | None:
        """Admit, grow, and do the books of the next rows; None where there are none."""
        self.residents.admit(self.steps)
        self.residents.grow(self.steps)
        batch = self.scheduler.batch()
        if not batch:
            return None
        memory, step, work = self.memory, self.steps, Work()
        before = int(memory.counters.retrieval.totals[2])
        if batch.decode:
            own = [memory.requests[request.id] for request in batch.decode]
            work.scanned_keys = float(sum(r.committed for r in own) * self._selectors)
            attended, looked_up = memory.decode(own, step)
            work.decode_steps, work.rows = 1.0, float(len(own))
            work.attended_rows, work.resolved_rows = float(attended), float(looked_up)
        for request, count in batch.prompts:
            last = request.computed + count == request.prompt_end
            work.prompt_keys += float(count * request.computed * self._selectors)
            mapped = memory.prompt(memory.requests[request.id], count, last, step)
            work.prompt_steps = 1.0
            work.prompt_rows += count
            work.prompt_mapped_rows += count * mapped
        for request in batch.decode:
            request.computed += 1
            request.issued += 1
        for request, count in batch.prompts:
            request.advance(count)
        work.link_bytes = float(memory.counters.retrieval.totals[2] - before)
        work.moved_bytes = float(memory.counters.moved_bytes - self._moved)
        work.entered_tokens = float(memory.counters.entered_tokens - self._entered)
        self._moved, self._entered = memory.counters.moved_bytes, memory.counters.entered_tokens
        self.last_work = work
        return batch

    def _account(self, batch: Batch) -> None:
        """Time passes, tokens are given out, what is done ends."""
        work = self.last_work
        seconds = self.cost.time(work)
        self.clock.seconds += seconds
        now = self.clock.now()
        for request in batch.decode:
            self._give(request, now)
        for request, _ in batch.prompts:
            if request.state is State.DECODE:
                self._give(request, now)
        self.totals.decode_steps += bool(batch.decode)
        self.clock.steps += 1
        self.totals.note_step(self._memory, seconds)
        if self.config.validate_:
            self.check_integrity()

    def _give(self, request: Request, now: float) -> None:
        request.tokens.append(0)
        request.last_token = now
        if request.first_token is None:
            request.first_token = now
        self.totals.generated_tokens += 1
        if len(request.tokens) >= request.params.max_new_tokens:
            request.finish("length")
            self._retire(request)

    def _retire(self, request: Request) -> None:
        self.scheduler.remove(request)
        self.memory.release(request.id)
        del self.requests[request.id]
        self.control.forget(request.id)
        self.totals.retire(request)

    def _load(self) -> LoadView:
        return LoadView(
            step=self.steps,
            running=self.scheduler.running,
            waiting=self.scheduler.waiting,
            seats_free=self.scheduler.seats_free,
            queue_bytes=self.residents.queue_bytes(),
            arrivals=self._next_id - self._first,
            finished=self.totals.finished,
            preemptions=self.totals.preemptions,
            tokens=self.totals.generated_tokens,
            seconds=0.0 if self.clock.counts_steps else self.totals.busy_seconds,
            late=self.runs_ahead,
        )

    def skip(self, steps: int = 1) -> None:
        """Let time pass without work, where steps are the clock and nothing runs."""
        self.clock.steps += steps

    def wait(self, seconds: float) -> None:
        """Let time pass without work, at once."""
        self.clock.seconds += seconds

    # --- control and reports ---------------------------------------------------------------------

    def set_controller(self, spec: ControllerLike) -> None:
        """Swap the controller; it decides at the next step."""
        self.control.set_controller(spec)
        self.memory.set_rule(self.control.rule)
        self.memory.stop_following()
        self.config = self.config.model_copy(update={"controller": spec})

    def set_slo(self, slo: Slo | None) -> None:
        """Tell controllers which latencies goodput will count."""
        self.control.slo = slo

    def check_integrity(self) -> None:
        """IntegrityError unless all bookkeeping agrees."""
        self.memory.check_integrity()
        self.residents.check_integrity()

    def sample(self) -> Sample:
        """The engine at this moment."""
        usage, waiting = self.memory.usage(), self.scheduler.waiting
        selected, fetched, moved = self.memory.counters.retrieval.totals.tolist()
        return Sample(
            step=self.steps,
            time=self.clock.now(),
            running=len(self.scheduler.running),
            waiting=len(waiting),
            oldest_wait=self.steps - waiting[0].waiting_since if waiting else 0,
            required_bytes=usage.required,
            optional_bytes=usage.optional,
            free_bytes=usage.free,
            selected_rows=selected,
            unique_rows=selected,
            fetched_rows=fetched,
            host_to_device_bytes=moved + self.memory.counters.moved_bytes,
            generated_tokens=self.totals.generated_tokens,
            decode_steps=self.totals.decode_steps,
            finished=self.totals.finished,
            preemptions=self.totals.preemptions,
            busy_seconds=self.totals.busy_seconds,
        )

    def metrics(self) -> dict[str, Any]:
        """Everything measured so far, by its documented name."""
        return self.totals.report(self.steps, self._memory, self.control, 0)

    def close(self) -> None:
        """Let go of the controller."""
        self.control.close()
