"""The twin against the engine it stands for: the same decisions, the same observations, the same misses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quick_model import QuickModel
from recorded import prompts, recorded
from toy_model import ToyModel

from kvpolicy.config import EngineConfig, SamplingParams
from kvpolicy.control.observation import Observation
from kvpolicy.control.plan import Plan
from kvpolicy.engine.engine import Engine
from kvpolicy.memory.layout import Layout
from kvpolicy.models.dummy import DummyWeights
from kvpolicy.models.glm_dsa import GlmDsa
from kvpolicy.recording import Recording
from kvpolicy.recording.recorder import Recorder
from kvpolicy.selection.recorded import RecordedSource
from kvpolicy.selection.source import SelectionSource
from kvpolicy.twin.cost import CostModel
from kvpolicy.twin.engine import TwinEngine
from kvpolicy.twin.streams import Streams

CONTEXT = 150


def micro(source: SelectionSource | None = None) -> GlmDsa:
    """Two groups of four layers of random weights."""
    cpu = torch.device("cpu")
    weights = DummyWeights("micro-glm", cpu, torch.bfloat16, 8, vocab=256)
    return GlmDsa(weights, cpu, "micro-glm", "reference", torch.bfloat16, source)


COST = CostModel("none", {"decode_steps": 1e-3, "rows": 1e-5})


class Moody:
    """Resizes, fills and empties caches at every decision."""

    def __init__(self) -> None:
        self.turn = 0

    def decide(self, observation: Observation) -> Plan:
        self.turn += 1
        sizes = (8, 30, 1000, 12, 2000, 0, 17)
        targets = {
            r.request_id: sizes[(self.turn + r.request_id) % 7] for r in observation.requests
        }
        return Plan(targets=targets)


def drive(engine: Any, texts: list[bytes], tokens: int, check: Callable[[], None]) -> list[Any]:
    """A new prompt every third step, to the end. The decisions, and the moments of every request."""
    params, handles = SamplingParams(max_new_tokens=tokens), []
    for text in texts:
        handles.append(engine.submit(text, params))
        for _ in range(3):
            engine.step()
    while not all(handle.done for handle in handles):
        engine.step()
        check()
    moments = [handle.result().latencies for handle in handles]
    return [moments, list(engine.control.log)]


def seen(observation: Observation) -> Observation:
    """Without the bytes that prompt rows fetched: their selections are not recorded."""
    return replace(observation, host_to_device_bytes=0)


EVERY = (
    *("resident", "hisparse:device_buffer_rows=12", "hybrid", "static:device_buffer_rows=9"),
    *("adaptive", "adaptive:split=equal", "random", Moody),
)
CASES = [
    *((QuickModel, controller) for controller in EVERY),
    (ToyModel, "adaptive"),
    *(pytest.param(ToyModel, c, marks=pytest.mark.full) for c in EVERY if c != "adaptive"),
]


@pytest.mark.parametrize(("model", "controller"), CASES)
def test_the_twin_decides_as_the_engine(tmp_path: Path, model: Any, controller: Any) -> None:
    """Every field of every observation, every budget, every time, under too little memory."""
    small = model is QuickModel
    settings = {
        "device": "cpu",
        "clock": "steps",
        "device_kv_mib": 0.5 if small else 1.0,
        "prefill_chunk": 16,
        "max_concurrency": 4,
        "control_interval": 5,
    }
    own = model()
    texts = prompts(7, 40)
    spec: Any = controller if isinstance(controller, str) else controller()
    config = EngineConfig(**settings, controller=spec)
    with Engine(config, own) as engine, Recorder(engine, tmp_path / "a.npz", 1000) as recorder:
        live = drive(engine, texts, 40, lambda: None)
        record = {**engine.record(), "metrics": engine.metrics()}
        recorder.finish([], record)
        metrics = engine.metrics()
    streams = Streams(Recording(tmp_path / "a.npz"), own.geometry)
    spec = controller if isinstance(controller, str) else controller()
    layout = Layout(own.geometry, "float32")
    twin = TwinEngine(config.model_copy(update={"controller": spec}), layout, streams, COST)
    found = drive(twin, texts, 40, twin.check_integrity)
    assert len(found[1]) == len(live[1]) > 10
    for mine, theirs in zip(found[1], live[1], strict=True):
        assert seen(mine.observation) == seen(theirs.observation)
        assert mine.projected == theirs.projected
    assert found[0] == live[0]
    own_metrics = twin.metrics()
    for name in (
        "fetched_rows",
        "selected_rows",
        "preemptions",
        "shortages",
        "steps",
        "release_steps",
    ):
        assert own_metrics[name] == metrics[name], name
    assert own_metrics["deferred_admissions"] == metrics["deferred_admissions"]


@pytest.mark.parametrize("controller", ["hisparse:device_buffer_rows=24", "adaptive", "random"])
def test_stretched_selections_behind_contexts_nobody_computed(
    tmp_path: Path, controller: str
) -> None:
    """The slice: dummy weights, a recording stretched over a context, requests that begin behind it."""
    first = micro()
    recording = recorded(first, tmp_path / "a.npz", prompts(3, 40), 30, device_kv_mib=4.0)
    own = micro(RecordedSource(recording, first.geometry, torch.device("cpu"), CONTEXT))
    config = EngineConfig(
        device="cpu",
        clock="steps",
        kv_dtype="fp8",
        device_kv_mib=0.5,
        host_kv_mib=8,
        max_concurrency=3,
        control_interval=5,
        controller=controller,
    )
    found = []
    layout = Layout(own.geometry, "fp8")
    streams = Streams(recording, own.geometry, CONTEXT)
    twin = TwinEngine(config, layout, streams, COST, most_tokens=CONTEXT + 120)
    with Engine(config, own) as engine:
        for each in (engine, twin):
            params = SamplingParams(max_new_tokens=40)
            handles: list[Any] = []
            for i in range(5):
                handles.append(each.submit(b"x", params, context=CONTEXT + 7 * i))
                for _ in range(4):
                    each.step()
            while not all(handle.done for handle in handles):
                each.step()
                each.check_integrity()
            found.append(([handle.latencies for handle in handles], list(each.control.log)))
        assert engine.metrics()["fetched_rows"] == twin.metrics()["fetched_rows"] > 0
    (live, decisions), (told, decided) = found
    assert live == told and len(decisions) == len(decided) > 10
    for mine, theirs in zip(decided, decisions, strict=True):
        assert seen(mine.observation) == seen(theirs.observation)
        assert mine.projected == theirs.projected
