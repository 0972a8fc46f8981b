"""What one decode step is made of, part by part."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from kvpolicy.bench.load import Load, OnStep, fill, with_memory
from kvpolicy.bench.parts import (
    ELEMENTWISE,
    HOST,
    PARTS,
    PartClock,
    TimedOps,
    part_of,
    timed_memory,
)
from kvpolicy.bench.timing import wait
from kvpolicy.config import EngineConfig
from kvpolicy.engine.engine import Engine
from kvpolicy.models.loader import DecodeModel

# Between two kernels of a graph the device is idle for about a microsecond; what is longer than this is a
# wait for the host.
LAUNCH_GAP_US = 5.0
PROFILED_STEPS = 10

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class StepReport:
    """One decode step, milliseconds. parts: by name. method: ``kernels``, a profiler's times of the kernels
    of replayed graphs, or ``calls``, wall time of calls one by one (on a GPU each waits, so the sum is more
    than ``step_ms``, which is measured without). host_ms: of Python; on a GPU beside the device's work.
    kernel_ms: any kernel runs; gap_ms: between two of them; both None for calls. busy_share: of the step,
    kernels and these gaps. running: requests."""

    concurrency: int
    running: int
    context: int
    method: str
    step_ms: float
    host_ms: float
    parts: dict[str, float]
    launches: float | None = None
    kernel_ms: float | None = None
    gap_ms: float | None = None
    kernel_share: float | None = None
    busy_share: float | None = None
    miss_rate: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def measure_step(
    config: EngineConfig,
    model: DecodeModel,
    load: Load,
    concurrency: int,
    share: float | None,
    on_step: OnStep | None = None,
) -> StepReport:
    """Fill an engine, time steps as they are, then take some apart. share: see ``with_memory``; None where
    the config says how much memory there is."""
    config = config.model_copy(update={"max_concurrency": concurrency})
    if share is not None:
        config = with_memory(config, model, load, concurrency, share)
    with Engine(config, model) as engine:
        running = fill(engine, load, concurrency, on_step)
        context = sum(r.computed for r in engine.scheduler.running) // max(1, running)
        before, waited = engine.totals.busy_seconds, engine.totals.waited_seconds
        start = time.perf_counter()
        for _ in range(load.steps):
            engine.step()
        wait(engine.device)
        step_ms = (time.perf_counter() - start) * 1e3 / load.steps
        own = engine.totals.busy_seconds - before - (engine.totals.waited_seconds - waited)
        known: dict[str, Any] = {
            "concurrency": concurrency,
            "running": running,
            "context": context,
            "step_ms": step_ms,
            "miss_rate": engine.metrics()["miss_rate"],
        }
        steps = min(PROFILED_STEPS, load.steps)
        if engine.device.type == "cuda" and model.backend == "triton":
            return _by_kernels(engine, steps, known, host_ms=own * 1e3 / load.steps)
        return _by_calls(engine, steps, known)


# --- kernels -----------------------------------------------------------------------------------------


def _by_kernels(engine: Engine, steps: int, known: dict[str, Any], host_ms: float) -> StepReport:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            engine.step()
        wait(engine.device)
    kernels = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type.name == "CUDA"
    ]
    parts: dict[str, float] = defaultdict(float)
    for name, start, end in kernels:
        parts[part_of(name)] += (end - start) / steps / 1e3
    busy, gaps = busy_and_gaps([(start, end) for _, start, end in kernels])
    kernel_ms, gap_ms, step_ms = busy / steps / 1e3, gaps / steps / 1e3, known["step_ms"]
    return StepReport(
        **known,
        method="kernels",
        host_ms=host_ms,
        parts={part: parts.get(part, 0.0) for part in PARTS if part != HOST},
        launches=len(kernels) / steps,
        kernel_ms=kernel_ms,
        gap_ms=gap_ms,
        kernel_share=min(1.0, kernel_ms / step_ms),
        busy_share=min(1.0, (kernel_ms + gap_ms) / step_ms),
    )


def busy_and_gaps(intervals: Sequence[Interval], longest: float = LAUNCH_GAP_US) -> Interval:
    """Time in which any of the intervals runs, and the sum of the gaps between them that are not longer
    than ``longest``. All in one unit."""
    busy = gaps = 0.0
    until: float | None = None
    for start, end in sorted(intervals):
        if until is not None and start > until:
            gap = start - until
            gaps += gap if gap <= longest else 0.0
        elif until is not None:
            start = until
        busy += max(0.0, end - start)
        until = end if until is None else max(until, end)
    return busy, gaps


# --- calls -------------------------------------------------------------------------------------------


def _by_calls(engine: Engine, steps: int, known: dict[str, Any]) -> StepReport:
    clock = PartClock(engine.device)
    with _taken_apart(engine, clock):
        step = clock.timed(HOST, engine.step)
        for _ in range(steps):
            step()
    parts = {part: clock.seconds.get(part, 0.0) * 1e3 / steps for part in PARTS}
    return StepReport(**known, method="calls", host_ms=parts.pop(HOST), parts=parts)


@contextmanager
def _taken_apart(engine: Engine, clock: PartClock) -> Iterator[None]:
    """Inside, what an engine's steps call is timed."""
    model: Any = engine.model
    memory = engine.memory
    kept, kept_memory, forward = model.ops, memory.ops, model.forward
    model.ops, memory.ops = TimedOps(kept, clock), timed_memory(kept_memory, clock)
    model.forward = clock.timed(ELEMENTWISE, forward)
    try:
        yield
    finally:
        del model.forward  # the class has it
        model.ops, memory.ops = kept, kept_memory
