"""Requests under a hostile controller on the wall clock: what must hold in any case."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from abuse import PARAMS, PROMPTS, Alone, Setting, config, device_mib
from hostile import FALLBACK_KINDS

from kvpolicy import Engine
from kvpolicy.controllers import ControllerLike
from kvpolicy.controllers.decider import LOG_LENGTH
from kvpolicy.models.loader import DecodeModel

# A controller may take the deadline, and as much again where the machine starts its thread late. The
# bound is what a step may take besides that: a step of this model takes 10 ms, the rest is for a
# machine that does something else.
DEADLINE_MS = 5.0
STEP_BOUND = 0.5
# Where the kind of failure is the point, a busy machine must not turn it into "late".
PATIENT_MS = 20_000.0


class Run:
    """Two requests under a controller on the wall clock, with memory for little more than one.

    slowest: seconds of the longest step. log: every decision. metrics: of the end.
    """

    def __init__(
        self,
        model: DecodeModel,
        alone: dict[int, Alone],
        controller: ControllerLike,
        each_step: Callable[[Engine], None] = lambda engine: None,
        **values: Any,
    ) -> None:
        values = {"clock": "wall", "decision_deadline_ms": PATIENT_MS, **values}
        setting = Setting("resident", chunk=40, concurrency=2, interval=1, spare=9)
        mib = device_mib(model, setting, list(alone), {})
        with Engine(config(setting, mib, values), model=model) as engine:
            before = engine.memory.usage(), engine.memory.arena.frames.owners()
            engine.set_controller(controller)
            handles = {i: engine.submit(PROMPTS[i], PARAMS[i]) for i in alone}
            self.slowest = 0.0
            while not all(handle.done for handle in handles.values()):
                start = time.perf_counter()
                engine.step()
                self.slowest = max(self.slowest, time.perf_counter() - start)
                each_step(engine)
            for which, handle in handles.items():
                output = handle.result()
                assert tuple(output.tokens) == alone[which].tokens
                assert output.logits_sha256 == alone[which].digests[-1]
            assert (engine.memory.usage(), engine.memory.arena.frames.owners()) == before
            engine.check_integrity()
            self.log, self.metrics = list(engine.control.log), engine.metrics()
        assert self.metrics["controller_decisions"] == len(self.log) < LOG_LENGTH
        self.check_counts()

    def check_counts(self) -> None:
        """Each event is counted once, and has its reason in the log."""
        failed = [d for d in self.log if d.fallback]
        altered = [d for d in self.log if d.projected.changed]
        assert self.metrics["controller_fallbacks"] == len(failed)
        assert self.metrics["controller_projections"] == len(altered)
        assert all(d.reason and d.fallback in FALLBACK_KINDS for d in failed)
        assert all(d.reason for d in altered)
