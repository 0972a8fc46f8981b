"""The whole hierarchy under load: every selected row is exact, whatever the budgets do."""

from __future__ import annotations

from pathlib import Path

import pytest
from checking import CheckingModel
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from micro import micro_model
from scale import examples
from toy_model import ToyModel

import kvpolicy
from kvpolicy import Engine, EngineConfig, Observation, Plan, SamplingParams
from kvpolicy.controllers.base import Controller
from kvpolicy.memory.rule import CacheRule
from kvpolicy.models.loader import DecodeModel


class Restless:
    """Draws every request a new budget at each decision: nothing, some rows, or everything."""

    def __init__(self, seed: int, rule: CacheRule) -> None:
        self.state = seed
        self.cache_rule = rule

    def decide(self, observation: Observation) -> Plan:
        targets = {}
        for request in observation.requests:
            rows = []
            for most in request.max_rows:
                self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
                rows.append((0, 3, 8, 17, 40, most)[(self.state >> 33) % 6])
            targets[request.request_id] = rows
        return Plan(targets=targets)


def run(
    model: DecodeModel, controller: Controller, prompts: list[bytes], **config: object
) -> tuple:
    """Decode under a controller with full validation; returns outputs and the checking wrapper."""
    checked = CheckingModel(model)
    settings_ = {
        "device": "cpu",
        "controller": "static:device_buffer_rows=0",
        "validate": True,
        "control_interval": 2,
        "prefill_chunk": 9,
        "max_concurrency": 3,
        "device_kv_mib": 2.0,
        "host_kv_mib": 4.0,
        **config,
    }
    with Engine(EngineConfig(**settings_), model=checked) as engine:  # type: ignore[arg-type]
        engine.set_controller(controller)
        outputs = engine.generate(prompts, SamplingParams(max_new_tokens=10, temperature=0.8))
        assert engine.memory.usage().host_used == 0
        engine.check_integrity()
    return outputs, checked


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> DecodeModel:
    return micro_model(Path(tmp_path_factory.mktemp("micro")))


# A run takes a second: shrinking a failure would take minutes and tell little more than its seed.
NO_SHRINK = (Phase.explicit, Phase.reuse, Phase.generate)
PROMPTS = [bytes(range(40, 107)), b"ab" * 20, b"x", b"import os\n" * 5]
rules = st.builds(
    CacheRule,
    eviction=st.sampled_from(["lru", "clock", "fifo", "random"]),
    admit_newest=st.booleans(),
    seed=st.sampled_from(["selection", "first"]),
)


@settings(max_examples=examples(6, 40), phases=NO_SHRINK)
@given(
    seed=st.integers(0, 2**32), rule=rules, chunk=st.integers(1, 40), staging=st.integers(16, 80)
)
def test_every_selected_row_is_exact(
    micro: DecodeModel, seed: int, rule: CacheRule, chunk: int, staging: int
) -> None:
    """Rows, maps and both tiers stay exact while budgets jump, and staging forces waves."""
    _, checked = run(
        micro, Restless(seed, rule), PROMPTS, prefill_chunk=chunk, staging_rows=staging
    )
    assert checked.rows_checked > 1000


@settings(max_examples=examples(6, 40), phases=NO_SHRINK)
@given(seed=st.integers(0, 2**32), rule=rules, chunk=st.integers(1, 20), staging=st.integers(4, 20))
def test_toy_geometry_runs_through_the_hierarchy(
    seed: int, rule: CacheRule, chunk: int, staging: int
) -> None:
    """Two stores, three selectors, two tokens per entry and a window: exact, and budget-blind."""
    model = ToyModel()
    outputs, checked = run(
        model, Restless(seed, rule), PROMPTS, prefill_chunk=chunk, staging_rows=staging
    )
    assert checked.rows_checked > 300
    names = {name for name, _ in checked.selections}
    assert names == {"A0", "A2", "B3"}
    full, _ = run(model, kvpolicy.controllers.make("resident"), PROMPTS)
    assert [o.logits_sha256 for o in outputs] == [o.logits_sha256 for o in full]


def test_a_tight_staging_area_serves_the_step_in_waves(micro: DecodeModel) -> None:
    """One row's top-k of staging for three requests: more waves, same bits, counted."""
    prompts = PROMPTS[:1] * 3
    config = EngineConfig(
        controller="static:device_buffer_rows=0",
        staging_rows=16,
        device="cpu",
        device_kv_mib=2,
        host_kv_mib=4,
        decision_deadline_ms=0,  # a busy machine would let the fallback decide
    )
    wide = EngineConfig(**{**config.model_dump(by_alias=True), "staging_rows": None})
    params = SamplingParams(max_new_tokens=10)
    with Engine(config, model=micro) as tight, Engine(wide, model=micro) as roomy:
        a, b = tight.generate(prompts, params), roomy.generate(prompts, params)
        assert [o.logits_sha256 for o in a] == [o.logits_sha256 for o in b]
        assert tight.metrics()["request_waves"] > 0 == roomy.metrics()["request_waves"]
        assert tight.metrics()["fetched_rows"] == roomy.metrics()["fetched_rows"]
        assert tight.metrics()["refetched_rows"] > 0
