"""Policy diagnostics: every tag is written, read back from the files and over TensorBoard's own server."""

from __future__ import annotations

import json
import re
import urllib.parse
import urllib.request
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from micro import micro_model
from quick_model import QuickModel
from recorded import prompts
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from typer.testing import CliRunner

from kvpolicy.cli.main import app
from kvpolicy.config import EngineConfig, SamplingParams
from kvpolicy.engine.engine import Engine
from kvpolicy.errors import UserError
from kvpolicy.shadows import Shadows
from kvpolicy.telemetry import dashboard
from kvpolicy.telemetry.charts import draw_dashboard, read_scalars
from kvpolicy.telemetry.dashboard import event_runs, serving
from kvpolicy.telemetry.diagnostics import PolicyDiagnostics
from kvpolicy.telemetry.live import LiveDiagnostics, residency
from kvpolicy.telemetry.maps import OUTSIDE, draw_map
from kvpolicy.telemetry.tags import FAMILIES, HISTOGRAMS, IMAGES, LAYOUT, TAGS, TEXTS

ALL = {"scalars": 0, "histograms": 0, "images": 0, "tensors": 0}
# A copy of html5lib inside TensorBoard warns of itself when it is imported.
BLEACH = pytest.mark.filterwarnings("ignore:html5lib:DeprecationWarning")
EXTRA = {"reward/total", "reward/goodput", "regret/rows", "action/agent/keep"}


def drive(folder: Path) -> dict[str, Any]:
    """A run with a shadow, and a policy whose driver knows rewards; the metrics of the first."""
    config = EngineConfig(
        device="cpu", clock="steps", device_kv_mib=0.3, prefill_chunk=16, control_interval=4,
        max_concurrency=4, controller="random:seed=1",
    )  # fmt: skip
    with (
        Engine(config, QuickModel()) as engine,
        Shadows(engine, ["hisparse:device_buffer_rows=12"]) as shadows,
        LiveDiagnostics(engine, folder / "live", shadows) as live,
        PolicyDiagnostics(folder / "learnt", maps_every=2) as learnt,
    ):
        handles = [engine.submit(p, SamplingParams(max_new_tokens=24)) for p in prompts(5)]
        while not all(handle.done for handle in handles):
            engine.step()
            if engine.steps % 4 == 0:
                sample = asdict(engine.sample())
                live(sample)
                learnt.write(
                    sample,
                    engine.control.log[-1],
                    tpot=[0.02],
                    ttft=[0.5],
                    action={"keep": 0.5},
                    reward={"total": 1.0, "goodput": float("nan") if engine.steps < 9 else 2.0},
                    regret={"rows": 12.0},
                    accepted_length=1.5,
                    residency=lambda: residency(engine.memory),
                )
        live(asdict(engine.sample()))
        metrics = engine.metrics()
        live.finish(engine.record(), metrics)
        learnt.describe(engine.record())
        learnt.finish({"controller": "learnt", "rows": None}, {"goodput": 3.0, "none": None})
    return metrics


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    drive(folder)
    return folder


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance=ALL)
    events.Reload()
    return events


def test_a_long_run_with_a_drafter(tmp_path: Path) -> None:
    """Accepted lengths of intervals; and latencies go on when the engine keeps no more of them."""
    config = EngineConfig(
        device="cpu", clock="steps", device_kv_mib=2, host_kv_mib=4, drafter="ngram"
    )  # fmt: skip
    points, given, written = [], [], []
    with (
        Engine(config, micro_model(tmp_path / "model")) as engine,
        LiveDiagnostics(engine, tmp_path / "live") as live,
    ):
        engine.totals.ttft = deque(maxlen=2)
        write = live._own.write

        def note(*arguments: Any, **named: Any) -> None:
            written.append(len(named["ttft"]))
            given.append(named["accepted_length"])
            write(*arguments, **named)

        live._own.write = note  # type: ignore[method-assign]
        assert engine.speculator is not None
        for _ in range(4):
            engine.generate([b"abcabcabcabc"], SamplingParams(max_new_tokens=12))
            points.append(engine.speculator.counts.totals)
            live(asdict(engine.sample()))
        live(asdict(engine.sample()))
    assert written == [1, 1, 1, 1, 0] and given[4] is None
    (cycles, committed, _), (before, had, _) = points[1], points[0]
    assert given[1] == (committed - had) / (cycles - before)
    found = read(tmp_path / "live").Scalars("speculation/accepted_length")
    assert [s.value for s in found] == pytest.approx(given[:4], rel=1e-6)


def test_every_tag_is_read_back(logs: Path) -> None:
    """The same tags for every policy; what nobody told of a policy is not there."""
    assert event_runs(logs) == ["learnt", "live", "live/shadow=hisparse_device_buffer_rows=12"]
    found = {name: read(logs / name) for name in event_runs(logs)}
    scalars = {
        name: {t for t in events.Tags()["scalars"] if not t.startswith("result/")}
        for name, events in found.items()
    }
    assert scalars["learnt"] == set(TAGS) | EXTRA
    assert scalars["live"] == set(TAGS) - {"speculation/accepted_length"}
    timeless = {t for t in scalars["live"] if not t.startswith(("latency/", "speed/step_ms"))}
    assert scalars["live/shadow=hisparse_device_buffer_rows=12"] == timeless
    assert all(any(tag.startswith(family) for family in FAMILIES) for tag in EXTRA)
    tags = found["learnt"].Tags()
    assert set(tags["histograms"]) == set(HISTOGRAMS) and set(tags["images"]) == set(IMAGES)
    assert {f"{name}/text_summary" for name in TEXTS} <= set(tags["tensors"])
    assert len(found["learnt"].Images("residency/group_x_time")) > 5
    assert b'"controller": "random:seed=1"' in text(found["live"], "run/record")


def text(events: EventAccumulator, tag: str) -> bytes:
    found: bytes = events.Tensors(f"{tag}/text_summary")[0].tensor_proto.string_val[0]
    return found


def test_values_are_those_of_the_engine(tmp_path: Path) -> None:
    metrics = drive(tmp_path)
    live, shadow = (read(tmp_path / name) for name in event_runs(tmp_path)[1:])
    assert sum(e.value for e in live.Scalars("load/arrivals")) <= 5
    assert live.Scalars("control/decisions")[-1].value == metrics["controller_decisions"]
    assert live.Scalars("control/projected")[-1].value == metrics["controller_projections"]
    assert live.Scalars("result/miss_rate")[0].value == pytest.approx(metrics["miss_rate"])
    steps = np.diff([e.step for e in live.Scalars("load/running")])
    fetched = [e.value for e in live.Scalars("misses/fetched_rows_per_step")]
    rows = float(np.dot(fetched, steps[-len(fetched) :]))
    assert 0 < rows <= metrics["fetched_rows"]
    assert shadow.Scalars("result/fetched_rows")[0].value > 0
    hparams = live.Tags()["scalars"]
    assert "result/tpot_ms/p50" in hparams
    released = sum(e.value for e in live.Scalars("action/released_mib"))
    assert 0 < released <= sum(e.value for e in live.Scalars("action/given_mib"))
    margins = [
        [e.value for e in live.Scalars(f"control/decision_ms_{edge}")]
        for edge in ("p05", "p50", "p99")
    ]
    assert (np.diff(np.array(margins), axis=0) >= 0).all()


def test_the_layout_is_read_back(logs: Path) -> None:
    for name in event_runs(logs):
        proto = read(logs / name).Tensors("custom_scalars__config__")[0].tensor_proto
        layout = Layout.FromString(proto.string_val[0])
        assert [c.title for c in layout.category] == list(LAYOUT)
        for category in layout.category:
            charts = {chart.title: chart for chart in category.chart}
            assert list(charts) == list(LAYOUT[category.title])
            for title, (kind, tags) in LAYOUT[category.title].items():
                if kind == "Margin":
                    series = charts[title].margin.series[0]
                    assert [series.value, series.lower, series.upper] == tags
                    assert set(tags) <= set(TAGS)
                else:
                    assert list(charts[title].multiline.tag) == tags
                    known = set(TAGS) | EXTRA
                    assert all(any(re.match(tag, each) for each in known) for tag in tags)


def get(address: str, path: str, **query: str) -> Any:
    url = f"{address}data/{path}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.loads(answer.read())


@BLEACH
def test_over_tensorboards_own_server(logs: Path) -> None:
    """Layout, charts, pictures, texts and hparams as its pages get them; all points of a chart."""
    with serving(logs, port=0) as address:
        assert sorted(get(address, "runs")) == event_runs(logs)
        layout = get(address, "plugin/custom_scalars/layout")
        assert [c["title"] for c in layout["category"]] == list(LAYOUT)
        found = get(address, "plugin/custom_scalars/scalars", run="live", tag="load/requests$")
        points = found["tag_to_events"]["load/requests"]
        assert len(points) == len(read_scalars(logs / "live")["load/requests"][0]) > 10
        tags = get(address, "plugin/scalars/tags")
        assert set(TAGS) | EXTRA <= set(tags["learnt"])
        assert set(get(address, "plugin/images/tags")["learnt"]) == set(IMAGES)
        assert set(HISTOGRAMS) <= set(get(address, "plugin/histograms/tags")["learnt"])
        texts = get(address, "plugin/text/tags")
        assert {f"{name}/text_summary" for name in TEXTS} <= set(texts["live"])
        plugins = get(address, "plugins_listing")
        wanted = ("custom_scalars", "scalars", "images", "histograms", "text", "hparams")
        assert all(plugins[name]["enabled"] for name in wanted)


@BLEACH
def test_a_port_that_is_taken(logs: Path) -> None:
    with serving(logs) as address:
        port = urllib.parse.urlparse(address).port
        assert port is not None
        with (
            pytest.raises(UserError, match=f"TensorBoard does not start on port {port}"),
            serving(logs, port=port),
        ):
            pass


def test_without_tensorboard(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "NEEDS", "tensorboard_that_nobody_has")
    result = CliRunner().invoke(app, ["dashboard", str(logs), "--no-open"])
    assert result.exit_code == 2
    assert result.stderr == (
        "kvpolicy: error: TensorBoard is not installed: pip install 'tensorboard>=2.21'\n"
    )
    missing = CliRunner().invoke(app, ["dashboard", str(logs / "nowhere")])
    assert missing.exit_code == 2 and "is not a folder" in missing.stderr


def test_the_charts_as_a_picture(logs: Path, tmp_path: Path) -> None:
    path = draw_dashboard(logs, tmp_path / "page.png")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(UserError, match="there are no events"):
        draw_dashboard(tmp_path, tmp_path / "none.png")


def test_maps() -> None:
    shares = np.array([[0.0, 1.0], [1.0, np.nan]])
    picture = draw_map(shares, ["a", "b"], ("first", "last"), "title")
    assert picture.dtype == np.uint8 and picture.ndim == 3
    colours = {tuple(c) for c in picture.reshape(-1, 3).tolist()}
    assert {OUTSIDE, (247, 251, 255), (8, 48, 107)} <= colours


def test_residency_is_what_the_caches_hold() -> None:
    """By position, over the longest context: a full request is dark, a small budget holds its share."""
    config = EngineConfig(device="cpu", clock="steps", device_kv_mib=1.0, controller="resident")
    with Engine(config, QuickModel()) as engine:
        for prompt in prompts(2, length=80):
            engine.submit(prompt, SamplingParams(max_new_tokens=40))
        for _ in range(8):
            engine.step()
        full = residency(engine.memory, bins=20)
        assert len(full) == 2
        assert all(np.nanmin(shares) == 1.0 for shares in full.values())
        assert np.isnan(full[0]).any() and not np.isnan(full[1]).any()  # the second is longer
        engine.set_controller("static:device_buffer_rows=10")
        for _ in range(2):
            engine.step()
        small = residency(engine.memory, bins=20)
        held = sum(hot.capacity for hot in engine.memory.requests[1].hot) / 2
        assert np.nansum(small[1]) < 20 and np.nanmean(small[1]) < 2 * held / 80
