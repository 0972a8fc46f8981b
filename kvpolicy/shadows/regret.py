"""How far policies are from the best in hindsight on a load, before anyone trains on it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvpolicy.config import EngineConfig, SamplingParams
from kvpolicy.engine.engine import Engine
from kvpolicy.models.loader import DecodeModel
from kvpolicy.recording import Recording
from kvpolicy.recording.oracle import BELADY, CLAIRVOYANT, Oracle
from kvpolicy.recording.recorder import Recorder
from kvpolicy.shadows.watcher import Shadows
from kvpolicy.workloads.runner import Runner
from kvpolicy.workloads.workload import Workload

__all__ = ["Regret", "regrets"]


@dataclass(frozen=True, slots=True)
class Regret:
    """Rows moved by one policy on one load, per layer. share: rows beyond the bound, over those selected.

    exact: on these batches a live run moves these rows; else its own memory would have made others.
    """

    policy: str
    fetched_rows: int
    promoted_rows: int
    regret_rows: int
    share: float
    exact: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def regrets(
    config: EngineConfig,
    workload: Workload,
    controllers: Sequence[str],
    sampling: SamplingParams | None = None,
    model: DecodeModel | None = None,
    on_step: Callable[[Engine], None] | None = None,
) -> list[Regret]:
    """One line per controller, then the best split by hindsight and the bound.

    The first controller runs the load and makes the batches; all of them, it too, stand in its shadow,
    so that the same is counted of each. UserError for a controller that cannot be had, a load that
    does not decode, or a model whose stores have rows of different sizes.
    """
    first = config.model_copy(update={"controller": controllers[0]})
    with tempfile.TemporaryDirectory(prefix="kvpolicy-regret-") as folder:
        path = Path(folder) / "load.npz"
        with (
            Engine(first, model) as engine,
            Recorder(engine, path) as recorder,
            Shadows(engine, controllers) as shadows,
        ):
            result = Runner(engine, workload, sampling, on_step=on_step).run()
            reports = shadows.report()
            recorder.finish(result.outputs, engine.record(), result.timeline.origin)
        oracle = Oracle(Recording(path))
    bound, wanted = oracle.bound(), max(oracle.wanted, 1)

    def line(policy: str, fetched: int, promoted: int, exact: bool = True) -> Regret:
        beyond = fetched + promoted - bound.moved
        return Regret(policy, fetched, promoted, beyond, beyond / wanted, exact)

    found = [
        line(r["controller"], r["fetched_rows"], r["promoted_rows"], r["exact"]) for r in reports
    ]
    for eviction in ("clock", BELADY):
        row = oracle.row(eviction, CLAIRVOYANT)
        found.append(line(f"{CLAIRVOYANT} split, {eviction}", row.fetched, row.promoted))
    return [*found, line("bound (Belady over all)", bound.fetched, 0)]
