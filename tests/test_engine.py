"""The engine's behaviour at its edges: stop, cancel, capacity, errors, control."""

from __future__ import annotations

from pathlib import Path

import pytest
from micro import micro_model
from toy_model import ToyModel

import kvpolicy
from kvpolicy import Engine, EngineConfig, Observation, Plan, SamplingParams, UserError
from kvpolicy.geometry.presets import TOY
from kvpolicy.models.loader import DecodeModel


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> DecodeModel:
    return micro_model(Path(tmp_path_factory.mktemp("micro")))


def make(model: DecodeModel, **changes: object) -> Engine:
    values = {"device": "cpu", "device_kv_mib": 2, "host_kv_mib": 4, "validate": True, **changes}
    return Engine(EngineConfig(**values), model=model)  # type: ignore[arg-type]


def test_a_handle_streams_the_tokens_of_generate(micro: DecodeModel) -> None:
    params = SamplingParams(max_new_tokens=8, temperature=1.0, seed=3)
    with make(micro) as engine:
        handle = engine.submit(b"hello", params)
        assert list(handle) == handle.result().tokens
        assert handle.result().tokens == engine.generate([b"hello"], params)[0].tokens


def test_prompts_as_bytes_text_and_ids_are_the_same(micro: DecodeModel) -> None:
    with make(micro) as engine:
        outputs = engine.generate([b"abc", "abc", [97, 98, 99]], SamplingParams(max_new_tokens=4))
    assert len({o.logits_sha256 for o in outputs}) == 1


def test_stop_text_ends_and_is_cut(micro: DecodeModel) -> None:
    params = SamplingParams(max_new_tokens=40, temperature=1.5, seed=1)
    with make(micro) as engine:
        free = engine.generate([b"q"], params)[0]
        plain = bytes(t for t in free.tokens if t < 256)
        stop = plain[5:7]
        first = plain.find(stop)
        stopped = engine.generate([b"q"], params.model_copy(update={"stop": (stop,)}))[0]
    assert stopped.finish_reason == "stop"
    assert stopped.tokens == free.tokens[: len(stopped.tokens)]
    assert stopped.text == plain[:first].decode("utf-8", errors="replace")


def test_bos_is_put_first_when_asked(micro: DecodeModel) -> None:
    params = SamplingParams(max_new_tokens=3)
    with make(micro, bos=True) as with_bos, make(micro) as without:
        a = with_bos.generate([b"abc"], params)[0]
        b = without.generate([[256, 97, 98, 99]], params)[0]
        assert with_bos.generate([b""], params)[0].prompt_tokens == 1
    assert (a.prompt_tokens, a.logits_sha256) == (4, b.logits_sha256)


def test_cancel_frees_everything_at_once(micro: DecodeModel) -> None:
    with make(micro) as engine:
        free = engine.memory.usage().free
        handles = [engine.submit(b"abc" * 20, SamplingParams(max_new_tokens=50)) for _ in range(3)]
        for _ in range(4):
            engine.step()
        for handle in handles:
            handle.cancel()
            handle.cancel()
        assert engine.memory.usage().free == free
        assert engine.memory.usage().host_used == 0
        assert [h.result().finish_reason for h in handles] == ["cancelled"] * 3
        assert engine.step() is False


def test_requests_wait_their_turn_and_all_finish(micro: DecodeModel) -> None:
    """Memory for one full request at a time: the others are deferred, by name of the tier."""
    with make(
        micro,
        controller="resident",
        device_kv_mib=0.25,
        staging_rows=16,
        max_concurrency=8,
        prefill_chunk=16,
    ) as engine:
        outputs = engine.generate([b"abcd" * 40] * 4, SamplingParams(max_new_tokens=6))
        assert [o.finish_reason for o in outputs] == ["length"] * 4
        assert engine.metrics()["deferred_admissions"]["device"] > 0


def test_host_memory_can_bind_too(micro: DecodeModel) -> None:
    with make(micro, host_kv_mib=0.08) as engine:
        outputs = engine.generate([b"abcd" * 40] * 3, SamplingParams(max_new_tokens=6))
        assert [o.finish_reason for o in outputs] == ["length"] * 3
        assert set(engine.metrics()["deferred_admissions"]) == {"host"}


@pytest.mark.parametrize(
    ("changes", "prompt", "says"),
    [
        ({}, b"", "prompt is empty"),
        ({}, [264], "prompt token 264"),
        ({}, [-1], "prompt token -1"),
        ({}, [True], "prompt token True"),
        ({}, b"a" * 509, "context is 512"),
        ({"host_kv_mib": 0.02}, b"a" * 300, "host memory"),
        (
            {"device_kv_mib": 0.12, "staging_rows": 16, "controller": "resident"},
            b"a" * 400,
            "device memory",
        ),
    ],
)
def test_a_request_that_can_never_run_is_refused(
    micro: DecodeModel, changes: dict[str, object], prompt: object, says: str
) -> None:
    with make(micro, prefill_chunk=16, **changes) as engine:
        with pytest.raises(UserError, match=says):
            engine.submit(prompt, SamplingParams(max_new_tokens=8))  # type: ignore[arg-type]
        assert (
            engine.generate([b"ok"], SamplingParams(max_new_tokens=2))[0].finish_reason == "length"
        )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"device_kv_mib": 0.01}, "staging"),
        ({"staging_rows": 15}, "at least top-k = 16"),
        ({"controller": "hisparse:device_buffer_rows=8"}, "at least top-k = 16"),
        ({"controller": "hisparse:rows=8"}, "unknown parameter"),
        ({"controller": "residnt"}, "did you mean 'resident'"),
        ({"controller": "static:device_buffer_rows=-1"}, "device_buffer_rows = -1"),
        ({"kv_dtype": "fp8"}, "kv_dtype"),
        ({"devicekv": 1}, "unknown option 'devicekv'"),
    ],
)
def test_a_config_that_cannot_be_had_is_refused(
    micro: DecodeModel, changes: dict[str, object], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        make(micro, **changes)


def test_the_fallback_decides_for_a_failing_controller_and_is_counted(micro: DecodeModel) -> None:
    class Broken:
        def decide(self, observation: Observation) -> Plan:
            raise RuntimeError("no idea")

    class Odd:
        def decide(self, observation: Observation) -> Plan:
            return 3  # type: ignore[return-value]

    with make(micro, control_interval=1) as engine:
        want = engine.generate([b"abc" * 20], SamplingParams(max_new_tokens=6))[0]
        for controller in (Broken(), Odd()):
            before = engine.metrics()["controller_fallbacks"]
            engine.set_controller(controller)
            got = engine.generate([b"abc" * 20], SamplingParams(max_new_tokens=6))[0]
            assert got.logits_sha256 == want.logits_sha256
            assert engine.metrics()["controller_fallbacks"] > before
        assert "no idea" in " ".join(d.reason for d in engine.control.log)
        assert {"raised", "type"} <= {d.fallback for d in engine.control.log}


def test_absurd_plans_are_projected(micro: DecodeModel) -> None:
    class Absurd:
        def decide(self, observation: Observation) -> Plan:
            values = (float("nan"), -5.0, 1e30, float("inf"), 7.5)
            ids = [r.request_id for r in observation.requests]
            return Plan(targets={i: values[(i + observation.step) % 5] for i in ids})

    with make(
        micro, control_interval=1, device_kv_mib=0.5, staging_rows=16, prefill_chunk=16
    ) as engine:
        want = [o.logits_sha256 for o in engine.generate([b"ab" * 60] * 3)]
        engine.set_controller(Absurd())
        assert [o.logits_sha256 for o in engine.generate([b"ab" * 60] * 3)] == want
        assert engine.metrics()["controller_projections"] > 0


def test_a_bad_swap_leaves_the_old_controller(micro: DecodeModel) -> None:
    with make(micro) as engine:
        old = engine.control.controller
        with pytest.raises(UserError):
            engine.set_controller("static:rows=3")
        assert engine.control.controller is old


def test_release_is_counted_when_budgets_fall(micro: DecodeModel) -> None:
    with make(micro, controller="resident") as engine:
        handle = engine.submit(b"abcd" * 50, SamplingParams(max_new_tokens=20))
        for _ in range(6):
            engine.step()
        held = engine.memory.optional_bytes()
        engine.set_controller("static:device_buffer_rows=20")
        engine.step()
        assert engine.memory.optional_bytes() < held
        assert engine.metrics()["release_steps"] == 1
        assert engine.metrics()["moved_bytes"] == 0, "releasing copies nothing from the host"
        handle.cancel()


def test_not_finite_logits_end_in_an_error(tmp_path: Path) -> None:
    model = micro_model(tmp_path)
    model.final_norm.fill_(float("nan"))
    with make(model) as engine:
        output = engine.generate([b"abc"], SamplingParams(max_new_tokens=4))[0]
        assert (output.finish_reason, output.tokens) == ("error", [])
        assert engine.memory.usage().host_used == 0


def test_a_closed_engine_says_so(micro: DecodeModel) -> None:
    engine = make(micro)
    engine.submit(b"abc")
    engine.close()
    engine.close()
    with pytest.raises(UserError, match="closed"):
        engine.submit(b"abc")


def test_a_swap_to_a_hungrier_controller_does_not_strand_what_waits(micro: DecodeModel) -> None:
    """What waits was promised memory under the old controller; it runs with what there is."""
    with make(
        micro, controller="static:device_buffer_rows=0", device_kv_mib=0.15, staging_rows=16,
        prefill_chunk=16, max_concurrency=1,
    ) as engine:  # fmt: skip
        params = SamplingParams(max_new_tokens=8)
        want = engine.generate([b"ab" * 200], params)[0]
        handles = [engine.submit(b"ab" * 200, params) for _ in range(2)]
        engine.step()
        engine.set_controller("resident")
        assert [h.result().logits_sha256 for h in handles] == [want.logits_sha256] * 2
        assert engine.metrics()["reduced_admissions"] > 0


def test_ended_requests_leave_nothing_behind(micro: DecodeModel) -> None:
    """Only what lives is kept; the totals stay."""
    with make(micro) as engine:
        for _ in range(3):
            engine.generate([b"abc"] * 2, SamplingParams(max_new_tokens=3))
        assert not engine.requests
        progress = engine.progress()
        assert (progress.finished, progress.generated_tokens) == (6, 18)
        assert progress.prompt_tokens_done == progress.prompt_tokens_total == 18


class _Quiet:
    def decide(self, observation: Observation) -> Plan:
        return Plan()


@pytest.mark.parametrize(
    ("controller", "says"),
    [
        (None, "must be an object with a method decide"),
        (_Quiet, "must be an object with a method decide"),
        (type("A", (_Quiet,), {"initial": lambda self, stores: float("nan")})(), "initial"),
        (type("B", (_Quiet,), {"initial": lambda self, stores: [1, 2, 3, 4, 5]})(), "initial"),
        (type("C", (_Quiet,), {"initial": lambda self, stores: "many"})(), "initial"),
        (type("D", (_Quiet,), {"cache_rule": "lru"})(), "cache_rule"),
    ],
)
def test_an_object_that_is_no_controller_is_refused(
    micro: DecodeModel, controller: object, says: str
) -> None:
    with make(micro) as engine:
        old = engine.control.controller
        with pytest.raises(UserError, match=says):
            engine.set_controller(controller)  # type: ignore[arg-type]
        assert engine.control.controller is old
        engine.generate([b"abc"], SamplingParams(max_new_tokens=2))


def test_a_full_cache_that_shrinks_keeps_what_all_selectors_chose() -> None:
    """Two selectors on one store: the entries of both are remembered together."""
    with make(ToyModel(), controller="resident", device_kv_mib=0.5) as engine:  # type: ignore[arg-type]
        handle = engine.submit(b"abcdefgh" * 6, SamplingParams(max_new_tokens=6))
        while len(handle._request.tokens) < 4:
            engine.step()
        request = engine.memory.requests[handle.id]
        recent = request.recent(0)
        assert recent is not None and recent.numel() > TOY.selectors[0].topk
        engine.set_controller(f"static:device_buffer_rows={recent.numel()}")
        engine.control.step(engine.memory, engine._load())
        assert request.hot[0].count_missing(recent) == 0
        handle.cancel()


def test_controllers_are_listed_and_described() -> None:
    assert {"resident", "hisparse", "static"} <= set(kvpolicy.controllers.names())
    assert all(line for _, line in kvpolicy.controllers.describe())
