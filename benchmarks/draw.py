"""The timeline picture of a ``kvpolicy compare --workload ... --output FILE`` result.

    python -P benchmarks/draw.py RESULT.json PICTURE.png

For results that were measured on a machine without matplotlib.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kvpolicy.telemetry.picture import draw_timelines
from kvpolicy.telemetry.timeline import Mark, Timeline
from kvpolicy.workloads.workload import Phase


class Recorded(Timeline):
    """A timeline read back from its JSON, as far as a picture needs it."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.columns = {
            name: np.array([np.nan if v is None else v for v in values], dtype=np.float64)
            for name, values in record["columns"].items()
        }
        steps = self.columns["step"]
        marks = [
            Mark(Phase(one["name"], 0.0, 0.0), int(np.searchsorted(steps, one["step"])), range(0))
            for one in record["phases"]
        ]
        super().__init__(marks=[m for m in marks if m.sample < len(steps)])

    def series(self) -> dict[str, np.ndarray]:
        return self.columns

    def column(self, name: str) -> np.ndarray:
        return self.columns[name]


def main(source: str, target: str) -> None:
    """Draw ``source`` (JSON) into ``target`` (PNG)."""
    found = json.loads(Path(source).read_text())
    record = found["record"]
    runs = {one["controller"]: Recorded(one["timeline"]) for one in found["results"]}
    title = f"{record['device_name']}, {record['config']['device_kv_mib']:g} MiB for KV\n{record['workload']}"
    print(draw_timelines(Path(target), runs, title, record["config"]["clock"] == "steps"))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -P benchmarks/draw.py RESULT.json PICTURE.png")
    main(*sys.argv[1:])
