"""Samples of an engine over a run, as columns, and what can be read off them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

MIB = 1 << 20
Column = NDArray[np.float64]

# Points kept in JSON: enough for a picture of any width, and a small file for a run of hours.
POINTS = 1000


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a workload. start, end: seconds of the engine's clock from the start of the run.

    level: requests kept in the system, None where arrivals have their own times.
    """

    name: str
    start: float
    end: float
    level: int | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a phase begins. sample: its first sample. rise: requests [first, stop) that came at once
    because the level rose here (none elsewhere), by their number in the run."""

    phase: Phase
    sample: int
    rise: range = range(0)


@dataclass(slots=True)
class Timeline:
    """Samples in the order they were taken. Counters are totals, so that differences of two samples
    are what happened between them. origin: the engine's clock at the start of the run.

    A sample is a record of numbers by name (the fields of the engine's ``Sample``).
    """

    origin: float = 0.0
    marks: list[Mark] = field(default_factory=list)
    _rows: list[Mapping[str, float]] = field(default_factory=list)

    def add(self, sample: Mapping[str, float]) -> None:
        """Append a sample; one of the same moment replaces the last."""
        if self._rows and all(self._rows[-1][key] == sample[key] for key in ("step", "time")):
            self._rows.pop()
        self._rows.append(sample)

    def mark(self, phase: Phase, rise: range = range(0)) -> None:
        """The last sample is the first of ``phase``."""
        self.marks.append(Mark(phase, len(self._rows) - 1, rise))

    def __iter__(self) -> Iterator[Mapping[str, float]]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def last_step(self) -> int:
        """Engine step of the last sample, -1 before the first."""
        return int(self._rows[-1]["step"]) if self._rows else -1

    def column(self, name: str) -> Column:
        """One field of all samples, float64 [samples]."""
        return np.array([row[name] for row in self._rows], dtype=np.float64)

    def changes(self, name: str) -> Column:
        """What a counter gained since the sample before, float64 [samples]; 0 for the first."""
        return np.diff(self.column(name), prepend=self._rows[0][name] if self._rows else 0.0)

    def series(self) -> dict[str, Column]:
        """What pictures show, by name; float64 [samples], NaN where nothing was decoded.

        step_ms: wall time per step that decoded, where most steps did (the time of a step that only
        reads prompts is nobody's time per token).
        """
        steps, decode = self.changes("step"), self.changes("decode_steps")
        fetched = self.changes("fetched_rows")
        return {
            "step": self.column("step"),
            "time": self.column("time") - self.origin,
            "load": self.column("running") + self.column("waiting"),
            "running": self.column("running"),
            "waiting": self.column("waiting"),
            "required_mib": self.column("required_bytes") / MIB,
            "optional_mib": self.column("optional_bytes") / MIB,
            "free_mib": self.column("free_bytes") / MIB,
            "miss_rate": ratio(fetched, self.changes("unique_rows")),
            "miss_rate_selected": ratio(fetched, self.changes("selected_rows")),
            "tokens_per_step": ratio(self.changes("generated_tokens"), steps),
            "step_ms": np.where(
                decode > steps / 2, ratio(self.changes("busy_seconds") * 1e3, decode), np.nan
            ),
            "preemptions": self.column("preemptions"),
        }

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON: the series, every n-th sample of them if there are more than POINTS."""
        every = -(-len(self) // POINTS)
        columns = self.series() if self._rows else {}
        return {
            "every": every,
            "phases": [
                {"name": m.phase.name, "step": self._rows[m.sample]["step"]} for m in self.marks
            ],
            "columns": {
                name: values[:: max(every, 1)].tolist() for name, values in columns.items()
            },
        }


def ratio(part: Column, whole: Column) -> Column:
    """part / whole, NaN where the whole is 0."""
    return np.divide(part, whole, out=np.full_like(part, np.nan), where=whole > 0)
