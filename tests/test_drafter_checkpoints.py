"""Drafter checkpoints: what is read, what is refused and how, and which one a name means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import METHODS, propose, small_config, some_taps, weights_of
from micro import micro_model
from safetensors.torch import save_file

from kvpolicy.errors import UserError
from kvpolicy.models.glm_dsa import GlmDsa
from kvpolicy.speculative import registry
from kvpolicy.speculative.drafters.checkpoint import load, with_random_weights
from kvpolicy.speculative.drafters.config import DrafterConfig, default_taps


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> GlmDsa:
    return micro_model(tmp_path_factory.mktemp("micro"))


def write(folder: Path, method: str, **changes: Any) -> Path:
    """A checkpoint folder; changes: fields of config.json, None takes one out."""
    config = small_config(method)
    fields = {**config.to_json(), **changes}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in fields.items() if v is not None})
    )
    save_file(weights_of(config), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_a_folder_gives_the_drafter_that_was_written(
    target: GlmDsa, tmp_path: Path, method: str
) -> None:
    config = small_config(
        method, calibration={"greedy": (1.0, 2.0, 1.0, 1.0)} if method == "dspark" else {}
    )
    assert DrafterConfig.from_json(config.to_json()) == config
    drafter = load(write(tmp_path / "x", method), target)
    taps = some_taps(30, config)
    same = with_random_weights(small_config(method), target, seed=0)
    assert torch.equal(propose(drafter, taps, 20, 65).tokens, propose(same, taps, 20, 65).tokens)
    by_name = registry.make(f"{method}:{tmp_path / 'x'}", target)
    assert by_name is not None and by_name.name == method


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("dspark", {"architectures": ["LlamaForCausalLM"]}, "architectures is"),
        ("dspark", {"block_size": 0}, "block_size is 0"),
        ("dspark", {"head_dim": None}, "head_dim is missing"),
        ("dspark", {"num_key_value_heads": 3}, "is no multiple of num_key_value_heads"),
        ("dspark", {"markov_head_type": "gated"}, "computes 'vanilla' only"),
        ("dspark", {"sliding_window": 2}, "must be at least block_size"),
        ("dspark", {"confidence_temperatures": {"greedy": [1.0]}}, "needs 4 numbers each"),
        (
            "dspark",
            {"confidence_temperatures": {"greedy": [1.0, 1.0, 0.0, 1.0]}},
            "finite number > 0",
        ),
        ("dspark", {"confidence_temperatures": {"hot": []}}, "allowed keys greedy and sampled"),
        ("dflash2", {"sample_from_anchor": True}, "DFlash2 fills in"),
        (
            "dflash",
            {"dflash_config": {"mask_token_id": 999, "target_layer_ids": [0]}},
            "below vocab_size",
        ),
        (
            "dflash",
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 0]}},
            "ascending",
        ),
        ("dflash", {"dflash_config": []}, "needs an object"),
        ("dflash", {"is_causal": "yes"}, "must be true or false"),
        ("dflash", {"final_logit_softcapping": 30.0}, "computes None only"),
        ("dflash", {"vocab_size": 300}, "its target has 264"),
        ("dflash", {"hidden_size": 64}, "its target has 32"),
        (
            "dflash",
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 3]}},
            "layers 0 to 2",
        ),
        ("dflash", {"intermediate_size": 40}, "has shape"),
        ("dflash2", {"num_hidden_layers": 1}, "unexpected tensor"),
    ],
)
def test_a_wrong_field_is_one_clear_line(
    target: GlmDsa, tmp_path: Path, method: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as error:
        load(write(tmp_path / "x", method, **changes), target)
    assert "\n" not in str(error.value)


def test_names_and_folders(target: GlmDsa, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none ships for model 'micro'"):
        registry.make("dspark", target)
    with pytest.raises(UserError, match="is no folder"):
        registry.make(f"dspark:{tmp_path / 'nowhere'}", target)
    with pytest.raises(UserError, match="of method dflash, asked for dspark"):
        registry.make(f"dspark:{write(tmp_path / 'x', 'dflash')}", target)
    with pytest.raises(UserError, match="did you mean"):
        registry.make("dsprk", target)


def test_default_taps_are_those_of_the_public_checkpoint() -> None:
    """Of Qwen3-4B, 36 layers; one tap lies in the middle."""
    assert default_taps(36, 5) == (1, 9, 17, 25, 33)
    assert default_taps(36, 1) == (18,)
