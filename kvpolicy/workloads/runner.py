"""Drives an engine through a workload and keeps what happened."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvpolicy.config import SamplingParams
from kvpolicy.engine.clock import STEP_SECONDS
from kvpolicy.engine.engine import Engine
from kvpolicy.engine.handle import RequestHandle
from kvpolicy.engine.request import RequestOutput
from kvpolicy.errors import IntegrityError
from kvpolicy.telemetry.phases import DRAIN
from kvpolicy.telemetry.timeline import Phase, Timeline
from kvpolicy.workloads.workload import Arrival, Workload

__all__ = ["RunResult", "Runner"]

# Moments this close are the same but for the rounding of floating-point sums.
ROUNDING_S, ROUNDING_STEPS = 1e-9, 1e-6


@dataclass(frozen=True)
class RunResult:
    """outputs: of every request, in the order they were submitted. end: of the run, in seconds of the
    engine's clock (it started at the timeline's origin)."""

    outputs: list[RequestOutput]
    timeline: Timeline
    end: float


class Runner:
    """One run of a workload on an engine that has nothing to do.

    sampling: of every request, but for its length and seed, which are the workload's. every: engine
    steps between two samples (the engine's control interval). on_step: called after every step;
    on_sample: with every sample of the timeline. submit: how a request is given to the engine (None: its
    prompt as it is). contexts: see ``Engine.prepare``. due: by number of the request, when it came, on the
    engine's clock, where arrivals have times.
    """

    def __init__(
        self,
        engine: Engine,
        workload: Workload,
        sampling: SamplingParams | None = None,
        every: int | None = None,
        on_step: Callable[[Engine], None] | None = None,
        on_sample: Callable[[dict[str, Any]], None] | None = None,
        submit: Callable[[Arrival, SamplingParams], RequestHandle] | None = None,
        contexts: Sequence[int] = (),
    ) -> None:
        self.engine = engine
        self.workload = workload
        self.timeline = Timeline(origin=engine.clock.now())
        self._sampling = sampling or SamplingParams()
        self._every = every or engine.config.control_interval
        self._on_step = on_step or (lambda engine: None)
        self._on_sample = on_sample or (lambda sample: None)
        self._submit = submit or (lambda arrival, params: engine.submit(arrival.prompt, params))
        self._contexts = contexts
        self.due: dict[int, float] = {}
        self._requests = workload.requests()
        self._next = next(self._requests, None)
        drain = Phase(DRAIN, workload.end, math.inf, 0 if workload.closed else None)
        self._ahead = deque((*workload.phases, drain))
        self._level = 0
        self._entered = False
        self._handles: list[RequestHandle] = []
        self._live: list[RequestHandle] = []

    @property
    def now(self) -> float:
        """Seconds of the engine's clock since the start."""
        return self.engine.clock.now() - self.timeline.origin

    @property
    def handles(self) -> list[RequestHandle]:
        """Of every request so far, in the order they were submitted."""
        return self._handles

    def run(self) -> RunResult:
        """Submit everything when its time has come, and step until all of it has ended.

        Every wait is bounded: idle time passes in skips to the next event, or in short sleeps.
        IntegrityError if the engine stops working while requests are in the system.
        """
        self.start()
        while self.ready():
            self.worked(self.engine.step())
        self._sample()
        return RunResult(self._outputs(), self.timeline, self.engine.clock.now())

    def start(self) -> None:
        """The workload begins now."""
        self.engine.prepare(self._sampling.temperature > 0.0, self._contexts)
        self.timeline.origin = self.engine.clock.now()

    def ready(self) -> bool:
        """Submit what is due. False once all of it has ended and nothing will come."""
        self._advance()
        return not self._over

    def worked(self, done: bool) -> None:
        """Note a step of the engine. done: it had work; else time passes until something comes."""
        if done:
            self._on_step(self.engine)
            self._live = [handle for handle in self._live if not handle.done]
        elif self._live:
            raise IntegrityError(f"{len(self._live)} requests are neither running nor done")
        else:
            self._idle()
        if self._entered or self.engine.steps - self.timeline.last_step >= self._every:
            self._sample()
            self._entered = False  # a sample shows at once what the phase brought

    def _outputs(self) -> list[RequestOutput]:
        """Where arrivals have times, a request arrives when it is due: what came while a step was
        computing has waited for the end of that step too."""
        outputs = [handle.result() for handle in self._handles]
        if self.workload.closed or self.engine.clock.counts_steps:
            return outputs
        return [
            replace(output, latencies=replace(output.latencies, arrived=self.due[output.id]))
            for output in outputs
        ]

    @property
    def _over(self) -> bool:
        """Nothing is in the system and nothing will come."""
        if self._live:
            return False
        if self._next is None and math.isinf(self.workload.end):
            return True
        return not self._ahead and (self.workload.closed or self._next is None)

    def _sample(self) -> None:
        sample = asdict(self.engine.sample())
        self.timeline.add(sample)
        self._on_sample(sample)

    # --- arrivals and time -----------------------------------------------------------------------

    def _advance(self) -> None:
        """Enter the phases that have begun, and submit what is due."""
        now = self.now + ROUNDING_S
        while self._ahead and self._ahead[0].start <= now:
            self._enter(self._ahead.popleft(), now)
        self._take(now)

    def _enter(self, phase: Phase, now: float) -> None:
        self._sample()  # before anything of the phase is submitted
        risen = (phase.level or 0) > self._level
        self._level = phase.level or 0
        self._entered = True
        taken = self._take(now)
        self.timeline.mark(phase, taken if risen else range(0))

    def _take(self, now: float) -> range:
        """Submit what is due; the numbers of these requests."""
        first = len(self._handles)
        while self._next is not None and self._due(self._next, now):
            own = {"max_new_tokens": self._next.max_new_tokens, "seed": self._next.seed}
            params = self._sampling.model_copy(update=own)
            handle = self._submit(self._next, params)
            self._handles.append(handle)
            if not self.workload.closed:
                self.due[handle.id] = self.timeline.origin + self._when(self._next)
            self._live.append(handle)
            self._next = next(self._requests, None)
        return range(first, len(self._handles))

    def _due(self, arrival: Arrival, now: float) -> bool:
        if self.workload.closed:
            return len(self._live) < self._level
        return self._when(arrival) <= now

    def _when(self, arrival: Arrival) -> float:
        """When to submit it. Counted in steps: before the step that it comes in."""
        if self.engine.clock.counts_steps:
            return math.floor(arrival.time / STEP_SECONDS + ROUNDING_STEPS) * STEP_SECONDS
        return arrival.time

    def _idle(self) -> None:
        """Let time pass until the next phase or arrival."""
        events = [self._ahead[0].start] if self._ahead else []
        if self._next is not None and not self.workload.closed:
            events.append(self._when(self._next))
        gap = min(events) - self.now
        if self.engine.clock.counts_steps:
            self.engine.skip(max(1, round(gap / STEP_SECONDS)))
        elif gap > 0:
            self.engine.wait(gap)
