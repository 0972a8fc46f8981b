"""Tokens per second of decoding under several controllers, with the same requests and memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvpolicy.bench.load import Load, OnStep, fill
from kvpolicy.bench.timing import wait
from kvpolicy.config import EngineConfig
from kvpolicy.engine.engine import Engine
from kvpolicy.models.loader import DecodeModel


@dataclass(frozen=True, slots=True)
class Run:
    """One engine's measured steps. running: requests that decoded; the others waited for memory.
    tpot_ms: wall time per step, in which each of them gets a token. miss_rate: of these steps."""

    running: int
    seconds: float
    tokens: int
    steps: int
    miss_rate: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def tpot_ms(self) -> float:
        return self.seconds * 1e3 / self.steps


@dataclass(frozen=True, slots=True)
class Cell:
    """Medians over the rounds of one controller at one concurrency."""

    concurrency: int
    controller: str
    running: int
    tokens_per_s: float
    tpot_ms: float
    miss_rate: float
    rounds: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON. rounds: tokens/s of each."""
        return asdict(self)


def measure_cells(
    config: EngineConfig,
    model: DecodeModel,
    load: Load,
    concurrency: int,
    controllers: Sequence[str],
    rounds: int,
    on_step: OnStep | None = None,
) -> list[Cell]:
    """Every controller in a new engine, ``rounds`` times, in turn forwards and backwards so that none
    always comes first. on_step: called after each step that is not timed."""
    runs: dict[str, list[Run]] = {name: [] for name in controllers}
    for number in range(rounds):
        for name in controllers if number % 2 == 0 else reversed(controllers):
            own = config.model_copy(update={"controller": name})
            runs[name].append(_run(own, model, load, concurrency, on_step))
    return [_cell(concurrency, name, found) for name, found in runs.items()]


def _run(
    config: EngineConfig, model: DecodeModel, load: Load, concurrency: int, on_step: OnStep | None
) -> Run:
    with Engine(config, model) as engine:
        running = fill(engine, load, concurrency, on_step)
        before, counted = engine.metrics(), engine.totals.generated_tokens
        start = time.perf_counter()
        for _ in range(load.steps):
            engine.step()
        wait(engine.device)
        seconds = time.perf_counter() - start
        after = engine.metrics()
        looked = after["unique_rows"] - before["unique_rows"]
        return Run(
            running=running,
            seconds=seconds,
            tokens=engine.totals.generated_tokens - counted,
            steps=load.steps,
            miss_rate=(after["fetched_rows"] - before["fetched_rows"]) / looked if looked else 0.0,
        )


def _cell(concurrency: int, controller: str, runs: Sequence[Run]) -> Cell:
    return Cell(
        concurrency=concurrency,
        controller=controller,
        running=min(run.running for run in runs),
        tokens_per_s=statistics.median(run.tokens_per_s for run in runs),
        tpot_ms=statistics.median(run.tpot_ms for run in runs),
        miss_rate=statistics.median(run.miss_rate for run in runs),
        rounds=tuple(run.tokens_per_s for run in runs),
    )
