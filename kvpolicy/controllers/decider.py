"""The decider: asks a controller under a deadline, and falls back when it fails.

A controller may do anything: raise, return nonsense, sleep, change what it is shown. A decision always
comes back, made by the controller or by the fallback, and says which. It is asked in a thread of its own,
or in the process that it brings (:class:`~kvpolicy.controllers.process.ProcessController`).
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from dataclasses import replace
from queue import SimpleQueue

from kvpolicy.control.decision import Decision, DecisionWriter
from kvpolicy.control.observation import Observation
from kvpolicy.control.plan import Plan
from kvpolicy.control.projection import project
from kvpolicy.controllers.adaptive import Adaptive
from kvpolicy.controllers.answer import Failure, answer
from kvpolicy.controllers.base import Controller
from kvpolicy.controllers.process import ProcessController

log = logging.getLogger(__name__)

# Decisions kept for inspection. One of 128 requests takes about 50 KB.
LOG_LENGTH = 256
# Threads of replaced controllers that have not returned yet. With as many, no new one is started.
MOST_STUCK = 8


class _Job:
    """One question to a controller. begun: when its thread got to it. result is set before done."""

    def __init__(self, observation: Observation) -> None:
        self.observation = observation
        self.begun: float | None = None
        self.result: Plan | Failure | None = None
        self.done = threading.Event()


class _Worker:
    """One daemon thread that asks one controller, until it is stopped or nobody holds it any more."""

    def __init__(self, controller: Controller) -> None:
        jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._jobs = jobs
        self.job: _Job | None = None
        self.thread = threading.Thread(
            target=_serve, args=(controller, jobs), name="kvpolicy-controller", daemon=True
        )
        self.thread.start()
        self.stop = weakref.finalize(self, jobs.put, None)

    @property
    def busy(self) -> bool:
        return self.job is not None and not self.job.done.is_set()

    def ask(self, observation: Observation, seconds: float) -> Plan | Failure | None:
        """The answer, or None if there is none in time; then it is dropped when it comes.

        The time until the thread runs is the machine's, not the controller's: on a crowded one of two
        cores 0.4 % of wake-ups took over 5 ms. So it is added, up to the same number of seconds.
        """
        job = self.job = _Job(observation)
        self._jobs.put(job)
        if not job.done.wait(seconds):
            now = time.perf_counter()
            job.done.wait(seconds if job.begun is None else job.begun + seconds - now)
        return job.result if job.done.is_set() else None


def _serve(controller: Controller, jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.begun = time.perf_counter()
        job.result = answer(controller, job.observation, interrupts=False)
        job.done.set()
        del job


class Decider:
    """Owns a controller, with the thread or process it is asked in, and the log of its decisions.

    deadline: seconds that ``decide`` may take; 0 asks inline and without one (where steps are the clock
    there is no wall time). fallback: decides in the controller's place. writer: gets every decision.
    decisions, projections, fallbacks: how often a plan was asked for, altered to fit, and made by
    the fallback.
    """

    def __init__(
        self,
        controller: Controller,
        deadline: float = 0.0,
        fallback: Controller | None = None,
        writer: DecisionWriter | None = None,
    ) -> None:
        self.controller = controller
        self.deadline = deadline
        self.log: deque[Decision] = deque(maxlen=LOG_LENGTH)
        self.decisions = self.projections = self.fallbacks = 0
        self._fallback = Adaptive() if fallback is None else fallback
        self._writer = writer
        self._worker: _Worker | None = None
        self._stuck: list[threading.Thread] = []
        self._warned: set[str] = set()

    def set_controller(self, controller: Controller) -> None:
        """Replace the controller, even while it is busy: then its thread ends when its call does, its
        process at once."""
        self._leave()
        self.controller = controller
        self._warned.clear()

    def close(self) -> None:
        """Let go of the thread without waiting for it, end the process, and close the log file."""
        self._leave()
        if self._writer is not None:
            self._writer.close()

    def _leave(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop()
            if worker.busy:
                self._stuck.append(worker.thread)
        if isinstance(self.controller, ProcessController):
            self.controller.close()

    def decide(self, observation: Observation) -> Decision:
        """A decision that can be applied. Raises nothing but the user's KeyboardInterrupt."""
        asked = time.perf_counter()
        found = self._ask(observation)
        seconds = time.perf_counter() - asked
        plan, kind, reason = (
            (self._replace(observation, found), found.kind, found.text)
            if isinstance(found, Failure)
            else (found, "", "")
        )
        projected = project(plan, observation)
        if projected.changed:
            log.info("plan of step %d was altered: %s", observation.step, projected.reason)
        reason = "; ".join(filter(None, (reason, projected.reason)))
        decision = Decision(observation.step, observation, plan, projected, reason, kind, seconds)
        self.decisions += 1
        self.projections += projected.changed
        self.log.append(decision)
        if self._writer is not None:
            self._writer.write(decision)
        return decision

    def _ask(self, observation: Observation) -> Plan | Failure:
        if self.deadline and isinstance(self.controller, ProcessController):
            return self.controller.ask(observation, self.deadline)
        shown = _copy(observation)
        if not self.deadline:
            return answer(self.controller, shown, interrupts=True)
        worker = self._worker or self._start()
        if isinstance(worker, Failure):
            return worker
        if worker.busy:
            return Failure("busy", "the controller is still at an earlier decision")
        found = worker.ask(shown, self.deadline)
        if found is None:
            return Failure("late", f"no decision within {self.deadline * 1e3:g} ms")
        return found

    def _start(self) -> _Worker | Failure:
        self._stuck = [thread for thread in self._stuck if thread.is_alive()]
        if len(self._stuck) >= MOST_STUCK:
            return Failure("stuck", f"{MOST_STUCK} replaced controllers have not returned yet")
        try:
            self._worker = _Worker(self.controller)
        except RuntimeError as error:  # no more threads, or the interpreter is going down
            return Failure("stuck", str(error))
        return self._worker

    def _replace(self, observation: Observation, failure: Failure) -> Plan:
        """The fallback's plan; every request keeps its budget if that fails too."""
        self.fallbacks += 1
        level = logging.DEBUG if failure.kind in self._warned else logging.WARNING
        self._warned.add(failure.kind)
        log.log(
            level,
            "controller %s failed at step %d, the fallback decides: %s",
            _name(self.controller),
            observation.step,
            failure.text,
        )
        plan = answer(self._fallback, observation, interrupts=True)
        if isinstance(plan, Failure):
            log.error("the fallback failed at step %d: %s", observation.step, plan.text)
            return Plan.keep(observation)
        return plan


def _name(controller: Controller) -> str:
    return (
        controller.spec if isinstance(controller, ProcessController) else type(controller).__name__
    )


def _copy(observation: Observation) -> Observation:
    """A copy to show: what a controller does to it (object.__setattr__) stays with it."""
    return replace(
        observation,
        stores=tuple(replace(store) for store in observation.stores),
        requests=tuple(replace(request) for request in observation.requests),
        curves=tuple(replace(curve) for curve in observation.curves),
    )
