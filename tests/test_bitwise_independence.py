"""The promise: a policy, a batch, a chunk or a neighbour changes speed and memory, never one bit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from abuse import PROMPTS as ABUSED
from abuse import SETTINGS, Alone, Event, Setting, check, draw_setting, run_alone
from hypothesis import Phase, given, settings
from micro import micro_model, write_checkpoint
from mix import PARAMS, PROMPTS
from scale import examples
from toy_model import ToyModel

from kvpolicy import Engine, EngineConfig
from kvpolicy.models.loader import DecodeModel, load_model

NO_SHRINK = (Phase.explicit, Phase.reuse, Phase.generate)
REQUESTS = range(len(ABUSED))


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> DecodeModel:
    return micro_model(Path(tmp_path_factory.mktemp("micro")))


@pytest.fixture(scope="module")
def alone(micro: DecodeModel) -> dict[int, Alone]:
    """Every request by itself, fully resident, its prompt in one chunk."""
    return {which: run_alone(micro, which) for which in REQUESTS}


@settings(max_examples=examples(20, 200), phases=NO_SHRINK)
@given(setting=SETTINGS)
def test_outputs_do_not_depend_on_budget(
    micro: DecodeModel, alone: dict[int, Alone], setting: Setting
) -> None:
    """Any controller, a hostile one too, swaps and reloads in the middle, evictions, batch mix,
    chunking, arrival order, too little memory, forced preemptions, cancels and deadlines."""
    check(micro, alone, setting)


@settings(max_examples=examples(4, 40), phases=NO_SHRINK)
@given(setting=SETTINGS)
def test_nor_do_those_of_two_stores_and_a_window(setting: Setting) -> None:
    """The toy geometry: two tokens per entry, three selectors, rows that only the device holds."""
    model, which = ToyModel(), (0, 3)
    check(model, {i: run_alone(model, i) for i in which}, setting)


def test_the_settings_reach_what_they_are_for(micro: DecodeModel, alone: dict[int, Alone]) -> None:
    """Two that are known to run out of memory: shortages and preemptions come by themselves."""
    found: Counter[str] = Counter()
    greedy = Setting(("restless", 3), chunk=40, interval=1, spare=12)
    for setting in (greedy, Setting("resident", chunk=64, spare=9)):
        metrics = check(micro, alone, setting)
        found.update({name: metrics[name] for name in ("shortages", "preemptions")})
    assert found["shortages"] and found["preemptions"]
    kinds = {event.kind for seed in range(40) for event in draw_setting(seed).events}
    assert kinds == {"swap", "reload", "preempt", "cancel"}


def test_the_fingerprint_can_differ(micro: DecodeModel, tmp_path: Path) -> None:
    """Other weights give other logits: the comparison above is not blind."""
    other = micro_model(tmp_path / "other", seed=1)
    config = EngineConfig(device="cpu", device_kv_mib=2, host_kv_mib=4)
    outputs = []
    for model in (micro, other):
        with Engine(config, model=model) as engine:
            outputs.append(engine.generate([PROMPTS[0]], PARAMS[0])[0])
    assert outputs[0].logits_sha256 != outputs[1].logits_sha256


@pytest.mark.parametrize("controller", ["resident", "static:device_buffer_rows=40"])
def test_rows_in_bf16_are_independent_too(micro: DecodeModel, controller: str) -> None:
    """The stored format may change the numbers; the policy may not."""

    def run(spec: str, chunk: int) -> list[str]:
        config = EngineConfig(
            device="cpu",
            controller=spec,
            kv_dtype="bf16",
            prefill_chunk=chunk,
            device_kv_mib=2,
            host_kv_mib=4,
            validate=True,
        )
        with Engine(config, model=micro) as engine:
            return [o.logits_sha256 for o in engine.generate(PROMPTS, PARAMS)]

    assert run(controller, 200) == run("static:device_buffer_rows=0", 7)


# --- the same on Triton kernels -------------------------------------------------------------------

# The interpreter takes a second a step: two short requests, and all at once what can happen to them.
SHORT = {"max_new_tokens": 4}
ROUGH = Setting(
    ("restless", 1),
    chunk=20,
    staging=16,
    concurrency=2,
    interval=1,
    spare=6,
    events=(
        Event(2, "preempt", victim=1),
        Event(1, "swap", "static:device_buffer_rows=17"),
        Event(1, "reload", "adaptive:split=equal", eviction="random"),
    ),
)


def test_triton_kernels_keep_the_promise_under_abuse(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preempted, swapped and reloaded at once, with little staging, waves and few frames."""
    import abuse

    monkeypatch.setattr(abuse, "PROMPTS", [b"def f(x):\n    return", bytes(range(18))])
    short = [p.model_copy(update=SHORT) for p in abuse.PARAMS[:2]]
    monkeypatch.setattr(abuse, "PARAMS", short)
    model = load_model(str(write_checkpoint(tmp_path)), device, "triton")
    values = {"device": device.type, "backend": "triton"}
    own = {which: run_alone(model, which, **values) for which in range(2)}
    metrics = check(model, own, ROUGH, **values)
    assert metrics["preemptions"] == 1
