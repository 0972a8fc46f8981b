"""The search for the most requests at a time that hold a bound on the time per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvpolicy.cli import interrupts
from kvpolicy.cli.output import shown, table
from kvpolicy.cli.progress import step_progress
from kvpolicy.cli.run import Decoded, Task, decoded
from kvpolicy.config import EngineConfig

if TYPE_CHECKING:
    from kvpolicy.workloads.bound import Bound, Probe

__all__ = ["bound_table", "search"]

WHY = {"tpot": "time per token", "memory": "memory", None: "--max-concurrency"}


def search(config: EngineConfig, task: Task, bound: float, label: str) -> tuple[Decoded, Bound]:
    """Bisect up to ``max_concurrency``, with a new engine at every level.

    bound: seconds per token. Returns the run at the level that was found (of the lowest that was
    tried if none holds) and what was found.
    """
    with interrupts.loading():
        from kvpolicy.engine.engine import Engine
        from kvpolicy.workloads.bound import largest_concurrency, probe

        engine = Engine(config)
    model = engine.model
    engine.close()
    runs: dict[int, Decoded] = {}

    def measure(level: int) -> Probe:
        with Engine(config, model) as engine, step_progress(f"{label} at {level}") as on_step:
            found, result = probe(engine, task.workload, level, task.sampling, on_step)
            runs[level] = decoded(engine, result, task)
        return found

    found = largest_concurrency(measure, bound, config.max_concurrency)
    return runs.get(found.level, runs[min(runs)]), found


def bound_table(
    controllers: Sequence[str], bounds: Sequence[Bound], equal: Sequence[bool], counts_steps: bool
) -> str:
    """One row per controller."""
    unit = "tokens/step" if counts_steps else "tokens/s"
    rows = [
        [
            name,
            f"{found.level:,}",
            WHY[found.limited_by],
            shown(found.best and found.best.tpot, "{:,.2f}", 1e-3),
            shown(found.best and found.best.tokens_per_s, "{:,.2f}", 1e3 if counts_steps else 1.0),
            "equal" if same else "DIFFERENT",
        ]
        for name, found, same in zip(controllers, bounds, equal, strict=True)
    ]
    heading = ["controller", "at a time", "limited by", "TPOT p50, ms", unit, "outputs"]
    return table(heading, rows)
