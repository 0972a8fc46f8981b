"""Rows of a generation go through a step of their own, or one that the host shapes: with equal results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from micro import micro_model
from mix import PARAMS, PROMPTS
from torch import Tensor

from kvpolicy import Engine, EngineConfig
from kvpolicy.memory.step import StepMemory
from kvpolicy.models.loader import DecodeModel

COUNTED = (
    "selected_rows",
    "unique_rows",
    "fetched_rows",
    "staged_rows",
    "refetched_rows",
    "host_to_device_bytes",
    "device_to_host_bytes",
    "moved_bytes",
    "preemptions",
    "steps",
)


class HostShaped:
    """A model that does not say that a step asks the host for no number."""

    device_only = False

    def __init__(self, model: DecodeModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, tokens: Tensor, memory: StepMemory, wanted: Tensor) -> Tensor:
        assert isinstance(memory, StepMemory)
        return self._model.forward(tokens, memory, wanted)


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> DecodeModel:
    return micro_model(Path(tmp_path_factory.mktemp("micro")))


def run(model: Any, **values: Any) -> tuple[list[str], dict[str, Any]]:
    """Fingerprints of the outputs, and what was counted."""
    config = EngineConfig(device="cpu", host_kv_mib=4, clock="steps", validate=True, **values)
    with Engine(config, model=model) as engine:
        outputs = engine.generate(PROMPTS, PARAMS)
        assert (engine.executor.decoder is None) == isinstance(model, HostShaped)
        report = engine.metrics()
    return [output.logits_sha256 for output in outputs], {name: report[name] for name in COUNTED}


@pytest.mark.parametrize("eviction", ["clock", "lru", "fifo", "random"])
@pytest.mark.parametrize(
    "controller",
    ["hisparse:device_buffer_rows=24", "static:device_buffer_rows=17", "random"],
)
def test_misses_do_not_depend_on_the_path(
    micro: DecodeModel, controller: str, eviction: str
) -> None:
    """Bits, misses, copies and preemptions are the same."""
    values = {"controller": controller, "device_kv_mib": 2, "eviction": eviction}
    ours, counted = run(micro, **values)
    assert counted["fetched_rows"] > 0
    assert (ours, counted) == run(HostShaped(micro), **values)
