"""What is made of a timeline: series, JSON, TensorBoard events, a picture."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from kvpolicy.telemetry.diagnostics import run_names, write_timeline
from kvpolicy.telemetry.picture import HEIGHT, WIDTH, draw_timelines
from kvpolicy.telemetry.timeline import POINTS, Phase, Timeline

MIB = 1 << 20


def timeline(samples: int = 30, origin: float = 5.0) -> Timeline:
    """Two phases of a run that decodes in every interval but the first."""
    made = Timeline(origin=origin)
    for i in range(samples):
        made.add(
            {
                "step": 8 * i,
                "time": origin + 0.008 * i,
                "running": 2 + i % 3,
                "waiting": i % 2,
                "required_bytes": 3 * MIB,
                "optional_bytes": i * MIB,
                "free_bytes": (samples - i) * MIB,
                "selected_rows": 100.0 * max(i - 1, 0),
                "unique_rows": 80.0 * max(i - 1, 0),
                "fetched_rows": 20.0 * max(i - 1, 0),
                "generated_tokens": 16 * max(i - 1, 0),
                "decode_steps": 8 * max(i - 1, 0),
                "preemptions": i // 10,
                "busy_seconds": 0.04 * i,
            }
        )
        if i in (0, samples // 2):
            made.mark(Phase("one" if i == 0 else "two", 0.0, 1.0, 2 if i == 0 else None))
    return made


def test_series() -> None:
    series = timeline().series()
    assert series["time"][:2] == pytest.approx([0, 0.008])
    assert (series["load"] == series["running"] + series["waiting"]).all()
    assert series["optional_mib"].tolist() == list(range(30))
    assert np.isnan(series["miss_rate"][:2]).all() and np.isnan(series["step_ms"][:2]).all()
    assert series["miss_rate"][2:] == pytest.approx(0.25)
    assert series["miss_rate_selected"][2:] == pytest.approx(0.2)
    assert series["step_ms"][2:] == pytest.approx(5.0)
    assert series["tokens_per_step"][2:] == pytest.approx(2.0)


def test_json_is_small_for_a_long_run() -> None:
    short, long = timeline().to_dict(), timeline(5 * POINTS + 1).to_dict()
    assert (short["every"], long["every"]) == (1, 6)
    assert len(short["columns"]["step"]) == 30 and len(long["columns"]["step"]) <= POINTS
    assert short["phases"] == [{"name": "one", "step": 0}, {"name": "two", "step": 120}]
    json.dumps(short)
    assert Timeline().to_dict() == {"every": 0, "phases": [], "columns": {}}


def test_events_of_a_timeline(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = timeline()
    write_timeline(tmp_path / "run", timeline(7))
    write_timeline(tmp_path / "run", run)  # replaces what an earlier run left
    assert len(list((tmp_path / "run").iterdir())) == 1
    events = EventAccumulator(str(tmp_path / "run"), size_guidance={"scalars": 0})
    events.Reload()
    for tag, name in (
        ("load/requests", "load"),
        ("memory/optional_mib", "optional_mib"),
        ("misses/of_selected_rows", "miss_rate_selected"),
        ("speed/tokens_per_step", "tokens_per_step"),
        ("speed/step_ms", "step_ms"),
    ):
        known = np.isfinite(run.series()[name])
        found = events.Scalars(tag)
        assert [e.step for e in found] == run.series()["step"][known].tolist(), tag
        assert [e.value for e in found] == pytest.approx(run.series()[name][known].tolist())


def test_run_names_are_folders_and_differ() -> None:
    names = run_names(["static:device_buffer_rows=64", "a/../b", "a", "a", "..", ""])
    assert names == ["static_device_buffer_rows=64", "a_.._b", "a", "a-2", "run", "run-2"]


@pytest.mark.parametrize("counts_steps", [True, False])
def test_picture_has_its_size_and_shows_the_runs(tmp_path: Path, counts_steps: bool) -> None:
    many = {f"controller {i}": timeline(20 + i) for i in range(8)}
    path = draw_timelines(tmp_path / "page.png", many, "a title", counts_steps)
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (WIDTH, HEIGHT) == (1600, 1200)
    one = draw_timelines(tmp_path / "one.png", {"a": timeline()}, "a title", counts_steps)
    assert one.read_bytes() != content
