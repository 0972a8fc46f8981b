"""Diagnostics of a running engine and of its shadows."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvpolicy.control.decision import Decision
from kvpolicy.engine.engine import Engine
from kvpolicy.engine.loop import ControlLoop
from kvpolicy.memory.hierarchy import Hierarchy
from kvpolicy.shadows import Shadows
from kvpolicy.telemetry.diagnostics import PolicyDiagnostics, clear, run_names

__all__ = ["LiveDiagnostics", "residency"]

# Columns of a map of positions.
BINS = 240


def residency(memory: Hierarchy, bins: int = BINS) -> dict[int, NDArray[np.float64]]:
    """request id -> share of the rows that are hot, by position: float64 [bins] over the longest context on
    the device, NaN beyond the request's own. Waits for the device."""
    layers = np.array([store.store.n_layers for store in memory.layout.stores], dtype=np.float64)
    longest = max((r.committed for r in memory.requests.values()), default=0)
    found = {}
    for number, request in memory.requests.items():
        if not request.committed:
            continue
        parts = []
        for index, hot in enumerate(request.hot):
            held = hot.resident(request.committed_entries(index)).to(torch.float64).cpu().numpy()
            parts.append(_binned(held, request.committed, longest, bins))
        found[number] = np.average(np.stack(parts), axis=0, weights=layers)
    return found


def _binned(held: NDArray[np.float64], tokens: int, longest: int, bins: int) -> NDArray[np.float64]:
    """Entries to bins of positions: the mean of those that a bin touches."""
    edges = np.linspace(0, longest, bins + 1) * (held.size / tokens)
    low = np.minimum(edges[:-1].astype(np.int64), max(held.size - 1, 0))
    high = np.clip(np.ceil(edges[1:]).astype(np.int64), low + 1, max(held.size, 1))
    total = np.concatenate(([0.0], np.cumsum(held)))
    if not held.size:
        return np.full(bins, np.nan)
    shares: NDArray[np.float64] = (total[high] - total[low]) / (high - low)
    return np.where(edges[:-1] < held.size, shares, np.nan)


class LiveDiagnostics:
    """Writes an engine's events into ``folder`` and those of each shadow into ``shadow=NAME`` below it, at
    every sample that it is given."""

    def __init__(self, engine: Engine, folder: Path, shadows: Shadows | None = None) -> None:
        clear(folder)
        self._engine, self._shadows = engine, shadows
        self._own = PolicyDiagnostics(folder)
        names = run_names([policy.name for policy in shadows.policies] if shadows else [])
        self._theirs = [PolicyDiagnostics(folder / f"shadow={name}") for name in names]
        self._told: dict[ControlLoop, int] = {}
        self._seen = {"tpot": 0, "ttft": 0, "cycles": 0, "committed": 0}

    def __call__(self, sample: Mapping[str, Any]) -> None:
        """Write a point. sample: ``asdict(engine.sample())``."""
        engine, totals = self._engine, self._engine.totals
        self._own.write(
            sample,
            self._new(engine.control),
            tpot=self._take("tpot", totals.tpot, totals.tpot_count),
            ttft=self._take("ttft", totals.ttft, totals.ttft_count),
            accepted_length=self._accepted_length(),
            residency=lambda: residency(engine.memory),
        )
        if self._shadows is None:
            return
        samples = self._shadows.samples(dict(sample))
        pairs = zip(self._theirs, self._shadows.policies, samples, strict=True)
        for writer, policy, own in pairs:
            writer.write(_without_time(own), self._new(policy.control))

    def _new(self, control: ControlLoop) -> list[Decision]:
        """Decisions since the last point, as many as the log keeps."""
        new = control.decisions - self._told.get(control, 0)
        self._told[control] = control.decisions
        return list(control.log)[-new:] if new else []

    def _new_of(self, name: str, total: int) -> int:
        """How much a total has grown since the last point."""
        new, self._seen[name] = total - self._seen[name], total
        return new

    def _take(self, name: str, kept: deque[float], total: int) -> list[float]:
        """Latencies of requests that have ended since the last point, in seconds, as many as are kept. total:
        how many there were ever."""
        new = min(self._new_of(name, total), len(kept))
        return [kept[i - new] for i in range(new)]

    def _accepted_length(self) -> float | None:
        """Tokens per verification since the last point, None where nothing was verified."""
        if self._engine.speculator is None:
            return None
        counts = self._engine.speculator.counts
        cycles = self._new_of("cycles", counts.cycles)
        committed = self._new_of("committed", counts.committed)
        return committed / cycles if cycles else None

    def note(self, text: str) -> None:
        """Something that happened to the policy now, a swap for instance."""
        self._own.note(text, self._engine.steps)

    def finish(self, record: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
        """The record and what came of it; metrics of a shadow are its report."""
        config = {**record.get("config", {}), "workload": record.get("workload")}
        self._own.describe(record)
        self._own.finish(config, metrics)
        reports = self._shadows.report() if self._shadows else []
        for writer, report in zip(self._theirs, reports, strict=True):
            writer.describe({**record, "shadow": report})
            writer.finish({**config, "controller": f"shadow {report['controller']}"}, report)

    def close(self) -> None:
        """Finish the files. A second call does nothing."""
        for writer in (self._own, *self._theirs):
            writer.close()

    def __enter__(self) -> LiveDiagnostics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _without_time(sample: dict[str, Any]) -> dict[str, Any]:
    """A shadow takes no time of the device: nothing is said of its speed."""
    return {k: v for k, v in sample.items() if k not in ("busy_seconds", "decode_steps")}
