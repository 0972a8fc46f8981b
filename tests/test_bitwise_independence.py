"""The promise: a policy, a batch, a chunk or a neighbour changes speed and memory, never one bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from micro import micro_model
from mix import PARAMS, PROMPTS
from scale import examples

from kvpolicy import Engine, EngineConfig
from kvpolicy.engine.request import RequestOutput
from kvpolicy.models.loader import DecodeModel

NO_SHRINK = (Phase.explicit, Phase.reuse, Phase.generate)


@dataclass(frozen=True)
class Setting:
    """One way to run the same requests."""

    controller: str
    eviction: str | None
    chunk: int
    staging: int
    concurrency: int
    order: tuple[int, ...]
    gap: int
    cancelled: int | None
    swap: str | None


CONTROLLERS = st.one_of(
    st.sampled_from(["resident", "hisparse", "hisparse:device_buffer_rows=16"]),
    st.integers(0, 120).map(lambda rows: f"static:device_buffer_rows={rows}"),
)
SETTINGS = st.builds(
    Setting,
    controller=CONTROLLERS,
    eviction=st.sampled_from([None, "lru", "clock", "fifo", "random"]),
    chunk=st.integers(1, 70),
    staging=st.integers(16, 64),
    concurrency=st.integers(1, 4),
    order=st.permutations(range(4)).map(tuple),
    gap=st.integers(0, 5),
    cancelled=st.sampled_from([None, 0, 1, 2, 3]),
    swap=st.one_of(st.none(), CONTROLLERS),
)


def decode(model: DecodeModel, setting: Setting) -> dict[int, RequestOutput]:
    """Run all four requests; outputs by request, the cancelled one left out."""
    config = EngineConfig(
        device="cpu",
        controller=setting.controller,
        eviction=setting.eviction,  # type: ignore[arg-type]
        prefill_chunk=setting.chunk,
        staging_rows=setting.staging,
        control_interval=3,
        max_concurrency=setting.concurrency,
        device_kv_mib=2,
        host_kv_mib=4,
        validate=True,
    )
    handles = {}
    with Engine(config, model=model) as engine:
        for index in setting.order:
            handles[index] = engine.submit(PROMPTS[index], PARAMS[index])
            for _ in range(setting.gap):
                engine.step()
        if setting.swap is not None:
            engine.set_controller(setting.swap)
        if setting.cancelled is not None:
            handles.pop(setting.cancelled).cancel()
        return {index: handle.result() for index, handle in handles.items()}


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> DecodeModel:
    return micro_model(Path(tmp_path_factory.mktemp("micro")))


@pytest.fixture(scope="module")
def alone(micro: DecodeModel) -> dict[int, RequestOutput]:
    """Every request by itself, fully resident, its prompt in one chunk."""
    outputs = {}
    for index, prompt in enumerate(PROMPTS):
        config = EngineConfig(
            device="cpu",
            controller="resident",
            prefill_chunk=200,
            max_concurrency=1,
            device_kv_mib=2,
            host_kv_mib=4,
        )
        with Engine(config, model=micro) as engine:
            outputs[index] = engine.generate([prompt], PARAMS[index])[0]
    return outputs


@settings(max_examples=examples(25, 200), phases=NO_SHRINK)
@given(setting=SETTINGS)
def test_outputs_do_not_depend_on_budget(
    micro: DecodeModel, alone: dict[int, RequestOutput], setting: Setting
) -> None:
    """Budgets 0 to full, evictions, batch mix, chunking, arrival order, a cancelled neighbour, a swap."""
    for index, output in decode(micro, setting).items():
        assert output.tokens == alone[index].tokens
        assert output.logits_sha256 == alone[index].logits_sha256
        assert output.finish_reason == alone[index].finish_reason


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
