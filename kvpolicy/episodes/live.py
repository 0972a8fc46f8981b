"""An episode on the engine itself: live decode steps under plans that come from outside.

The engine runs in a thread of its own, which stops inside ``decide`` until the plan comes, so that the
engine is
driven exactly as it drives itself. Whoever waits for it waits for a bounded time.
"""

from __future__ import annotations

import logging
import threading
from queue import Empty, SimpleQueue
from typing import Any

from kvpolicy.config import SamplingParams
from kvpolicy.control.observation import Observation
from kvpolicy.control.plan import Plan
from kvpolicy.controllers.base import Controller
from kvpolicy.engine.engine import Engine
from kvpolicy.engine.handle import RequestHandle
from kvpolicy.episodes.measuring import Measuring
from kvpolicy.episodes.scenarios import Scenario
from kvpolicy.episodes.twin import Outcome, submit_to
from kvpolicy.errors import UserError, reason
from kvpolicy.telemetry.reward import Terms
from kvpolicy.workloads.runner import Runner
from kvpolicy.workloads.workload import Arrival, Workload

__all__ = ["LiveEngine", "LiveEpisode"]

log = logging.getLogger(__name__)

# Seconds without a decision or an end after which an episode counts as stuck: graphs are captured and
# kernels compiled before it begins, and a step takes milliseconds.
PATIENCE = 60.0
# Engines that a stuck thread still holds, at most.
MOST_STUCK = 2

Message = Observation | str | BaseException
"""Of the engine's thread: a decision is due, the load is over (why), or it failed."""


class Gate:
    """The controller inside the engine: tells what is due, and waits until ``inner`` may be asked."""

    def __init__(self, inner: Controller) -> None:
        self.inner = inner
        self.wants_curves = bool(getattr(inner, "wants_curves", False))
        self.told: SimpleQueue[Message] = SimpleQueue()
        self.open: SimpleQueue[bool] = SimpleQueue()

    def decide(self, observation: Observation) -> Plan:
        self.told.put(observation)
        if not self.open.get():  # the episode is given up
            return Plan.keep(observation)
        return self.inner.decide(observation)


class LiveEngine:
    """One engine for many episodes, made when it is first needed, and again after one that broke it.

    inner: decides, once it is let to. changes: to the scenario's engine config.
    """

    def __init__(self, scenario: Scenario, inner: Controller, **changes: Any) -> None:
        self._config = scenario.config(
            **{**changes, "controller": "adaptive", "decision_deadline_ms": 0.0, "clock": "wall"}
        )
        self._inner = inner
        self._engine: Engine | None = None
        self._stuck = 0
        self.gate = Gate(inner)

    def ready(self) -> Engine:
        """An engine that has nothing to do. UserError where too many stuck ones are alive."""
        if self._engine is None:
            if self._stuck >= MOST_STUCK:
                raise UserError(f"{self._stuck} engines are stuck: start a new process")
            self._engine = Engine(self._config)
        self.gate = Gate(self._inner)
        self._engine.set_controller(self.gate)
        return self._engine

    def drop(self, stuck: bool) -> None:
        """The engine cannot be used any more. stuck: its thread never returned, so it is left alone."""
        engine, self._engine = self._engine, None
        self._stuck += stuck
        if engine is not None and not stuck:
            _close(engine)

    def close(self) -> None:
        """Free the engine. A second call does nothing."""
        self.drop(stuck=False)


def _close(engine: Engine) -> None:
    try:
        engine.close()
    except Exception as error:  # it broke in the middle of a step, or the device failed
        log.warning("closing a broken engine: %s", reason(error))


class LiveEpisode:
    """One load on one engine, decision by decision; the load's time is the episode's.

    patience: seconds that the engine may take from one decision to the next, idle time left out.
    """

    def __init__(
        self, holder: LiveEngine, scenario: Scenario, load: Workload, patience: float = PATIENCE
    ) -> None:
        self._holder, self._load, self._patience = holder, load, patience
        self.engine = engine = holder.ready()
        self._gate = holder.gate  # the holder's is another one in the next episode
        engine.set_slo(scenario.bounds)
        read = scenario.own.read

        def submit(arrival: Arrival, params: SamplingParams) -> RequestHandle:
            return submit_to(engine, read, arrival, params)

        self._runner = Runner(
            engine, load, every=1 << 30, submit=submit, contexts=scenario.contexts
        )
        self._followed = 0
        self._decided = engine.control.decisions
        self._steps = engine.steps
        self._stop = False
        self._due = self._over = False
        self._thread = threading.Thread(target=self._serve, name="kvpolicy-live", daemon=True)

    def begin(self) -> Outcome:
        """On to the first decision (graphs are captured before the load begins)."""
        self._runner.start()
        self._measuring = Measuring(self.engine, self.engine.control.slo)
        self._thread.start()
        return self._wait()

    def advance(self) -> Outcome:
        """Let the controller inside decide, and on to the next decision."""
        if not self._due:
            raise RuntimeError("no decision is due: the episode has ended")
        self._due = False
        self._gate.open.put(True)
        return self._wait()

    def close(self) -> None:
        """Give the episode up: what runs is cancelled, the engine stays for the next one."""
        if self._over:
            return
        self._over = self._stop = True
        self._gate.open.put(False)
        if self._thread.ident is not None:  # None: the episode could not begin
            self._thread.join(self._patience)
        self._settle(self._thread.is_alive())

    # --- the caller's side -------------------------------------------------------------------------

    def _wait(self) -> Outcome:
        idle = max(0.0, self._load.end - self._runner.now) if not self._load.closed else 0.0
        try:
            message: Message = self._gate.told.get(timeout=self._patience + idle)
        except Empty:
            self._over = self._stop = True
            self._gate.open.put(False)  # should it come back, it ends
            self._settle(stuck=True)
            return self._ended(f"stuck: nothing for {self._patience + idle:.0f} s", failed=True)
        if isinstance(message, Observation):
            self._due = True
            return self._outcome(message, "")
        self._over = True
        self._thread.join(self._patience)
        if isinstance(message, BaseException):
            outcome = self._ended(f"the engine failed: {reason(message)}", failed=True)
            self._holder.drop(self._thread.is_alive())
            return outcome
        outcome = self._ended(message, failed=False)
        self._settle(self._thread.is_alive())
        return outcome

    def _outcome(self, observation: Observation | None, ended: str) -> Outcome:
        for handle in self._runner.handles[self._followed :]:
            self._measuring.follow(handle, self._runner.due.get(handle.id))
        self._followed = len(self._runner.handles)
        control = self.engine.control
        decision = control.log[-1] if control.decisions > self._decided else None
        steps, self._steps = self.engine.steps - self._steps, self.engine.steps
        return Outcome(observation, self._measuring.terms(), steps, decision, ended)

    def _ended(self, why: str, failed: bool) -> Outcome:
        try:
            found = self._outcome(None, why)
        except Exception as error:  # a device that failed answers nothing any more
            log.warning("the end of an episode cannot be measured: %s", reason(error))
            found = Outcome(None, Terms(0.0, 0, 0, 0, 0, 0, 0.0, 0), 0, None, why)
        return Outcome(None, found.terms, found.steps, found.decision, why, failed)

    def _settle(self, stuck: bool) -> None:
        """Cancel what is left of the load."""
        if stuck:
            self._holder.drop(stuck=True)
            return
        try:
            for handle in self._runner.handles:
                handle.cancel()
        except Exception as error:
            log.warning("cancelling what an episode left: %s", reason(error))
            self._holder.drop(stuck=False)

    # --- the engine's thread -----------------------------------------------------------------------

    def _serve(self) -> None:
        gate, runner = self._gate, self._runner
        try:
            while not self._stop and runner.ready() and runner.now < self._load.end:
                runner.worked(self.engine.step())
        except BaseException as error:
            gate.told.put(error)
        else:
            gate.told.put("the load is over")
