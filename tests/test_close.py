"""Closing an engine: the memory goes back at once, what was measured stays."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from micro import micro_model

from kvpolicy import Engine, EngineConfig, SamplingParams, UserError
from kvpolicy.models.loader import DecodeModel

PROMPT = b"def main():\n    return 1\n" * 3
PARAMS = SamplingParams(max_new_tokens=6)


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> DecodeModel:
    return micro_model(Path(tmp_path_factory.mktemp("micro")))


def engine(model: DecodeModel, **values: object) -> Engine:
    fixed = {"device": "cpu", "device_kv_mib": 2, "host_kv_mib": 4, "clock": "steps"}
    return Engine(EngineConfig(**{**fixed, **values}), model=model)


def places(engine: Engine) -> set[int]:
    """Where the two tiers' buffers begin."""
    tiers = (engine.memory.arena.buffer, engine.memory.host.words)
    return {tier.untyped_storage().data_ptr() for tier in tiers}


def views(of: set[int]) -> int:
    """Tensors alive that lie in one of these buffers."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor]
    return sum(t.untyped_storage().data_ptr() in of for t in tensors)


@pytest.mark.parametrize("way", ["done", "running", "waiting", "broken"])
def test_both_tiers_are_freed_and_metrics_stay(micro: DecodeModel, way: str) -> None:
    """Whatever the engine was at: nothing alive points into either tier afterwards."""
    own = engine(micro, max_concurrency=2)
    own.generate([PROMPT], PARAMS)
    handles = []
    if way != "done":
        handles = [own.submit(PROMPT, PARAMS) for _ in range(2 if way == "running" else 4)]
        own.step()
    if way == "broken":
        own.residents.grow = lambda step: 1 / 0  # type: ignore[assignment, method-assign, return-value]
        with pytest.raises(ZeroDivisionError):
            own.step()
    before = places(own)
    assert len(before) == 2 and views(before) > 10
    own.close()
    assert not views(before)
    assert all(handle.result().finish_reason == "cancelled" for handle in handles)
    metrics, sample = own.metrics(), own.sample()
    assert metrics["generated_tokens"] >= 6 and metrics["unique_rows"] > 0
    assert metrics["device_kv_bytes_peak"] > 0 and sample.free_bytes > 0
    assert own.memory.usage().optional == 0
    own.check_integrity()
    own.close()
    assert own.metrics() == metrics
    with pytest.raises(UserError, match="closed"):
        own.submit(PROMPT)
