"""Shadows and diagnostics of one run of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from kvpolicy.cli.output import finite
from kvpolicy.cli.run import Decoded, Watch
from kvpolicy.engine.engine import Engine
from kvpolicy.shadows import Shadows
from kvpolicy.telemetry.live import LiveDiagnostics
from kvpolicy.telemetry.timeline import Timeline

__all__ = ["ShadowRun", "Watched", "watching"]


@dataclass(frozen=True)
class ShadowRun:
    """What a shadow would have missed. report: see ``ShadowPolicy.report``."""

    report: dict[str, Any]
    timeline: Timeline

    def phases(self) -> list[dict[str, Any]]:
        """Misses of decode steps in each phase of the workload."""
        marks = self.timeline.marks
        stops = [*(mark.sample for mark in marks[1:]), len(self.timeline) - 1]
        fetched, unique = (self.timeline.column(n) for n in ("fetched_rows", "unique_rows"))
        found = []
        for mark, stop in zip(marks, stops, strict=True):
            missed = float(fetched[stop] - fetched[mark.sample])
            whole = float(unique[stop] - unique[mark.sample])
            rate = missed / whole if whole else None
            found.append({"name": mark.phase.name, "fetched_rows": int(missed), "miss_rate": rate})
        return found

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**self.report, "phases": self.phases()}


class Watched:
    """Takes the samples of a run. diagnostics: None where no events are wanted."""

    def __init__(self, watcher: Shadows | None, diagnostics: LiveDiagnostics | None) -> None:
        self._watcher, self._diagnostics = watcher, diagnostics
        count = 0 if watcher is None else len(watcher.policies)
        self._timelines = [Timeline() for _ in range(count)]

    def note(self, sample: dict[str, Any]) -> None:
        """One sample of the engine, see ``Runner``."""
        if self._watcher is not None:
            samples = self._watcher.samples(sample)
            for timeline, own in zip(self._timelines, samples, strict=True):
                timeline.add(own)
        if self._diagnostics is not None:
            self._diagnostics(sample)

    def shadows(self, live: Timeline) -> list[ShadowRun]:
        """The shadows at the end of a run. live: the engine's timeline."""
        if self._watcher is None:
            return []
        for timeline in self._timelines:
            timeline.origin, timeline.marks = live.origin, list(live.marks)
        pairs = zip(self._watcher.report(), self._timelines, strict=True)
        return [ShadowRun(report, timeline) for report, timeline in pairs]

    def finish(self, run: Decoded) -> None:
        """Write what came of the run."""
        if self._diagnostics is not None:
            self._diagnostics.finish(finite(run.record), run.metrics)


@contextmanager
def watching(engine: Engine, watch: Watch) -> Iterator[Watched]:
    """Shadows and diagnostics of an engine, as far as they are wanted, until the end of the block."""
    with ExitStack() as stack:
        watcher = diagnostics = None
        if watch.shadows:
            watcher = stack.enter_context(Shadows(engine, watch.shadows))
        if watch.folder is not None:
            diagnostics = LiveDiagnostics(engine, watch.folder, watcher)
            stack.enter_context(diagnostics)
        yield Watched(watcher, diagnostics)
