"""Timelines as TensorBoard events."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from kvpolicy.telemetry.timeline import Timeline

__all__ = ["TAGS", "run_names", "write_events"]

TAGS = {
    "load/requests": "load",
    "load/running": "running",
    "load/waiting": "waiting",
    "memory/required_mib": "required_mib",
    "memory/optional_mib": "optional_mib",
    "memory/free_mib": "free_mib",
    "misses/of_unique_rows": "miss_rate",
    "misses/of_selected_rows": "miss_rate_selected",
    "speed/tokens_per_step": "tokens_per_step",
    "speed/step_ms": "step_ms",
    "load/preemptions": "preemptions",
}
"""TensorBoard tag -> series of a timeline."""


def run_names(labels: list[str]) -> list[str]:
    """A folder's name for each label, all different."""
    names: list[str] = []
    for label in labels:
        plain = re.sub(r"[^A-Za-z0-9._=-]+", "_", label)[:100].lstrip(".") or "run"
        name, number = plain, 2
        while name in names:
            name, number = f"{plain}-{number}", number + 1
        names.append(name)
    return names


def write_events(folder: Path, timeline: Timeline) -> Path:
    """Write one run's scalars, by engine step, into ``folder`` in place of those of an earlier run;
    returns it. Moments where nothing was decoded have no miss rate and no step time."""
    from torch.utils.tensorboard.writer import SummaryWriter

    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    series = timeline.series()
    writer = SummaryWriter(str(folder))
    try:
        for tag, name in TAGS.items():
            for step, value in zip(series["step"], series[name], strict=True):
                if np.isfinite(value):
                    writer.add_scalar(tag, value, int(step))
    finally:
        writer.close()
    return folder
