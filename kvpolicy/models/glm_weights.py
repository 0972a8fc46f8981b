"""The weights of a ``glm_moe_dsa`` decoder as its kernels read them, built layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvpolicy.geometry.geometry import Geometry
from kvpolicy.kernels.latents import LatentNorms
from kvpolicy.kernels.ops import Ops
from kvpolicy.kernels.packing import Packed
from kvpolicy.models.glm_config import LATENT_EPS, GlmDsaConfig


class Weights(Protocol):
    """Where a model's tensors come from."""

    @property
    def config(self) -> GlmDsaConfig: ...
    @property
    def geometry(self) -> Geometry: ...

    def take(self, name: str) -> Tensor:
        """A tensor of ``config.shapes()`` on the model's device, to be taken once: matrices in the
        model's dtype, vectors (of norms) in float32."""
        ...


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Products that read the same rows are packed together.

    inputs: query latent, row, and where ``chooses`` index key and head weights. queries: of
    attention, and where ``chooses`` of the indexer. key_up [heads, nope, kv_rank], value_up [heads,
    kv_rank, value].
    """

    attention_norm: Tensor
    mlp_norm: Tensor
    inputs: Packed
    norms: LatentNorms
    queries: Packed
    key_up: Tensor
    value_up: Tensor
    o: Packed
    gate_up: Packed
    down: Packed
    chooses: bool

    @property
    def nbytes(self) -> int:
        """Device bytes."""
        norms = (self.norms.query, self.norms.row, self.norms.key, self.norms.key_bias)
        tensors = (self.attention_norm, self.mlp_norm, self.key_up, self.value_up, *norms)
        packed = (self.inputs, self.queries, self.o, self.gate_up, self.down)
        return sum(t.nbytes for t in tensors if t is not None) + sum(p.nbytes for p in packed)


def layer_weights(source: Weights, ops: Ops, layer: int) -> LayerWeights:
    """The weights of one layer, packed for ``ops``."""
    cfg = source.config
    chooses = layer in cfg.full_layers

    def get(name: str) -> Tensor:
        return source.take(f"model.layers.{layer}.{name}")

    def packed(*names: str) -> Packed:
        return ops.pack(*(get(f"{name}.weight") for name in names))

    inputs, queries = ["q_a_proj", "kv_a_proj_with_mqa"], ["q_b_proj"]
    if chooses:
        inputs += ["indexer.wk", "indexer.weights_proj"]
        queries += ["indexer.wq_b"]
    up = get("self_attn.kv_b_proj.weight").view(cfg.heads, cfg.nope + cfg.value, cfg.kv_rank)
    return LayerWeights(
        attention_norm=get("input_layernorm.weight"),
        mlp_norm=get("post_attention_layernorm.weight"),
        inputs=packed(*(f"self_attn.{name}" for name in inputs)),
        norms=LatentNorms(
            query=get("self_attn.q_a_layernorm.weight"),
            row=get("self_attn.kv_a_layernorm.weight"),
            key=get("self_attn.indexer.k_norm.weight") if chooses else None,
            key_bias=get("self_attn.indexer.k_norm.bias") if chooses else None,
            eps=LATENT_EPS,
        ),
        queries=packed(*(f"self_attn.{name}" for name in queries)),
        key_up=ops.pack_heads(up[:, : cfg.nope]),
        value_up=ops.pack_heads(up[:, cfg.nope :].transpose(1, 2)),
        o=packed("self_attn.o_proj"),
        gate_up=packed("mlp.gate_proj", "mlp.up_proj"),
        down=packed("mlp.down_proj"),
        chooses=chooses,
    )


def dtype_of(shape: tuple[int, ...], dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a model keeps a tensor of this shape: norms are computed in float32."""
    return dtype if len(shape) > 1 else torch.float32
