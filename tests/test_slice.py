"""Slices of large models: 8-bit rows, selections from a source, histories that nobody computed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvpolicy import Engine, EngineConfig, SamplingParams
from kvpolicy.engine.request import RequestOutput
from kvpolicy.errors import UserError
from kvpolicy.geometry.presets import preset
from kvpolicy.kernels import fp8
from kvpolicy.memory.layout import Layout, allowed_kv_dtypes
from kvpolicy.models.dummy import DummyWeights
from kvpolicy.models.glm_dsa import GlmDsa
from kvpolicy.selection import ProcessSource, make_source

CPU = torch.device("cpu")
CONTEXT = 90
BACKENDS = ["reference", pytest.param("triton", marks=pytest.mark.interpreter)]


def micro(backend: str, selection: str = "model") -> GlmDsa:
    weights = DummyWeights("micro-glm", CPU, torch.bfloat16, 4, vocab=256)
    source = make_source(selection, weights.geometry, CPU, backend)
    return GlmDsa(weights, CPU, "micro-glm", backend, torch.bfloat16, source)


@pytest.fixture(params=BACKENDS, scope="module")
def model(request: pytest.FixtureRequest) -> Iterator[GlmDsa]:
    """A group of four layers with selections of the process."""
    return micro(request.param, "process")


def make(model: GlmDsa, controller: object = "resident", **changes: object) -> Engine:
    values: dict[str, object] = {
        "controller": controller,
        "device": model.device.type,
        "kv_dtype": "fp8",
        "max_concurrency": 3,
        "device_kv_mib": 4,
        "host_kv_mib": 4,
        "clock": "steps",
        "validate": True,
    }
    return Engine(EngineConfig(**(values | changes)), model=model)


def decode(engine: Engine, contexts: list[int], tokens: int = 4) -> list[RequestOutput]:
    """A prompt of a few tokens behind each context."""
    params = SamplingParams(max_new_tokens=tokens)
    handles = [engine.submit(b"ab", params, context=context) for context in contexts]
    return [handle.result() for handle in handles]


# --- 8-bit rows -----------------------------------------------------------------------------------


def test_records_are_those_of_the_kernels() -> None:
    layout = Layout(preset("glm-5.3"), "fp8")
    assert {(s.record.bytes, s.key.bytes) for s in layout.stores} == {(656, 132), (2624, 132)}
    assert all(s.record.dtype == torch.uint8 and s.latent == 512 for s in layout.stores)
    assert fp8.row_bytes(512, 64) == 656 and fp8.key_bytes(128) == 132
    assert all(s.latent == 0 for s in Layout(preset("glm-5.3"), "bf16").stores)


@pytest.mark.parametrize("name", ["tiny-dsa", "deepseek-v4.1-flash"])
def test_geometries_without_such_rows_say_what_is_allowed(name: str) -> None:
    assert allowed_kv_dtypes(preset(name)) == ("float32", "bf16")
    text = f"kv_dtype = 'fp8': {name} has no rows of 128 latent .* allowed: float32, bf16"
    with pytest.raises(UserError, match=text):
        Layout(preset(name), "fp8")


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_model_computes_is_stored_in_8_bits(backend: str) -> None:
    """The first layer's rows and keys, of a prompt and of a decode step, in float32 and in 8 bits."""
    model = micro(backend)
    with make(model, kv_dtype="float32") as wide, make(model) as narrow:
        regions = []
        for engine in (wide, narrow):
            engine.submit(b"bytes", SamplingParams(max_new_tokens=9))
            while engine.steps < 2:
                engine.step()
            regions.append(engine.memory.requests[0].region)
        wide_one, narrow_one = regions
        # The second token may differ: the prompt's later layers read rows of other precision.
        exact, records = wide_one.rows[0][:5, 0], narrow_one.rows[0][:5, 0]
        assert torch.equal(fp8.quantize_rows(exact, 128), records)
        assert torch.equal(fp8.quantize_keys(wide_one.keys[0][:5]), narrow_one.keys[0][:5])
        assert bool(fp8.dequantize_rows(narrow_one.rows[0][5], 128).any())


# --- selections -----------------------------------------------------------------------------------


def test_a_source_takes_the_place_of_the_choice(model: GlmDsa) -> None:
    """What is read is what the process says of this request's number, whatever its seat."""
    with make(model) as engine:
        engine.submit(b"x", SamplingParams(max_new_tokens=1))  # request 0
        handle = engine.submit(b"y", SamplingParams(max_new_tokens=4), context=CONTEXT)
        while engine.progress().generated_tokens < 3:
            engine.step()
        (held,) = engine.memory.requests.values()
        chosen = engine.memory.tables.stores[0].recent[held.seat, 0]
        (selector,) = model.geometry.selectors
        source = ProcessSource(model.geometry, CPU)
        number, seen = torch.tensor([1]), torch.tensor([held.committed])
        assert torch.equal(chosen, source.select(selector, number, seen)[0])
        assert handle.result().finish_reason == "length"


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("proces", "say over how many entries a recording is stretched: proces:context=N"),
        ("process:steps=3", "selection = 'process:steps=3': must be model, process"),
        ("nowhere:context=9", "recording 'nowhere': there is no such file"),
    ],
)
def test_sources_that_are_none(spec: str, text: str) -> None:
    with pytest.raises(UserError, match=text):
        make_source(spec, preset("micro-glm"), CPU)


def test_a_source_goes_with_dummy_weights() -> None:
    with pytest.raises(UserError, match="selection = process: goes with dummy_weights"):
        Engine(EngineConfig(device="cpu", selection="process"))


def test_a_recording_is_a_source() -> None:
    with pytest.raises(UserError, match="16 selected entries are no multiple of its 128"):
        make_source("tiny-dsa-step:context=90", preset("micro-glm"), CPU)
    source = make_source("tiny-dsa-step:context=100000", preset("glm-5.3"), CPU)
    assert source is not None and source.name == "recording:tiny-dsa-step.npz"
    selector = preset("glm-5.3").selectors[0]
    chosen = source.select(selector, torch.tensor([0, 5]), torch.tensor([100_001, 100_001]))
    assert chosen.shape == (2, 2048) and bool((chosen.diff(dim=1) > 0).all())
    assert make_source("model", preset("glm-5.3"), CPU) is None


# --- histories ------------------------------------------------------------------------------------


def test_a_history_costs_no_step(model: GlmDsa) -> None:
    """Rows and keys are there, differ between requests, and the first step computes the prompt."""
    with make(model) as engine:
        handles = [engine.submit(b"ab", context=n) for n in (CONTEXT, CONTEXT, 0)]
        engine.step()
        requests = list(engine.memory.requests.values())
        assert [r.committed for r in requests] == [CONTEXT + 2, CONTEXT + 2, 2]
        one, two = (r.region.rows[0][:CONTEXT] for r in requests[:2])
        values = fp8.dequantize_rows(one, 128)
        assert bool(values.isfinite().all()) and abs(float(values.std()) - 1) < 0.05
        assert not torch.equal(one, two)
        assert engine.progress().prompt_tokens_done == 6
        for handle in handles:
            handle.cancel()


def test_histories_need_dummy_weights_and_room(model: GlmDsa) -> None:
    with Engine(EngineConfig(device="cpu")) as engine:
        with pytest.raises(UserError, match="context = 5: goes with dummy weights"):
            engine.submit(b"x", context=5)
    with make(model) as engine:
        with pytest.raises(UserError, match="context = -1"):
            engine.submit(b"x", context=-1)
        with pytest.raises(UserError, match="the model's context is 512 tokens"):
            engine.submit(b"x", SamplingParams(max_new_tokens=2), context=510)


def test_a_history_longer_than_the_block_repeats_it() -> None:
    from kvpolicy.memory.dummy_context import BLOCK, DummyContexts
    from kvpolicy.memory.host_pool import HostPool

    layout = Layout(DummyWeights("micro-glm", CPU, torch.float32, 4).geometry, "fp8")
    tokens = BLOCK + 300
    pool = HostPool(8 << 20, layout, pinned=False)
    region = pool.reserve(tokens + 9)
    pool.words.zero_()
    DummyContexts(layout).fill(region, tokens, request=50)
    rows, keys = region.rows[0], region.keys[0]
    for stored in (rows, keys):
        assert torch.equal(stored[BLOCK:tokens], stored[:300])
        assert bool((stored[:tokens].flatten(1) != 0).any(1).all())
        assert not bool(stored[tokens:].any())


# --- the contract ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", [pytest.param("bf16", marks=pytest.mark.full), "fp8"])
def test_bits_do_not_depend_on_policy_or_budget(model: GlmDsa, kv_dtype: str) -> None:
    contexts = [CONTEXT, 40, 3]
    controllers = ["resident", "static:device_buffer_rows=0", "hisparse:device_buffer_rows=20"]
    if model.backend == "triton":  # a program takes the interpreter 2 ms and more
        contexts, controllers = contexts[:2], controllers[::2]
    found = []
    for controller in controllers:
        with make(model, controller, kv_dtype=kv_dtype) as engine:
            found.append([o.logits_sha256 for o in decode(engine, contexts, tokens=2)])
    assert all(each == found[0] for each in found)
    assert len(set(found[0])) == len(contexts)


def test_bits_do_not_depend_on_company_swaps_or_preemption(model: GlmDsa) -> None:
    """Request 1 alone, and among others while the controller changes."""
    params = SamplingParams(max_new_tokens=3)
    with make(model) as engine:
        engine.submit(b"x").cancel()
        alone = engine.submit(b"ab", params, context=CONTEXT).result()
    with make(model, "hisparse:device_buffer_rows=32", prefill_chunk=3) as engine:
        handles = [engine.submit(b"ab", params, context=n) for n in (70, CONTEXT)]
        engine.step()
        engine.step()
        engine.set_controller("static:device_buffer_rows=7")
        engine.step()
        engine.residents.preempt(engine.requests[1], engine.steps)
        outputs = [handle.result() for handle in handles]
        assert engine.metrics()["preemptions"] == 1
    assert outputs[1].logits_sha256 == alone.logits_sha256


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_a_glm_slice_at_100k(kv_dtype: str) -> None:
    """True size: 3 requests of 100,000 tokens, in graphs, under three policies; device copies checked."""
    cuda = torch.device("cuda")
    weights = DummyWeights("glm-5.3", cuda, torch.bfloat16, 4, vocab=256)
    source = make_source("process", weights.geometry, cuda, "triton")
    model = GlmDsa(weights, cuda, "glm-5.3", "triton", torch.bfloat16, source)
    found = []
    for controller in ("resident", "hisparse", "adaptive"):
        sizes = {"device_kv_mib": 2048, "host_kv_mib": 1600, "max_concurrency": 4}
        with make(
            model, controller, kv_dtype=kv_dtype, clock="wall", validate=False, **sizes
        ) as engine:
            found.append([o.logits_sha256 for o in decode(engine, [100_000, 99_000, 50_000], 12)])
            engine.submit(b"ab", SamplingParams(max_new_tokens=4), context=100_000)
            engine.step()
            engine.step()
            engine.check_integrity()
    assert all(each == found[0] for each in found)
