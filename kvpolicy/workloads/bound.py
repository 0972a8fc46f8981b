"""The largest concurrency whose time per token holds a bound, by bisection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kvpolicy.config import SamplingParams
from kvpolicy.engine.engine import Engine
from kvpolicy.telemetry.latency import ROUNDING_S
from kvpolicy.workloads.runner import Runner, RunResult
from kvpolicy.workloads.workload import Workload

__all__ = ["MOST_WAITING", "WAVES", "Bound", "Probe", "largest_concurrency", "probe"]

# Of N requests at a time, 3 x N are run and the second N measured: the first start together, and
# beside the last the engine runs empty.
WAVES = 3
# More than this part of the requests' time in the system spent waiting for memory, and fewer than
# N are running: the engine does not sustain N, however fast the ones that run are.
MOST_WAITING = 0.05


@dataclass(frozen=True, slots=True)
class Probe:
    """One level that was tried. tpot: the measured requests' median time per token, seconds.

    waiting_share: of the measured requests' time in the system, the part before admission.
    tokens_per_s: generated while the level was held, per second of the engine's clock.
    """

    level: int
    tpot: float | None
    waiting_share: float
    tokens_per_s: float | None

    def limit(self, bound: float) -> Literal["tpot", "memory"] | None:
        """What keeps this level from being sustained at ``bound`` seconds a token, if anything."""
        if self.waiting_share > MOST_WAITING:
            return "memory"
        slow = self.tpot is not None and self.tpot > bound + ROUNDING_S
        return "tpot" if slow else None

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "concurrency": self.level,
            "tpot_p50_ms": None if self.tpot is None else self.tpot * 1e3,
            "waiting_share": self.waiting_share,
            "tokens_per_s": self.tokens_per_s,
        }


@dataclass(frozen=True)
class Bound:
    """What the search found. level: the largest that holds, 0 if none does. probes: in the order
    they were made. limited_by: why the next level does not hold, None if ``most`` holds."""

    bound: float
    level: int
    limited_by: Literal["tpot", "memory"] | None
    probes: tuple[Probe, ...]

    @property
    def best(self) -> Probe | None:
        """The probe of the level that was found."""
        return next((probe for probe in self.probes if probe.level == self.level), None)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        best = self.best
        return {
            "tpot_bound_ms": self.bound * 1e3,
            "percentile": "p50",
            "concurrency": self.level,
            "limited_by": self.limited_by,
            "tokens_per_s": None if best is None else best.tokens_per_s,
            "tpot_p50_ms": None if best is None else best.to_dict()["tpot_p50_ms"],
            "probes": [probe.to_dict() for probe in self.probes],
        }


def probe(
    engine: Engine,
    workload: Workload,
    level: int,
    sampling: SamplingParams | None = None,
    on_step: Callable[[Engine], None] | None = None,
) -> tuple[Probe, RunResult]:
    """Run the workload's requests ``level`` at a time on a new engine and measure."""
    held = workload.at_level(level, WAVES * level)
    result = Runner(engine, held, sampling, on_step=on_step).run()
    requests = [output.latencies for output in result.outputs]
    measured = requests[level : 2 * level]
    times = [r.tpot for r in measured if r.tpot is not None]
    waits = sum(r.wait or 0.0 for r in measured)
    stays = sum((r.last_token or r.arrived) - r.arrived for r in measured)
    found = Probe(
        level=level,
        tpot=float(np.median(times)) if times else None,
        waiting_share=waits / stays if stays else 0.0,
        tokens_per_s=_rate(result, requests[level].arrived, requests[-1].arrived),
    )
    return found, result


def _rate(result: RunResult, start: float, end: float) -> float | None:
    """Tokens per second between two moments, read off the samples."""
    if end <= start:
        return None
    time, tokens = (result.timeline.column(name) for name in ("time", "generated_tokens"))
    first, last = np.interp([start, end], time, tokens)
    return float((last - first) / (end - start))


def largest_concurrency(measure: Callable[[int], Probe], bound: float, most: int) -> Bound:
    """Bisect the levels from 1 to ``most`` for the largest that holds ``bound`` seconds a token.

    measure: tries a level. More requests at a time are taken to be no faster.
    """
    holds, fails = 0, most + 1
    probes: list[Probe] = []
    limit: Literal["tpot", "memory"] | None = None
    while fails - holds > 1:
        level = (holds + fails) // 2
        probes.append(measure(level))
        reason = probes[-1].limit(bound)
        if reason is None:
            holds = level
        else:
            fails, limit = level, reason
    return Bound(bound, holds, limit, tuple(probes))
