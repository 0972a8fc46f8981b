"""A micro checkpoint with random weights: every feature of tiny-dsa, small enough for hundreds of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kvpolicy.geometry.dsa import from_hf_config
from kvpolicy.models.glm_config import GlmDsaConfig
from kvpolicy.models.glm_dsa import GlmDsa

CONFIG: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "intermediate_size": 32,
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": 16,
    "indexer_types": ["full", "full", "shared"],
    "mlp_layer_types": ["dense", "dense", "dense"],
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 512,
    "vocab_size": 264,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "tie_word_embeddings": False,
}


def write_checkpoint(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write config.json and model.safetensors (random, float32) into ``folder``; returns it."""
    config = {**CONFIG, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = GlmDsaConfig.from_hf(config, from_hf_config(config)).shapes()
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        norm = "norm" in name and not name.endswith("bias")
        weights[name] = 1 + 0.1 * noise if norm else noise * (shape[-1] ** -0.5) * 1.5
    save_file(weights, folder / "model.safetensors")
    return folder


def micro_model(folder: Path, seed: int = 0) -> GlmDsa:
    """The micro model on the CPU."""
    return GlmDsa(write_checkpoint(folder, seed), torch.device("cpu"), name="micro")
