"""The runner, phases, goodput and the search for a bound, on the micro model counted in steps."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from micro import micro_model

from kvpolicy import Engine, EngineConfig, SamplingParams, UserError, workloads
from kvpolicy.errors import IntegrityError
from kvpolicy.models.loader import DecodeModel
from kvpolicy.telemetry.latency import Latencies
from kvpolicy.telemetry.phases import PhaseReport, phase_reports
from kvpolicy.telemetry.slo import Slo, goodput
from kvpolicy.telemetry.timeline import Phase, Timeline
from kvpolicy.workloads.bound import Probe, largest_concurrency, probe
from kvpolicy.workloads.prompts import from_prompts
from kvpolicy.workloads.runner import Runner, RunResult
from kvpolicy.workloads.workload import Arrival, Workload

STEP = "synthetic:step?low=2&high=5&duration=30&prompt_bytes=30-60&output_tokens=8-12&text=heldout"


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> DecodeModel:
    return micro_model(Path(tmp_path_factory.mktemp("micro")))


def engine(model: DecodeModel, **changes: object) -> Engine:
    values = {"device": "cpu", "clock": "steps", "device_kv_mib": 2, "host_kv_mib": 8, **changes}
    return Engine(EngineConfig(**values), model=model)


def run(model: DecodeModel, uri: str, **changes: object) -> RunResult:
    with engine(model, **changes) as own:
        return Runner(own, workloads.make(uri, "steps")).run()


def reports(result: RunResult, slo: Slo | None = None) -> list[PhaseReport]:
    return phase_reports(result.timeline, [o.latencies for o in result.outputs], slo)


# --- the runner -----------------------------------------------------------------------------------


def test_a_run_counted_in_steps_repeats_itself(micro: DecodeModel) -> None:
    first, second = run(micro, STEP), run(micro, STEP)
    assert first.outputs == second.outputs
    assert (first.end, len(first.timeline)) == (second.end, len(second.timeline))
    for name in ("step", "time", "load", "required_mib", "miss_rate", "tokens_per_step"):
        ours, theirs = (r.timeline.series()[name] for r in (first, second))
        assert np.array_equal(ours, theirs, equal_nan=True), name
    dropped = {"step_ms"}
    for a, b in zip(reports(first), reports(second), strict=True):
        assert all(v == b.to_dict()[k] for k, v in a.to_dict().items() if k not in dropped)


def test_controllers_change_no_output(micro: DecodeModel) -> None:
    runs = [run(micro, STEP, controller=name) for name in ("resident", "hisparse")]
    outputs = [[(o.tokens, o.logits_sha256) for o in r.outputs] for r in runs]
    shared = min(map(len, outputs))
    assert shared > 10 and outputs[0][:shared] == outputs[1][:shared]
    fetched = [sum(p.fetched_rows for p in reports(r)) for r in runs]
    assert fetched[0] == 0 < fetched[1]


def test_a_level_is_held_and_the_rest_drains(micro: DecodeModel) -> None:
    result = run(micro, STEP)
    phases = reports(result)
    assert [p.name for p in phases] == ["low", "high", "low again", "drain"]
    assert [(p.start, p.end) for p in phases[:3]] == [
        (pytest.approx(0.03 * i), pytest.approx(0.03 * (i + 1))) for i in range(3)
    ]
    assert phases[0].running_mean == pytest.approx(2, abs=0.5)
    assert phases[1].running_mean == pytest.approx(5, abs=0.7)
    assert {o.finish_reason for o in result.outputs} == {"length"}
    series = result.timeline.series()
    assert series["load"].max() == 5 and series["load"][-1] == 0
    assert sum(p.arrived for p in phases) == sum(p.ended for p in phases) == len(result.outputs)
    made = sum(len(o.tokens) for o in result.outputs)
    assert sum(p.generated_tokens for p in phases) == made
    assert phases[-1].arrived == 0


def test_a_rise_waits_for_memory(micro: DecodeModel) -> None:
    """0.2 MiB hold two or three of these requests in full, and all five in part."""
    few = reports(run(micro, STEP, controller="resident", device_kv_mib=0.2, max_concurrency=5))
    many = reports(run(micro, STEP, controller="resident", device_kv_mib=2, max_concurrency=5))
    assert (many[1].rise_steps, many[1].longest_wait_steps, many[1].waiting_mean) == (0, 0, 0)
    assert few[1].rise_steps is not None and few[1].rise_steps > 5
    assert few[1].longest_wait_steps is not None
    assert few[1].longest_wait_s == pytest.approx(few[1].longest_wait_steps / 1e3)
    assert few[1].longest_wait_steps >= few[1].rise_steps and few[1].waiting_mean > 0.5
    assert few[2].rise_steps is None  # the level falls
    assert few[1].idle_share < many[1].idle_share


def test_open_arrivals_come_in_their_step(micro: DecodeModel) -> None:
    uri = "synthetic:poisson?rate=0.1&duration=100&prompt_bytes=20&output_tokens=3&text=heldout"
    result = run(micro, uri)
    wanted = [math.floor(a.time * 1e3) for a in workloads.make(uri, "steps").requests()]
    assert [round(o.latencies.arrived * 1e3) for o in result.outputs] == wanted
    assert result.end == pytest.approx(max(0.1, *(o.latencies.last_token for o in result.outputs)))
    steady, drain = reports(result)
    assert (steady.arrived, drain.arrived) == (len(wanted), 0)


def test_idle_time_passes_without_steps(micro: DecodeModel) -> None:
    def requests() -> object:
        return iter([Arrival(0.5, b"abc", 2, 0), Arrival(2.0, b"def", 2, 0)])

    workload = Workload("two", (Phase("all", 0.0, 3.0),), requests, closed=False)  # type: ignore[arg-type]
    with engine(micro) as own:
        result = Runner(own, workload).run()
        decoded = own.sample().decode_steps
    assert [o.latencies.arrived for o in result.outputs] == pytest.approx([0.5, 2.0])
    assert (decoded, result.end) == (2, pytest.approx(3.0))


def test_wall_clock_arrivals_are_waited_for(micro: DecodeModel) -> None:
    workload = workloads.make(
        "synthetic:burst?rate=2&high=2&duration=0.4&prompt_bytes=20&output_tokens=3&text=heldout"
    )
    with engine(micro, clock="wall") as own:
        started = time.perf_counter()
        result = Runner(own, workload).run()
        took = time.perf_counter() - started
    assert took >= 0.4
    arrivals = [a.time for a in workload.requests()]
    given = [o.latencies.arrived - result.timeline.origin for o in result.outputs]
    assert given == pytest.approx(arrivals)
    assert all((o.latencies.ttft or 0) > 0 for o in result.outputs)
    by_phase = {p.name: p.arrived for p in reports(result)}
    assert all(by_phase[f"burst {i}"] >= 2 for i in (1, 2, 3))


def test_sampling_and_length_are_the_workloads(micro: DecodeModel) -> None:
    uri = "synthetic:poisson?rate=0.2&duration=20&prompt_bytes=20&output_tokens=5&text=heldout"
    sampling = SamplingParams(temperature=1.0, seed=99, max_new_tokens=50)
    workload = workloads.make(f"{uri}&seed=3", "steps")
    with engine(micro) as own:
        result = Runner(own, workload, sampling).run()
        first = next(workload.requests())
        alone = own.generate(
            [first.prompt], sampling.model_copy(update={"seed": 3, "max_new_tokens": 5})
        )
    assert result.outputs[0].logits_sha256 == alone[0].logits_sha256
    assert {len(o.tokens) for o in result.outputs} == {5}


def test_prompts_are_a_workload_too(micro: DecodeModel) -> None:
    sampling = SamplingParams(max_new_tokens=4)
    with engine(micro) as own:
        result = Runner(own, from_prompts([b"one", b"two"], sampling), sampling).run()
        plain = own.generate([b"one", b"two"], sampling)
    assert [o.logits_sha256 for o in result.outputs] == [o.logits_sha256 for o in plain]
    assert [p.name for p in reports(result)] == ["prompts"]


def test_a_request_that_never_fits_is_an_error(micro: DecodeModel) -> None:
    with pytest.raises(UserError, match="device memory"):
        run(micro, STEP, controller="resident", device_kv_mib=0.11)


def test_an_engine_that_stands_still_is_an_error(micro: DecodeModel) -> None:
    with engine(micro) as own:
        runner = Runner(own, from_prompts([b"x"], SamplingParams()))
        own.step = lambda: False  # type: ignore[method-assign]
        with pytest.raises(IntegrityError, match="1 requests are neither running nor done"):
            runner.run()


# --- goodput and latencies ------------------------------------------------------------------------


def served(arrived: float, first: float, last: float, tokens: int, wait: int = 0) -> Latencies:
    return Latencies(arrived, arrived + wait / 1e3, first, last, wait, tokens)


NEVER = Latencies(0.0, None, None, None, None, 0)


def test_goodput_counts_the_tokens_of_requests_inside_the_bounds() -> None:
    fast = served(0.0, 1.0, 3.0, 11)  # 0.2 s a token, first after 1 s
    slow = served(0.0, 1.0, 5.0, 11)  # 0.4 s a token
    late = served(0.0, 3.0, 4.0, 11)
    requests = [fast, slow, late, NEVER]
    assert goodput(requests, Slo(tpot=0.2), 0.0, 11.0) == 22 / 11
    assert goodput(requests, Slo(ttft=1.0), 0.0, 11.0) == 22 / 11
    assert goodput(requests, Slo(tpot=0.2, ttft=1.0), 0.0, 11.0) == 1.0
    assert goodput(requests, Slo(tpot=0.05), 0.0, 11.0) == 0.0
    assert goodput(requests, None, 0.0, 11.0) is None
    assert goodput(requests, Slo(tpot=1.0), 2.0, 2.0) is None


def test_goodput_of_a_part_counts_the_tokens_of_that_part() -> None:
    request = served(0.0, 1.0, 3.0, 11)  # tokens at 1.0, 1.2, ... 3.0
    parts = [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0), (3.0, 4.0)]
    assert [request.tokens_between(*part) for part in parts] == [0, 5, 5, 1]
    assert goodput([request], Slo(ttft=1.0), 1.0, 2.0) == 5.0


def test_a_single_token_holds_any_bound_per_token() -> None:
    assert Slo(tpot=1e-6).holds(served(0.0, 9.0, 9.0, 1))
    assert not Slo(tpot=1.0).holds(NEVER)


def test_a_bound_of_three_steps_is_held_by_three_steps() -> None:
    start = 0.1 + 0.2  # not 0.3: floating-point sums are off by a rounding
    assert Slo(ttft=0.003).holds(served(start, start + 0.003, start + 0.004, 2))


@given(st.integers(1, 40), st.integers(0, 50), st.integers(0, 50), st.integers(1, 9))
def test_parts_of_a_request_add_up(tokens: int, first: int, cut: int, gap: int) -> None:
    request = served(0.0, first / 1e3, (first + gap * (tokens - 1)) / 1e3, tokens)
    before, after = request.tokens_between(0.0, cut / 1e3), request.tokens_between(cut / 1e3, 9.0)
    assert before + after == tokens
    assert before == sum(first + gap * i < cut for i in range(tokens))


def sample(step: int, **changes: float) -> dict[str, float]:
    names = (
        *("running", "waiting", "required_bytes", "optional_bytes", "free_bytes"),
        *("selected_rows", "unique_rows", "fetched_rows", "host_to_device_bytes"),
        *("generated_tokens", "decode_steps", "preemptions", "busy_seconds"),
    )
    return {**dict.fromkeys(names, 0.0), "step": step, "time": step / 1e3, **changes}


def test_a_report_by_hand() -> None:
    timeline = Timeline()
    timeline.add(sample(0, free_bytes=100))
    timeline.mark(Phase("a", 0.0, 0.010, 1), range(1))
    timeline.add(sample(5, running=1, required_bytes=50, optional_bytes=30, free_bytes=20))
    middle = sample(10, running=1, required_bytes=60, optional_bytes=40, free_bytes=0)
    middle |= {"selected_rows": 80, "unique_rows": 40, "fetched_rows": 10, "generated_tokens": 6}
    timeline.add(middle | {"decode_steps": 4, "busy_seconds": 0.4})
    timeline.mark(Phase("b", 0.010, 0.020, 0))
    timeline.add(middle | {"step": 20, "time": 0.020, "generated_tokens": 8, "preemptions": 2})
    requests = [served(0.0, 0.004, 0.009, 6, wait=2), served(0.010, 0.012, 0.013, 2)]
    a, b = phase_reports(timeline, requests, Slo(ttft=0.003))
    assert (a.steps, a.arrived, a.ended, a.generated_tokens, a.fetched_rows) == (10, 1, 1, 6, 10)
    assert (a.miss_rate, a.miss_rate_selected) == (0.25, 0.125)
    assert (a.running_mean, a.required_bytes_mean, a.optional_bytes_mean) == (1, 55, 35)
    assert (a.idle_share, a.step_ms) == (pytest.approx(0.1), pytest.approx(100))
    assert (a.tpot_ms["p50"], a.ttft_ms["p50"]) == (pytest.approx(1), pytest.approx(4))
    assert (a.tokens_per_s, a.goodput_tokens_per_s, a.slo_share) == (pytest.approx(600), 0, 0)
    assert (a.rise_steps, a.longest_wait_steps, a.longest_wait_s) == (2, 2, pytest.approx(0.002))
    assert (b.miss_rate, b.step_ms, b.rise_steps, b.preemptions) == (None, None, None, 2)
    assert (b.arrived, b.ended, b.slo_share) == (1, 1, 1)
    assert b.goodput_tokens_per_s == pytest.approx(200)


def test_a_sample_of_the_same_moment_replaces_the_last() -> None:
    timeline = Timeline()
    for running in (1, 2):
        timeline.add(sample(3, running=running))
    assert (len(timeline), timeline.column("running").tolist()) == (1, [2])


def test_latencies_of_the_engine(micro: DecodeModel) -> None:
    with engine(micro, max_concurrency=1) as own:
        handles = [own.submit(b"x" * 100, SamplingParams(max_new_tokens=5)) for _ in range(2)]
        first, second = (h.result().latencies for h in handles)
    # Two chunks of 64 prompt rows, then a token a step.
    assert (first.wait, first.waited_steps) == (0, 0)
    assert (first.ttft, first.tpot) == (pytest.approx(0.001), pytest.approx(0.001))
    assert second.waited_steps == 6 and second.wait == pytest.approx(0.006)
    assert first.tokens == 5 and asdict(replace(first, tokens=1))["tokens"] == 1
    assert replace(first, tokens=1).tpot is None


# --- the bound ------------------------------------------------------------------------------------


@given(st.integers(1, 200), st.integers(0, 220))
def test_bisection_finds_the_largest_level_that_holds(most: int, fast: int) -> None:
    tried = []

    def measure(level: int) -> Probe:
        tried.append(level)
        return Probe(level, 0.01 if level <= fast else 0.03, 0.0, 1.0)

    found = largest_concurrency(measure, 0.02, most)
    assert found.level == min(fast, most)
    assert found.limited_by == (None if fast >= most else "tpot")
    assert len(set(tried)) == len(tried) <= math.log2(most + 1) + 1
    assert (found.best is None) == (found.level == 0)


def test_waiting_for_memory_is_no_concurrency() -> None:
    def measure(level: int) -> Probe:
        return Probe(level, 0.001, 0.0 if level <= 3 else 0.5, 1.0)

    found = largest_concurrency(measure, 0.02, 16)
    assert (found.level, found.limited_by) == (3, "memory")
    assert found.to_dict()["concurrency"] == 3


def test_a_probe_holds_its_level(micro: DecodeModel) -> None:
    workload = workloads.make(STEP, "steps")
    with engine(micro) as own:
        found, result = probe(own, workload, 4)
    assert len(result.outputs) == 12
    assert result.timeline.series()["load"].max() == 4
    assert (found.level, found.waiting_share) == (4, 0.0)
    assert found.tpot == pytest.approx(0.001)  # counted in steps a token takes one
    assert found.tokens_per_s == pytest.approx(4000, rel=0.25)
    with engine(micro, max_concurrency=2) as own:
        crowded, _ = probe(own, workload, 4)
    assert crowded.waiting_share > 0.3 and crowded.limit(1.0) == "memory"
