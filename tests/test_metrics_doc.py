"""docs/metrics.md names every metric, and none that is not there."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from micro import micro_model

from kvpolicy import Engine, EngineConfig, SamplingParams
from kvpolicy.engine.speculation import Counts
from kvpolicy.telemetry.phases import PhaseReport

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"


def rows(title: str) -> dict[str, str]:
    """Name -> meaning in the table of one section, several names to a row."""
    section = re.search(rf"^##? {title}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
    assert section is not None, title
    lines = [line.strip("|").split("|") for line in section[1].splitlines() if line[:2] == "| "]
    named = [(re.findall("`([a-z0-9_]+)`", cells[0]), cells[1]) for cells in lines]
    assert sum(len(names) for names, _ in named) == len({n for names, _ in named for n in names})
    return {name: meaning for names, meaning in named for name in names}


def test_every_metric_is_explained(tmp_path: Path) -> None:
    config = EngineConfig(device="cpu", clock="steps", device_kv_mib=8, host_kv_mib=8)
    with Engine(config, model=micro_model(tmp_path)) as engine:
        engine.generate([b"abc" * 20], SamplingParams(max_new_tokens=4))
        metrics = engine.metrics()
    told = rows("Metrics")
    assert set(told) == set(metrics)
    assert set(re.findall("`([a-z_]+)`", told["prefill"])) == set(metrics["prefill"])
    nothing = (metrics["accepted_length"], metrics["speculation"], metrics["ring_bytes"])
    assert nothing == (None, None, 0)
    assert set(re.findall("`([a-z_]+)`", told["speculation"])) == set(Counts(1).report())
    assert metrics["goodput_tokens_per_s"] is None


def test_every_number_of_a_phase_is_explained() -> None:
    assert set(rows("Phases")) == {field.name for field in fields(PhaseReport)}
