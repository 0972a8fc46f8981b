"""The parts of a Hugging Face ``glm_moe_dsa`` config that the dense decode model needs, validated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpolicy.errors import UserError
from kvpolicy.geometry.geometry import Geometry
from kvpolicy.geometry.hf_config import positive, whole

# transformers' GlmMoeDsa norms of the query and KV latents, and of the index keys, ignore
# rms_norm_eps and use this.
LATENT_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class GlmDsaConfig:
    """Dimensions in values. q_rank: of the query latent; kv_rank: of the cached latent."""

    layers: int
    hidden: int
    vocab: int
    heads: int
    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    mlp: int
    index_heads: int
    index_dim: int
    eps: float
    theta: float
    max_positions: int
    tied: bool
    bos: int | None
    eos: tuple[int, ...]
    full_layers: frozenset[int]

    @staticmethod
    def from_hf(config: Mapping[str, Any], geometry: Geometry) -> GlmDsaConfig:
        """UserError naming the field where the model is not one that this backend computes."""
        _refuse(config)
        sizes = {
            key: whole(config, key)
            for key in (
                "hidden_size", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
                "v_head_dim", "intermediate_size", "num_attention_heads",
            )
        }  # fmt: skip
        first = geometry.selectors[0]
        turned = sizes["qk_rope_head_dim"]
        if turned % 2 or turned > first.index_head_dim:
            raise UserError(
                f"config field qk_rope_head_dim is {turned}: must be even, and at most "
                f"index_head_dim = {first.index_head_dim}"
            )
        rope = config["rope_parameters"]
        return GlmDsaConfig(
            layers=geometry.num_layers,
            hidden=sizes["hidden_size"],
            vocab=geometry.vocab_size,
            heads=sizes["num_attention_heads"],
            q_rank=sizes["q_lora_rank"],
            kv_rank=sizes["kv_lora_rank"],
            nope=sizes["qk_nope_head_dim"],
            rope=sizes["qk_rope_head_dim"],
            value=sizes["v_head_dim"],
            mlp=sizes["intermediate_size"],
            index_heads=first.index_heads,
            index_dim=first.index_head_dim,
            eps=positive({"rms_norm_eps": 1e-5, **config}, "rms_norm_eps"),
            theta=positive(rope, "rope_theta", "rope_parameters.rope_theta"),
            max_positions=geometry.max_context,
            tied=config.get("tie_word_embeddings", False),
            bos=_token(config.get("bos_token_id"), "bos_token_id", geometry.vocab_size),
            eos=_tokens(config.get("eos_token_id"), geometry.vocab_size),
            full_layers=frozenset(s.source_layer for s in geometry.selectors),
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the checkpoint and its shape, by its Hugging Face name."""
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, self.hidden),
            "model.norm.weight": (self.hidden,),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            for name, shape in self._layer_shapes(layer in self.full_layers).items():
                shapes[prefix + name + ("" if name.endswith("bias") else ".weight")] = shape
        return shapes

    def _layer_shapes(self, full: bool) -> dict[str, tuple[int, ...]]:
        heads, hidden = self.heads, self.hidden
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_a_proj": (self.q_rank, hidden),
            "self_attn.q_a_layernorm": (self.q_rank,),
            "self_attn.q_b_proj": (heads * (self.nope + self.rope), self.q_rank),
            "self_attn.kv_a_proj_with_mqa": (self.kv_rank + self.rope, hidden),
            "self_attn.kv_a_layernorm": (self.kv_rank,),
            "self_attn.kv_b_proj": (heads * (self.nope + self.value), self.kv_rank),
            "self_attn.o_proj": (hidden, heads * self.value),
            "mlp.gate_proj": (self.mlp, hidden),
            "mlp.up_proj": (self.mlp, hidden),
            "mlp.down_proj": (hidden, self.mlp),
        }
        if full:
            shapes |= {
                "self_attn.indexer.wq_b": (self.index_heads * self.index_dim, self.q_rank),
                "self_attn.indexer.wk": (self.index_dim, hidden),
                "self_attn.indexer.k_norm": (self.index_dim,),
                "self_attn.indexer.k_norm.bias": (self.index_dim,),
                "self_attn.indexer.weights_proj": (self.index_heads, hidden),
            }
        return shapes


def _refuse(config: Mapping[str, Any]) -> None:
    """What this backend does not compute, named."""
    kinds, layers = config.get("mlp_layer_types"), config.get("num_hidden_layers")
    if not isinstance(kinds, list) or kinds != ["dense"] * len(kinds) or len(kinds) != layers:
        raise UserError(
            "config field mlp_layer_types: this backend runs dense layers only, one entry a layer"
        )
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise UserError(f"config field {key} is {config[key]!r}: this backend has no biases")
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"config field hidden_act is {config['hidden_act']!r}: allowed silu")
    if not isinstance(config.get("tie_word_embeddings", False), bool):
        raise UserError("config field tie_word_embeddings: must be true or false")
    for key in ("rope_theta", "rope_scaling"):
        if config.get(key) is not None:
            raise UserError(f"config field {key}: give it inside rope_parameters")
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping):
        raise UserError(f"config field rope_parameters is {rope!r}: needs rope_type and rope_theta")
    if rope.get("rope_type", "default") != "default":
        raise UserError(
            f"config field rope_parameters.rope_type is {rope['rope_type']!r}: allowed default"
        )


def _token(value: object, key: str, vocab: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab:
        raise UserError(f"config field {key} is {value!r}: needs a token id from 0 to {vocab - 1}")
    return value


def _tokens(value: object, vocab: int) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value]
    found = (_token(v, "eos_token_id", vocab) for v in ids)
    return tuple(v for v in found if v is not None)
