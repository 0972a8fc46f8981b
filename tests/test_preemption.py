"""Contexts that grow, requests that are put back to the host, and what comes back: the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checking import CheckingModel
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from micro import micro_model
from scale import examples
from toy_model import ToyModel

from kvpolicy import Engine, EngineConfig, SamplingParams, UserError
from kvpolicy.controllers.static import Static
from kvpolicy.engine.request import RequestOutput, State
from kvpolicy.errors import CapacityError, IntegrityError
from kvpolicy.models.loader import DecodeModel

NO_SHRINK = (Phase.explicit, Phase.reuse, Phase.generate)
PROMPTS = [bytes(range(40, 40 + n)) for n in (50, 30, 64, 10)]
PARAMS = [SamplingParams(max_new_tokens=n, temperature=0.7, seed=n) for n in (90, 120, 60, 150)]


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> DecodeModel:
    return micro_model(Path(tmp_path_factory.mktemp("micro")))


def make(model: DecodeModel, **config: object) -> Engine:
    settings_ = {
        "device": "cpu",
        "validate": True,
        "clock": "steps",
        "max_concurrency": 4,
        "prefill_chunk": 16,
        "host_kv_mib": 4.0,
        "device_kv_mib": 2.0,
        **config,
    }
    return Engine(EngineConfig(**settings_), model=model)  # type: ignore[arg-type]


def tight(model: DecodeModel, controller: str, frames: int, **config: object) -> Engine:
    """An engine with this many frames beside staging and in-flight rows."""
    with make(model, controller=controller, **config) as probe:
        size, shared = probe.memory.layout.frame_bytes, probe.memory._shared
    return make(
        model, controller=controller, device_kv_mib=(shared + frames) * size / 2**20, **config
    )


@pytest.fixture(scope="module")
def alone(micro: DecodeModel) -> list[RequestOutput]:
    """Every request by itself with room for everything."""
    outputs = []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        with make(micro, controller="resident", prefill_chunk=100) as engine:
            outputs += engine.generate([prompt], params)
    return outputs


def assert_same(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for output, one in zip(outputs, expected, strict=True):
        assert output.tokens == one.tokens
        assert output.logits_sha256 == one.logits_sha256
        assert output.finish_reason == one.finish_reason


@pytest.mark.parametrize("frames", [28, 46])
def test_growth_preempts_the_youngest_and_it_resumes_exactly(
    micro: DecodeModel, frames: int
) -> None:
    """Memory for the prompts, not for what they generate: somebody must go, and nobody can tell."""
    prompts = [b"abcd" * k for k in (2, 4, 3, 5)]
    params = [
        SamplingParams(max_new_tokens=n, temperature=0.7, seed=n) for n in (180, 220, 200, 230)
    ]
    with make(micro, controller="resident", validate=False) as engine:
        expected = engine.generate(prompts, params)
        assert engine.metrics()["preemptions"] == 0
    with tight(micro, "resident", frames, validate=False) as engine:
        before, size = engine.memory.usage(), engine.memory.arena.buffer.numel()
        outputs = engine.generate(prompts, params)
        metrics = engine.metrics()
        assert engine.memory.usage() == before
    assert_same(outputs, expected)
    assert metrics["preemptions"] > 0
    assert metrics["shortages"] >= metrics["preemptions"]
    assert metrics["device_kv_bytes_peak"] <= size


@settings(max_examples=examples(10, 100), phases=NO_SHRINK)
@given(
    when=st.lists(st.tuples(st.integers(0, 25), st.integers(0, 3)), min_size=1, max_size=12),
    controller=st.sampled_from(
        ["resident", "hisparse", "static:device_buffer_rows=20", "adaptive"]
    ),
    chunk=st.integers(1, 70),
)
def test_a_request_can_be_preempted_at_any_step(
    micro: DecodeModel,
    alone: list[RequestOutput],
    when: list[tuple[int, int]],
    controller: str,
    chunk: int,
) -> None:
    """In its prompt, between prompt and generation, again right after it came back."""
    with make(micro, controller=controller, prefill_chunk=chunk) as engine:
        handles = [engine.submit(p, q) for p, q in zip(PROMPTS, PARAMS, strict=True)]
        for steps, victim in when:
            for _ in range(steps):
                engine.step()
            running = engine.scheduler.running
            if running:
                engine.residents.preempt(running[victim % len(running)], engine.steps)
                engine.check_integrity()
        outputs = [handle.result() for handle in handles]
        assert engine.memory.usage().host_used == 0 and not engine.memory.suspended
    assert_same(outputs, alone)


@settings(max_examples=examples(6, 40), phases=NO_SHRINK)
@given(
    when=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2)), min_size=1, max_size=6),
    rows=st.integers(0, 40),
)
def test_windows_come_back_too(when: list[tuple[int, int]], rows: int) -> None:
    """The toy model has a pinned window, which only the device holds: preemption saves it."""
    prompts = [bytes(range(40, 90)), b"ab" * 20, b"x"]
    params = SamplingParams(max_new_tokens=30, temperature=0.8)
    spec = f"static:device_buffer_rows={rows}"
    with make(ToyModel(), controller="resident") as engine:  # type: ignore[arg-type]
        expected = engine.generate(prompts, params)
    checked = CheckingModel(ToyModel())  # type: ignore[arg-type]
    with make(checked, controller=spec, prefill_chunk=9) as engine:  # type: ignore[arg-type]
        handles = [engine.submit(p, params) for p in prompts]
        for steps, victim in when:
            for _ in range(steps):
                engine.step()
            running = engine.scheduler.running
            if running:
                engine.residents.preempt(running[victim % len(running)], engine.steps)
        outputs = [handle.result() for handle in handles]
    assert_same(outputs, expected)


def test_who_was_preempted_first_comes_back_first(micro: DecodeModel) -> None:
    """The queue keeps the order of admission; a preempted request goes before all that never ran."""
    with make(micro, controller="resident", max_concurrency=3) as engine:
        handles = [engine.submit(p, PARAMS[0]) for p in [*PROMPTS, b"later"]]
        engine.step()
        for _ in range(2):
            engine.residents.preempt(engine.scheduler.running[-1], engine.steps)
        waiting = [request.id for request in engine.scheduler.waiting]
        assert waiting == [handles[i].id for i in (1, 2, 3, 4)]
        engine.step()
        assert [r.id for r in engine.scheduler.running] == [h.id for h in handles[:3]]


def test_a_preempted_request_can_be_cancelled(micro: DecodeModel) -> None:
    with make(micro, controller="resident") as engine:
        before = engine.memory.usage()
        handle = engine.submit(PROMPTS[0], PARAMS[0])
        for _ in range(9):
            engine.step()
        made = len(handle._request.tokens)
        engine.residents.preempt(engine.scheduler.running[0], engine.steps)
        assert engine.memory.usage().host_used > 0
        handle.cancel()
        engine.check_integrity()
        assert engine.memory.usage() == before
        assert len(handle.result().tokens) == made and handle.result().finish_reason == "cancelled"


def test_optional_rows_give_way_before_anybody_is_preempted(micro: DecodeModel) -> None:
    """A controller that hands out everything: growth takes its rows back, counted and logged."""

    class Greedy:
        def decide(self, observation):  # type: ignore[no-untyped-def]
            from kvpolicy import Plan

            return Plan.even(100_000)

    with tight(micro, "static:device_buffer_rows=0", 26) as engine:
        engine.set_controller(Greedy())
        engine.generate(PROMPTS[:2], PARAMS[:2])
        metrics = engine.metrics()
        assert metrics["shortages"] > 0 == metrics["preemptions"]
        assert metrics["forced_release_bytes"] > 0


def test_take_back_keeps_what_was_promised(micro: DecodeModel) -> None:
    """A promise of everything leaves nothing to take; a smaller one is kept to the row."""
    with make(micro, controller="resident") as engine:
        engine.submit(PROMPTS[2], PARAMS[2])
        engine.step()
        hot = engine.memory.requests[0].hot
        stores = len(hot)
        assert not engine.memory.take_back(1, (float("inf"),) * stores)
        assert engine.memory.take_back(1, (17,) * stores)
        # A cache that would win nothing by leaving its full form stays as it is.
        assert all(cache.full or cache.capacity >= 17 for cache in hot)
        assert not all(cache.full for cache in hot)
        engine.check_integrity()
        assert not engine.memory.take_back(10_000, (0,) * stores)
        engine.check_integrity()


def test_growth_goes_by_frames(micro: DecodeModel) -> None:
    """A request starts with room for its prompt, and takes more only when its context needs it."""
    with make(micro, controller="static:device_buffer_rows=0") as engine:
        engine.submit(b"x", SamplingParams(max_new_tokens=400))
        engine.step()
        request = engine.memory.requests[0]
        rooms = [request.reserved]
        while request.reserved < 300:
            engine.step()
            if request.reserved != rooms[-1]:
                assert request.committed - 1 == rooms[-1]  # not a token earlier
                rooms.append(request.reserved)
        assert rooms == [64, 128, 192, 256, 320]
        assert request.max_tokens == 401


def test_steps_without_room_are_refused(micro: DecodeModel) -> None:
    """The hierarchy itself never writes beyond what is reserved."""
    with make(micro, controller="resident") as engine:
        engine.submit(b"x" * 60, SamplingParams(max_new_tokens=100))
        for _ in range(5):
            engine.step()
        request = engine.memory.requests[0]
        from kvpolicy.memory.segments import Segment

        beyond = Segment(0, 0, 1, request.reserved, decode=True)
        with pytest.raises(IntegrityError, match="exceeds the room"):
            engine.memory.begin_step([beyond], engine.steps)


@pytest.mark.parametrize("state", ["waiting", "running", "preempted"])
def test_a_deadline_cancels_wherever_a_request_is(micro: DecodeModel, state: str) -> None:
    """With the steps clock a step is a millisecond; tokens made so far stay."""
    with make(micro, controller="resident", max_concurrency=1) as engine:
        first = engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=40, deadline_ms=20))
        second = engine.submit(PROMPTS[1], SamplingParams(max_new_tokens=40, deadline_ms=15))
        for _ in range(6):
            engine.step()
        if state == "preempted":
            engine.residents.preempt(engine.scheduler.running[0], engine.steps)
        while not (first.done and second.done):
            engine.step()
            assert engine.steps <= 22
        assert second.result().tokens == []
        if state == "running":
            assert 0 < len(first.result().tokens) < 40
        assert {first.result().finish_reason, second.result().finish_reason} == {"cancelled"}
        assert engine.metrics()["expired"] == 2
        assert engine.memory.usage().host_used == 0


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "soon"])
def test_bad_deadlines(value: object) -> None:
    with pytest.raises(UserError, match="deadline_ms"):
        SamplingParams(deadline_ms=value)


def test_stream_and_cancel_by_id(micro: DecodeModel, alone: list[RequestOutput]) -> None:
    """A stream gives the tokens; closing it ends the request and frees its memory."""
    with make(micro, controller="hisparse") as engine:
        assert list(engine.stream(PROMPTS[0], PARAMS[0])) == alone[0].tokens
        stream = engine.stream(PROMPTS[0], PARAMS[0])
        assert [next(stream) for _ in range(5)] == alone[0].tokens[:5]
        stream.close()  # type: ignore[attr-defined]
        assert not engine.requests and engine.memory.usage().host_used == 0
        handle = engine.submit(PROMPTS[1], PARAMS[1])
        engine.step()
        assert engine.cancel(handle.id) and not engine.cancel(handle.id)
        assert handle.done


def test_states_know_their_ways(micro: DecodeModel) -> None:
    """Only what runs can be preempted; what waits comes back to where it was."""
    with make(micro, controller="resident") as engine:
        handle = engine.submit(PROMPTS[2], PARAMS[2])
        request = handle._request
        with pytest.raises(IntegrityError, match="waiting -> waiting"):
            request.put_back(0)
        engine.step()
        assert request.state is State.PREFILL
        engine.residents.preempt(request, engine.steps)
        engine.step()
        assert request.state is State.PREFILL and request.computed == 32
        while request.state is not State.DECODE:
            engine.step()
        engine.residents.preempt(request, engine.steps)
        assert request.state is State.WAITING
        engine.step()
        assert request.state is State.DECODE and request.preemptions == 2


def test_no_admission_only_to_be_preempted(micro: DecodeModel) -> None:
    """A request is not started into the last frames that the running ones are about to need."""
    with tight(micro, "static:device_buffer_rows=0", 9) as engine:
        engine.generate(PROMPTS, [SamplingParams(max_new_tokens=30)] * 4)
        metrics = engine.metrics()
        assert metrics["preemptions"] == 0
        assert metrics["deferred_admissions"].get("device", 0) > 0


def test_host_and_seats_bind_by_name(micro: DecodeModel) -> None:
    """A full host or no seat: the error says so and takes nothing."""
    with make(micro, controller="static:device_buffer_rows=0", host_kv_mib=0.06) as engine:
        engine.submit(b"x" * 60, SamplingParams(max_new_tokens=60))
        engine.submit(b"x" * 60, SamplingParams(max_new_tokens=60))
        engine.step()
        assert len(engine.scheduler.running) == 1
        assert engine.metrics()["deferred_admissions"] == {"host": 1}
        used = engine.memory.usage()
        with pytest.raises(CapacityError, match=r"^host memory"):
            engine.memory.admit(77, 100, (0,) * len(engine.memory.layout.stores))
        assert engine.memory.usage() == used
        engine.check_integrity()


def test_the_check_sees_a_lost_seat(micro: DecodeModel) -> None:
    with make(micro, controller="resident") as engine:
        engine.submit(PROMPTS[0], PARAMS[0])
        engine.step()
        engine.memory._seats.pop()
        with pytest.raises(IntegrityError, match="seats"):
            engine.check_integrity()
        engine.memory._seats.append(3)
        assert torch.is_tensor(engine.memory.arena.buffer)


@pytest.mark.parametrize("end", ["close", "drop"])
def test_a_stream_that_never_began_ends_too(micro: DecodeModel, end: str) -> None:
    """Closed or forgotten before its first token: the request leaves the engine."""
    with make(micro, controller="hisparse") as engine:
        stream = engine.stream(PROMPTS[0], PARAMS[0])
        assert len(engine.requests) == 1
        if end == "close":
            stream.close()
            stream.close()
            assert list(stream) == []
        del stream
        assert not engine.requests and not engine.scheduler.waiting


def test_a_used_seat_evicts_like_a_new_one(micro: DecodeModel) -> None:
    """Random eviction counts its draws per request: who sat there before changes nothing (the step
    goes into a draw as well, so both begin at the same one)."""
    prompt, params = bytes(range(60, 160)), SamplingParams(max_new_tokens=60)
    spec = "static:device_buffer_rows=17"
    fetched = []
    begin = 0
    for guests in (1, 0):
        with make(micro, controller=spec, eviction="random", max_concurrency=1) as engine:
            engine.generate([prompt] * guests, params)
            begin = max(begin, engine.steps)
            engine.skip(begin - engine.steps)
            before = engine.metrics()["fetched_rows"]
            engine.generate([prompt], params)
            fetched.append(engine.metrics()["fetched_rows"] - before)
    assert fetched[0] == fetched[1] > 0


class Watched(Static):
    """Static, and somebody is followed for miss curves."""

    wants_curves = True


def test_nobody_is_followed_after_a_swap(micro: DecodeModel) -> None:
    """Selections are kept while a controller wants curves, single rows of them, and not longer."""
    with make(micro, controller=Watched(device_buffer_rows=8)) as engine:
        for prompt, params in zip(PROMPTS, PARAMS, strict=True):
            engine.submit(prompt, params)
        while not (followed := [r for r in engine.memory.requests.values() if r.trace]):
            engine.step()
        assert followed[0].trace is not None
        for *_, chosen in followed[0].trace:
            assert chosen.untyped_storage().nbytes() == chosen.numel() * chosen.element_size()
        engine.set_controller("hisparse")
        for _ in range(9):
            engine.step()
        assert all(request.trace is None for request in engine.memory.requests.values())


def test_steps_have_no_seconds_where_they_are_the_clock(micro: DecodeModel) -> None:
    """What a controller sees repeats exactly; on the wall clock a step takes time."""
    for clock, timed in (("steps", False), ("wall", True)):
        with make(micro, controller="hisparse", clock=clock) as engine:
            engine.generate(PROMPTS[:2], SamplingParams(max_new_tokens=20))
            seen = [entry.observation.step_seconds for entry in engine.control.log]
        assert any(seen) is timed
