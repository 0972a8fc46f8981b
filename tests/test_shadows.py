"""Shadow controllers: what they miss is what a live run of theirs misses, to the row."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from quick_model import QuickModel
from recorded import prompts
from toy_model import ToyModel

from kvpolicy import Plan
from kvpolicy.config import EngineConfig, SamplingParams
from kvpolicy.control.decision import Decision
from kvpolicy.engine.engine import Engine
from kvpolicy.errors import UserError
from kvpolicy.models.loader import DecodeModel
from kvpolicy.shadows import Shadows
from kvpolicy.shadows.regret import regrets
from kvpolicy.workloads import make
from kvpolicy.workloads.runner import Runner

LONG = pytest.mark.full
SPECS = (
    "hisparse:device_buffer_rows=12",
    "static:device_buffer_rows=9",
    "resident",
    "hybrid",
    "adaptive",
    "adaptive:split=equal",
    "random:seed=3",
)


class Moody:
    """Resizes, fills and empties caches at every decision, by what it sees."""

    def __init__(self) -> None:
        self.turn = 0

    def decide(self, observation: Any) -> Plan:
        self.turn += 1
        sizes = (8, 30, 1000, 12, 2000, 0, 17)
        missed = sum(r.fetched_rows for r in observation.requests) % 5
        targets = {
            r.request_id: sizes[(self.turn + r.request_id) % len(sizes)] + missed
            for r in observation.requests
        }
        return Plan(targets=targets)


class Run:
    """One live run. metrics, log: of the live controller; shadows: their reports and logs."""

    def __init__(
        self,
        model: DecodeModel,
        controller: Any,
        shadows: tuple[Any, ...] = (),
        tokens: int = 30,
        preempt_every: int = 0,
        **settings: Any,
    ) -> None:
        values = {
            "device": "cpu",
            "clock": "steps",
            "device_kv_mib": 1.0,
            "prefill_chunk": 16,
            "control_interval": 5,
            **settings,
        }
        with Engine(EngineConfig(**values), model) as engine:
            engine.set_controller(controller)
            watcher = Shadows(engine, shadows)
            log: list[Decision] = []
            engine.control.listeners.append(log.append)
            handles = []
            params = SamplingParams(max_new_tokens=tokens)
            for number, prompt in enumerate(prompts(5)):
                if number < 3 or not preempt_every:
                    handles.append(engine.submit(prompt, params))
                for _ in range(3):
                    self._step(engine, preempt_every)
            while not all(handle.done for handle in handles):
                self._step(engine, preempt_every)
            self.log, self.metrics = log, engine.metrics()
            self.reports = watcher.report()
            self.logs = [list(policy.control.log) for policy in watcher.policies]
            self.samples = watcher.samples(asdict(engine.sample()))
            watcher.close()
            assert not engine.observers and len(engine.control.listeners) == 1
            self.outputs = [handle.result() for handle in handles]

    def _step(self, engine: Engine, preempt_every: int) -> None:
        engine.step()
        running = engine.scheduler.running
        if preempt_every and engine.steps % preempt_every == 0 and len(running) > 1:
            engine.residents.preempt(running[-1], engine.steps)


def seen(log: list[Decision]) -> list[Any]:
    """What was observed and decided. A shadow does not know what prompts fetch."""
    return [
        (replace(each.observation, host_to_device_bytes=0), each.plan, each.projected)
        for each in log
    ]


@pytest.mark.parametrize(
    ("model", "eviction"), [(QuickModel, None), pytest.param(ToyModel, "clock", marks=LONG)]
)
def test_a_shadow_misses_what_a_live_run_misses(model: Any, eviction: str | None) -> None:
    """Every controller in the shadow of another: same observations, same plans, same misses."""
    shadows = (*SPECS, Moody())
    beside = Run(model(), "static:device_buffer_rows=20", shadows, eviction=eviction)
    assert beside.metrics["preemptions"] == beside.metrics["shortages"] == 0
    for number, spec in enumerate(SPECS):
        live = Run(model(), spec, eviction=eviction)
        report = beside.reports[number]
        assert seen(beside.logs[number]) == seen(live.log), spec
        assert report["fetched_rows"] == live.metrics["fetched_rows"], spec
        assert report["unique_rows"] == live.metrics["unique_rows"] > 0
        # The engine looks when requests that ended have left.
        assert report["optional_bytes_mean"] == pytest.approx(
            live.metrics["optional_bytes_mean"], rel=0.05
        )
        assert report["exact"] and report["controller_fallbacks"] == 0
        assert live.outputs == beside.outputs
    live = Run(model(), Moody(), eviction=eviction)
    assert beside.reports[-1]["fetched_rows"] == live.metrics["fetched_rows"] > 0
    assert beside.reports[-1]["promoted_rows"] > 0
    for report, sample in zip(beside.reports, beside.samples, strict=True):
        assert sample["fetched_rows"] == report["fetched_rows"] and sample["optional_bytes"] == 0
        assert sample["free_bytes"] + sample["required_bytes"] == 1 << 20


@pytest.mark.parametrize("spec", ["static:device_buffer_rows=10", "hybrid", "adaptive"])
def test_preempted_requests(spec: str) -> None:
    """Put back at the same steps, they come back with their last selections in both."""
    beside = Run(ToyModel(), "static:device_buffer_rows=14", (spec,), preempt_every=7)
    live = Run(ToyModel(), spec, preempt_every=7)
    assert beside.metrics["preemptions"] == live.metrics["preemptions"] > 3
    assert seen(beside.logs[0]) == seen(live.log)
    assert beside.reports[0]["fetched_rows"] == live.metrics["fetched_rows"] > 0


def test_a_shadow_says_when_it_would_have_had_another_schedule() -> None:
    """Memory for a few hot rows: a shadow that wants all has no room for who is admitted; beside one
    that lets requests wait, a small one would have let them in."""
    tight = {"device_kv_mib": 0.14, "max_concurrency": 4, "tokens": 60}
    greedy = Run(QuickModel(), "static:device_buffer_rows=4", ("resident",), **tight)
    report = greedy.reports[0]
    assert not report["exact"] and report["squeezed"] + report["shortages"] > 0
    patient = Run(QuickModel(), "resident", ("static:device_buffer_rows=4",), **tight)
    report = patient.reports[0]
    assert not report["exact"] and report["early"] > 0
    assert greedy.outputs == patient.outputs


def test_bad_specs_leave_the_engine_alone() -> None:
    with Engine(EngineConfig(device="cpu", device_kv_mib=1.0), QuickModel()) as engine:
        with pytest.raises(UserError, match="did you mean 'hisparse'"):
            Shadows(engine, ["static", "hisparsee"])
        assert not engine.observers and not engine.control.listeners


def test_regrets_of_a_load() -> None:
    """What each controller moved beyond the bound, on one batch schedule; nobody moves less."""
    workload = make("synthetic:step?low=1&high=3&duration=30&prompt_bytes=60", "steps")
    config = EngineConfig(device="cpu", clock="steps", device_kv_mib=0.3, prefill_chunk=32)
    # Stores of quick have rows of different sizes, which no one split can compare.
    with pytest.raises(UserError, match="stores have rows of"):
        regrets(config, workload, ["static"], SamplingParams(max_new_tokens=4), QuickModel())
    specs = ["static:device_buffer_rows=9", "static:device_buffer_rows=30", "resident"]
    sampling = SamplingParams(max_new_tokens=20)
    model = ToyModel()
    found = regrets(config, workload, specs, sampling, model=model)
    assert [line.policy for line in found[:3]] == specs
    small, large, full = found[:3]
    assert small.regret_rows > large.regret_rows >= full.regret_rows >= 0
    assert found[-1].regret_rows == 0 and all(line.regret_rows >= 0 for line in found)
    with Engine(config, model) as engine:
        engine.set_controller(specs[0])
        Runner(engine, workload, sampling).run()
        assert engine.metrics()["fetched_rows"] == small.fetched_rows
