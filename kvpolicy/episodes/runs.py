"""Live runs of scenarios, kept in a file, so that they can be fitted and compared without the machine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvpolicy.engine.engine import Engine
from kvpolicy.episodes.scenarios import find
from kvpolicy.episodes.serving import Served, serve
from kvpolicy.errors import UserError

__all__ = ["Runs", "measure", "read_runs"]


@dataclass(frozen=True)
class Runs:
    """Live runs and the run record of the engine that made them."""

    runs: tuple[Served, ...]
    record: dict[str, Any]

    def write(self, path: Path) -> None:
        """As JSON."""
        values = {"record": self.record, "runs": [run.to_dict() for run in self.runs]}
        path.write_text(json.dumps(values) + "\n")


def read_runs(paths: Iterable[Path]) -> Runs:
    """Runs of several files, with the record of the first. UserError for anything else."""
    found: list[Served] = []
    record: dict[str, Any] = {}
    for path in paths:
        try:
            values = json.loads(path.read_text())
            found += [Served.from_dict(each) for each in values["runs"]]
            record = record or values["record"]
        except OSError as error:
            raise UserError(f"runs {str(path)!r}: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise UserError(f"runs {str(path)!r}: it holds no live runs ({error})") from None
    return Runs(tuple(found), record)


def measure(
    plan: Sequence[tuple[str, Sequence[str]]],
    seed: int,
    split: str = "test",
    say: Callable[[str], None] = lambda line: None,
    save: Path | None = None,
    seconds: float = 1e9,
    **changes: Any,
) -> Runs:
    """Serve scenarios, each under its controllers, on the engine of this machine, one after the other.

    plan: (scenario, controllers). changes: to the scenarios' engine configs. save: written after every
    run. seconds: no run begins after
    this. One engine serves all scenarios that share a config.
    """
    start = time.perf_counter()
    found: list[Served] = []
    record: dict[str, Any] = {}
    engine: Engine | None = None
    config = None
    try:
        for name, controllers in plan:
            scenario = find(name)
            wanted = scenario.config(**changes)
            if engine is None or wanted != config:
                if engine is not None:
                    engine.close()
                engine, config = Engine(wanted), wanted
                record = record or engine.record()
                say(f"[{time.perf_counter() - start:6.1f} s] engine for {name}")
            for controller in controllers:
                if time.perf_counter() - start > seconds:
                    say("no time is left")
                    return Runs(tuple(found), record)
                load = scenario.load(split, np.random.default_rng(seed))
                served = serve(engine, scenario, controller, load)
                found.append(served)
                say(
                    f"[{time.perf_counter() - start:6.1f} s] {name:14s} {controller:20s} "
                    f"{served.tokens_per_s:8,.0f} tokens/s, in the bounds "
                    f"{served.goodput(scenario.bounds):8,.0f}, misses {served.miss_rate:6.2%}, "
                    f"{served.counts['steps']:,.0f} steps, {served.counts['controller_fallbacks']:.0f} "
                    f"fallbacks, {served.counts['preemptions']:.0f} preempted"
                )
                if save is not None:
                    Runs(tuple(found), record).write(save)
    finally:
        if engine is not None:
            engine.close()
    return Runs(tuple(found), record)
