"""Checkpoints and configs that cannot be used: one clear line each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from micro import CONFIG, micro_model, write_checkpoint
from safetensors.torch import load_file, save_file

from kvpolicy import Engine, EngineConfig, SamplingParams, UserError
from kvpolicy.models.glm_dsa import GlmDsa
from kvpolicy.yaml_values import read_yaml

CPU = torch.device("cpu")


def load(folder: Path) -> GlmDsa:
    return GlmDsa(folder, CPU, name="test")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_type"),
        ({"rope_parameters": {}}, "rope_parameters.rope_theta"),
        ({"rope_theta": 10000.0}, "rope_theta: give it inside rope_parameters"),
        ({"qk_rope_head_dim": 18}, "qk_rope_head_dim is 18"),
        ({"qk_rope_head_dim": 7}, "must be even"),
        ({"max_position_embeddings": 10**13}, "max_position_embeddings"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        ({"mlp_layer_types": ["dense"] * 2}, "mlp_layer_types"),
        ({"mlp_layer_types": ["dense", "sparse", "dense"]}, "mlp_layer_types"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"eos_token_id": 264}, "eos_token_id"),
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"model_type": "llama"}, "model_type"),
    ],
)
def test_a_config_that_is_not_ours_is_refused(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **change}))
    with pytest.raises(UserError, match=says) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_broken_files_are_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for cut in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:cut])
        with pytest.raises(UserError, match=r"model\.safetensors"):
            load(folder)
    weights.unlink()
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        load(folder)
    (folder / "config.json").write_text("[" * 5000)
    with pytest.raises(UserError, match="not readable JSON"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"no config\.json"):
        load(folder)


@pytest.mark.parametrize("fault", ["missing", "shape", "extra", "nan", "huge", "float8", "int"])
def test_wrong_tensors_are_named(tmp_path: Path, fault: str) -> None:
    path = write_checkpoint(tmp_path) / "model.safetensors"
    weights, name = load_file(path), "model.norm.weight"
    if fault == "missing":
        del weights[name]
    elif fault == "extra":
        weights["model.layers.9.x"] = torch.zeros(1)
        name = "model.layers.9.x"
    else:
        weights[name] = {
            "shape": torch.ones(31),
            "nan": torch.full((32,), float("nan")),
            "huge": torch.full((32,), 1e300, dtype=torch.float64),
            "float8": torch.ones(32).to(torch.float8_e4m3fn),
            "int": torch.ones(32, dtype=torch.int32),
        }[fault]
    save_file(weights, path)
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        load(tmp_path)


def test_a_name_that_cannot_be_a_path_is_refused() -> None:
    with pytest.raises(UserError, match="unknown model"):
        Engine(EngineConfig(model="x" * 300, device="cpu"))


@pytest.mark.parametrize("change", [{"kv_lora_rank": 19}, {"v_head_dim": 7}])
def test_odd_widths_keep_the_promise(tmp_path: Path, change: dict[str, Any]) -> None:
    """Where a row's bits depend on its place in a product, rows run one by one."""
    write_checkpoint(tmp_path, **change)
    prompts = [b"abcdefgh" * 6, b"xy", b"import os\n" * 4]
    params = SamplingParams(max_new_tokens=5)
    shas = []
    for controller, chunk, seats in (("resident", 90, 1), ("static:device_buffer_rows=20", 7, 3)):
        config = EngineConfig(
            device="cpu", controller=controller, prefill_chunk=chunk, max_concurrency=seats,
            device_kv_mib=3, host_kv_mib=4,
        )  # fmt: skip
        with Engine(config, model=load(tmp_path)) as engine:
            shas.append([o.logits_sha256 for o in engine.generate(prompts, params)])
    assert shas[0] == shas[1]


@pytest.mark.parametrize(
    "text", ["2020-13-45", "!!int abc", "!!bool foo", "9" * 5000, "[" * 3000, "a: b: c", "\x00"]
)
def test_yaml_faults_are_one_line(text: str) -> None:
    with pytest.raises(UserError, match="it is not valid YAML") as caught:
        read_yaml(text, "it")
    assert "\n" not in str(caught.value)


def test_a_failure_inside_a_step_ends_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a step is never continued: the next call says what happened, memory can be freed."""
    config = EngineConfig(device="cpu", controller="static:device_buffer_rows=20",
                          device_kv_mib=2, host_kv_mib=4)  # fmt: skip
    engine = Engine(config, model=micro_model(tmp_path))
    handle = engine.submit(b"abcdefgh" * 9, SamplingParams(max_new_tokens=9))
    while len(engine.requests[handle.id].tokens) < 3:
        engine.step()

    def fail(*args: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvpolicy.memory.decode.DecodeStep._retrieve", fail)
    with pytest.raises(KeyboardInterrupt):
        while engine.step():
            pass
    monkeypatch.undo()
    for call in (engine.step, handle.result, lambda: engine.submit(b"x")):
        with pytest.raises(UserError, match="middle of a step \\(KeyboardInterrupt\\)"):
            call()
    handle.cancel()
    engine.close()
    assert engine.memory.usage().host_used == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda e: e.submit(None),
        lambda e: e.submit(5),
        lambda e: e.submit("\ud800"),
        lambda e: e.submit(b"x", {"max_new_tokens": 3}),
        lambda e: e.generate(b"abc"),
        lambda e: e.generate("abc"),
        lambda e: e.generate(None),
        lambda e: Engine("tiny-dsa"),
        lambda e: SamplingParams(max_new_tokens=True),
        lambda e: EngineConfig(device_kv_mib=float("nan")),
    ],
)
def test_misuse_of_the_python_interface_is_one_line(tmp_path: Path, call: Any) -> None:
    with Engine(EngineConfig(device="cpu", device_kv_mib=2), model=micro_model(tmp_path)) as engine:
        with pytest.raises(UserError) as caught:
            call(engine)
        assert "\n" not in str(caught.value)
