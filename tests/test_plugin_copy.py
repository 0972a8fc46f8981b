"""A plug-in copy of `static`, from a file, equals the built-in one step for step on a real engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from micro import micro_model
from mix import PARAMS, PROMPTS

from kvpolicy import Engine, EngineConfig
from kvpolicy.engine.metrics import Sample
from kvpolicy.models.loader import DecodeModel

SOURCE = '''
"""static again, from the public parts only."""

from kvpolicy import Observation, Plan


class Copy:
    def __init__(self, device_buffer_rows=None):
        self.rows = device_buffer_rows

    def initial(self, stores):
        return tuple(2 * store.topk if self.rows is None else self.rows for store in stores)

    def decide(self, observation: Observation) -> Plan:
        return Plan.even(self.initial(observation.stores))


class OneMore(Copy):
    def initial(self, stores):
        return tuple(rows + 1 for rows in super().initial(stores))
'''
PARAMETERS = ["", ":device_buffer_rows=0", ":device_buffer_rows=21", ":device_buffer_rows=70"]


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> DecodeModel:
    return micro_model(Path(tmp_path_factory.mktemp("micro")))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = Path(tmp_path_factory.mktemp("plugin")) / "copy of static.py"
    path.write_text(SOURCE)
    return str(path)


def trace(model: DecodeModel, controller: str, mib: float) -> dict[str, Any]:
    """Everything that can be seen of a run with arrivals, a queue and little memory, step by step."""
    config = EngineConfig(
        controller=controller, device="cpu", clock="steps", control_interval=3, max_concurrency=3,
        prefill_chunk=16, staging_rows=32, device_kv_mib=mib, host_kv_mib=4, validate=True,
    )  # fmt: skip
    samples: list[Sample] = []
    budgets = []
    with Engine(config, model=model) as engine:
        handles = []
        for prompt, params in zip(PROMPTS, PARAMS, strict=True):
            handles.append(engine.submit(prompt, params))
            engine.step()
        while engine.step():
            samples.append(replace(engine.sample(), busy_seconds=0.0))
            budgets.append(
                {r: [h.capacity for h in m.hot] for r, m in engine.memory.requests.items()}
            )
        decisions = [
            (entry.step, entry.observation, entry.plan, entry.projected)
            for entry in engine.control.log
        ]
        outputs = [handle.result() for handle in handles]
    return {"samples": samples, "budgets": budgets, "decisions": decisions, "outputs": outputs}


@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.parametrize("mib", [0.18, 2.0])
def test_a_copy_equals_static_step_for_step(
    micro: DecodeModel, file: str, parameters: str, mib: float
) -> None:
    ours, theirs = (trace(micro, f"{name}{parameters}", mib) for name in ("static", f"{file}:Copy"))
    assert len(ours["samples"]) > 10 and len(ours["decisions"]) > 5
    for part, values in ours.items():
        assert theirs[part] == values, part


def test_the_comparison_is_not_blind(micro: DecodeModel, file: str) -> None:
    """One row more is seen in every part of the trace but the output."""
    ours, theirs = (trace(micro, name, 2.0) for name in ("static", f"{file}:OneMore"))
    differ = {part for part, values in ours.items() if theirs[part] != values}
    assert differ == {"samples", "budgets", "decisions"}
