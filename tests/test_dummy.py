"""Dummy weights: slices of whole groups, the expert-parallel share, and bits that nothing moves."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from kvpolicy import Engine, EngineConfig, SamplingParams
from kvpolicy.cli.main import app
from kvpolicy.engine.request import RequestOutput
from kvpolicy.errors import UserError
from kvpolicy.geometry.dsa import whole_groups
from kvpolicy.geometry.presets import preset
from kvpolicy.models.dummy import DIMENSIONS, DummyWeights
from kvpolicy.models.glm_dsa import GlmDsa

CPU = torch.device("cpu")
PROMPTS = [b"a prompt of more tokens than a selection has", b"and another one", b"x"]


# --- slices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [4, 8, 76])
def test_a_slice_is_whole_groups_of_the_model(layers: int) -> None:
    whole, part = preset("glm-5.3"), whole_groups(preset("glm-5.3"), layers)
    assert part.num_layers == layers and len(part.stores) == layers // 4
    for i, (store, selector) in enumerate(zip(part.stores, part.selectors, strict=True)):
        assert store.layers == selector.reader_layers == tuple(range(4 * i, 4 * i + 4))
        assert selector.source_layer == 4 * i and selector.topk == 2048
        assert store.record_bytes("bf16") == whole.record_bytes(whole.stores[2].name, "bf16")


def test_all_layers_are_the_model_itself() -> None:
    assert whole_groups(preset("glm-5.3"), 78) is preset("glm-5.3")
    assert whole_groups(preset("deepseek-v3.2"), 5).num_layers == 5  # each layer is a group there


@pytest.mark.parametrize("layers", [0, 1, 2, 6, 77, 80])
def test_half_a_group_is_refused(layers: int) -> None:
    text = f"layers = {layers}: glm-5.3 repeats a group of 4 .* multiples of 4 up to 76, and all 78"
    with pytest.raises(UserError, match=text):
        whole_groups(preset("glm-5.3"), layers)


# --- weights --------------------------------------------------------------------------------------


def test_the_expert_share_is_that_of_one_gpu() -> None:
    """FLOPs and weight bytes of balanced routing, counted expert by expert."""
    dims, batch = DIMENSIONS["glm-5.3"], 128
    assert dims.parallel == 32
    held = dims.experts // dims.parallel
    rows_per_expert = dims.parallel * batch * dims.chosen / dims.experts
    matrix = 6144 * dims.expert_width
    assert 3 * matrix * (held + dims.shared) == 3 * 6144 * dims.mlp  # weights
    macs = 3 * matrix * (held * rows_per_expert + dims.shared * batch)
    assert macs == batch * 3 * 6144 * dims.mlp == batch * 3 * 6144 * 18432


def test_weights_do_not_depend_on_the_slice() -> None:
    one, two = (DummyWeights("micro-glm", CPU, torch.float32, n) for n in (4, 8))
    name = "model.layers.1.self_attn.o_proj.weight"
    assert torch.equal(one.take(name), two.take(name))
    assert not torch.equal(one.take(name), one.take(name.replace("1", "2")))
    other = DummyWeights("micro-glm", CPU, torch.float32, 4, seed=1)
    assert not torch.equal(one.take(name), other.take(name))


def test_matrices_keep_the_scale_of_a_row_and_norms_are_float32() -> None:
    source = DummyWeights("micro-glm", CPU, torch.bfloat16, 4)
    weight = source.take("model.layers.0.self_attn.q_b_proj.weight")
    assert weight.dtype == torch.bfloat16 and weight.shape == (4 * 32, 32)
    assert abs(float(weight.float().std()) * 32**0.5 - 1) < 0.05
    norm = source.take("model.layers.0.input_layernorm.weight")
    assert norm.dtype == torch.float32 and bool((norm == 1).all())


def test_the_vocabulary_is_the_layers_share() -> None:
    def vocab(layers: int, vocab: int | None = None) -> int:
        weights = DummyWeights("glm-5.3", CPU, torch.bfloat16, layers, vocab)
        assert weights.config.vocab == weights.geometry.vocab_size
        return weights.config.vocab

    assert vocab(78) == 154880
    assert vocab(4) == 7944 // 64 * 64 + 64  # 154880 * 4 / 78 = 7942.6, in steps of 64
    assert vocab(4, 300) == 300
    with pytest.raises(UserError, match=r"vocab = 255: glm-5.3 allows 256 .* to 154880"):
        vocab(4, 255)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"model": "glm-5.3"}, "is a geometry without weights: run it with dummy_weights"),
        ({"model": "deepseek-v3.2", "dummy_weights": True}, "unknown model 'deepseek-v3.2'"),
        ({"model": "glm-5.3", "dummy_weights": True, "layers": 3}, "layers = 3: glm-5.3 repeats"),
        ({"layers": 4}, "layers = 4: goes with dummy_weights"),
        ({"vocab": 300}, "vocab = 300: goes with dummy_weights"),
    ],
)
def test_what_is_no_dummy_is_refused(values: dict[str, object], text: str) -> None:
    with pytest.raises(UserError, match=text):
        Engine(EngineConfig(device="cpu", **values))


# --- decoding -------------------------------------------------------------------------------------


def decode(model: GlmDsa, controller: str, chunk: int, prompts: list[bytes]) -> list[RequestOutput]:
    config = EngineConfig(
        controller=controller,
        device="cpu" if model.device.type == "cpu" else "cuda",
        prefill_chunk=chunk,
        device_kv_mib=4,
        host_kv_mib=4,
        staging_rows=64,
        validate=True,
    )
    with Engine(config, model=model) as engine:
        return engine.generate(prompts, SamplingParams(max_new_tokens=12))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_budget_batch_or_chunk(dtype: torch.dtype) -> None:
    model = GlmDsa(DummyWeights("micro-glm", CPU, dtype, 4), CPU, "micro-glm", dtype=dtype)
    alone = [decode(model, "resident", 64, [prompt])[0].logits_sha256 for prompt in PROMPTS]
    for controller, chunk in (("static:device_buffer_rows=0", 7), ("hisparse", 64)):
        together = decode(model, controller, chunk, PROMPTS)
        assert [o.logits_sha256 for o in together] == alone


def test_bf16_is_near_float32() -> None:
    """The same weights in both: logits of unit size differ by the rounding of what products read."""
    wide = DummyWeights("micro-glm", CPU, torch.bfloat16, 4)
    narrow = DummyWeights("micro-glm", CPU, torch.bfloat16, 4)
    take = wide.take
    wide.take = lambda name: take(name).float()  # type: ignore[method-assign]
    models = (
        GlmDsa(wide, CPU, "micro-glm"),
        GlmDsa(narrow, CPU, "micro-glm", dtype=torch.bfloat16),
    )
    rows = torch.arange(16)
    for exact, ours in zip(*(m._probe(m.ops, rows, 16, 64) for m in models), strict=True):
        if not bool(exact.any()):  # differences within one model
            continue
        error = (ours.float() - exact).norm() / exact.norm()
        assert 0 < error < 0.02


def test_the_command_line_runs_a_slice() -> None:
    arguments = [
        "run",
        "--model",
        "micro-glm",
        "--dummy-weights",
        "--layers",
        "4",
        "--vocab",
        "260",
    ]
    arguments += ["--dtype", "bfloat16", "--kv-dtype", "bf16", "--device", "cpu", "--json", "hello"]
    result = CliRunner().invoke(app, [*arguments, "--max-new-tokens", "3"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert '"layers": 4' in result.stdout


@pytest.mark.gpu
def test_a_glm_slice_has_the_same_bits_under_any_budget() -> None:
    """True dimensions: one group of four layers in bf16, contexts of some 3,000 tokens."""
    cuda = torch.device("cuda")
    source = DummyWeights("glm-5.3", cuda, torch.bfloat16, 4, vocab=512)
    model = GlmDsa(source, cuda, "glm-5.3", "triton", torch.bfloat16)
    prompts = [bytes(i * 7 % 251 for i in range(length)) for length in (2900, 2500, 300)]
    found = []
    for controller, together in (("resident", False), ("static:device_buffer_rows=2100", True)):
        config = EngineConfig(
            controller=controller,
            device="cuda",
            kv_dtype="bf16",
            prefill_chunk=512,
            max_concurrency=4,
            device_kv_mib=2048,
            host_kv_mib=512,
        )
        groups = [prompts] if together else [[prompt] for prompt in prompts]
        with Engine(config, model=model) as engine:
            outputs = [
                output
                for group in groups
                for output in engine.generate(group, SamplingParams(max_new_tokens=8))
            ]
        found.append([o.logits_sha256 for o in outputs])
    assert found[0] == found[1]


@pytest.mark.gpu
def test_the_command_line_runs_glm_5_3() -> None:
    arguments = ["run", "--model", "glm-5.3", "--dummy-weights", "--layers", "4", "--json", "hello"]
    arguments += ["--dtype", "bfloat16", "--kv-dtype", "bf16", "--device-kv-mib", "1024"]
    result = CliRunner().invoke(app, [*arguments, "--max-new-tokens", "4"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert '"finish_reason": "length"' in result.stdout
