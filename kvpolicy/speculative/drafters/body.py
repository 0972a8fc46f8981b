"""The body that all three drafters share: DFlash's transformer over a block, with injected keys and values.

Source: DFlash (z-lab), DSpark (arXiv 2607.05147, equations 2 and 3). Per committed token the taps of the
target are fused into one vector, and each draft layer's key and value of it are kept: they are a function
of that token alone. A block of rows (the anchor, then masks) attends to these and to itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvpolicy.kernels.elementwise import rope_table
from kvpolicy.kernels.ops import Ops
from kvpolicy.kernels.packing import Packed
from kvpolicy.speculative.drafters.config import DrafterConfig
from kvpolicy.speculative.drafters.convolution import GroupedConvolution

Weights = Mapping[str, Tensor]


class DraftTarget(Protocol):
    """What a drafter borrows of the model that it drafts for: both ends, and its kernels.

    embedding: [vocab, hidden]. head: to the logits of a normed hidden state.
    """

    @property
    def embedding(self) -> Tensor: ...
    @property
    def head(self) -> Packed: ...
    @property
    def ops(self) -> Ops: ...


@dataclass(frozen=True, slots=True)
class BodyLayer:
    """One draft layer. key_value: the matrices that context and block share; gate_up: of the SwiGLU.
    convolutions: around attention and MLP, None without."""

    attention_norm: Tensor
    query: Packed
    key_value: Packed
    query_norm: Tensor
    key_norm: Tensor
    output: Packed
    mlp_norm: Tensor
    gate_up: Packed
    down: Packed
    convolutions: tuple[GroupedConvolution, GroupedConvolution] | None


class Body:
    """Weights of the body, and its two functions. All arithmetic is that of the target's kernels."""

    def __init__(self, config: DrafterConfig, weights: Weights, target: DraftTarget) -> None:
        self.config = config
        self.ops = target.ops
        self.embedding = target.embedding
        self.head = target.head
        self.mask = weights["mask_embedding"].float()
        self.fusion = self.ops.pack(weights["fc.weight"])
        self.fusion_norm = weights["hidden_norm.weight"]
        self.final_norm = weights["norm.weight"]
        self.layers = [self._layer(weights, n) for n in range(config.layers)]
        # The last rows of a block may stand beyond the target's last position.
        self.rope = rope_table(
            config.max_positions + config.block, config.head_dim, config.theta, self.mask.device
        )

    def _layer(self, weights: Weights, number: int) -> BodyLayer:
        def get(name: str) -> Tensor:
            return weights[f"layers.{number}.{name}"]

        def packed(*names: str) -> Packed:
            return self.ops.pack(*(get(f"{name}.weight") for name in names))

        convolutions = None
        if self.config.method == "dflash2":
            first, second = (
                GroupedConvolution(
                    get(f"{place}_conv.base_kernel").float(),
                    packed(f"{place}_conv.kernel_projection"),
                )
                for place in ("attention", "mlp")
            )
            convolutions = first, second
        return BodyLayer(
            attention_norm=get("input_layernorm.weight"),
            query=packed("self_attn.q_proj"),
            key_value=packed("self_attn.k_proj", "self_attn.v_proj"),
            query_norm=get("self_attn.q_norm.weight"),
            key_norm=get("self_attn.k_norm.weight"),
            output=packed("self_attn.o_proj"),
            mlp_norm=get("post_attention_layernorm.weight"),
            gate_up=packed("mlp.gate_proj", "mlp.up_proj"),
            down=packed("mlp.down_proj"),
            convolutions=convolutions,
        )

    # --- the past ------------------------------------------------------------------------------------

    @torch.no_grad()
    def context(self, taps: Tensor, positions: Tensor) -> Tensor:
        """Every layer's key and value of committed tokens: float32 [n, ring_width], layer after layer.

        taps: float32 [n, m, hidden]; positions: int64 [n].
        """
        narrow = taps.flatten(1).to(self.ops.dtype)
        fused = self.ops.linear(narrow, self.fusion)
        fused = self.ops.rms_norm(fused, self.fusion_norm, self.config.eps)
        kept = [torch.cat(self._keys_values(layer, fused, positions), 1) for layer in self.layers]
        return torch.cat(kept, dim=1)

    def _keys_values(self, layer: BodyLayer, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Turned keys and values, each float32 [n, kv_heads * head_dim]. x: narrow [n, hidden]."""
        key, value = self.ops.products(x, layer.key_value)
        return self._turned(key, layer.key_norm, positions), value

    def _turned(self, x: Tensor, norm: Tensor, positions: Tensor) -> Tensor:
        """Heads normed and rotated by their position: float32 [n, heads * head_dim]."""
        heads = x.reshape(-1, self.config.head_dim)
        normed = self.ops.rms_norm(heads, norm, self.config.eps).float()
        return rotate_halves(
            normed.view(x.shape[0], -1, self.config.head_dim), self.rope, positions
        )

    # --- a block -------------------------------------------------------------------------------------

    @torch.no_grad()
    def block(
        self, anchors: Tensor, positions: Tensor, context: Tensor, context_positions: Tensor
    ) -> Tensor:
        """Final-normed hidden states of the rows that predict: narrow [r, K, hidden].

        anchors, positions: int64 [r]. context: [r, C, ring_width]; context_positions: int64 [r, C],
        -1 where nothing stands.
        """
        cfg, r = self.config, anchors.shape[0]
        rows = torch.arange(cfg.block, device=anchors.device)
        at = positions[:, None] + rows
        x = self.mask.expand(r, cfg.block, -1).clone()
        x[:, 0] = self.embedding[anchors].float()
        x = x.flatten(0, 1)
        seen = context_positions[:, None]
        visible = (
            (seen >= 0) & (seen < positions[:, None, None]) & (at[..., None] - seen < cfg.window)
        )
        for number, layer in enumerate(self.layers):
            start = number * cfg.layer_width
            own = context[..., start : start + cfg.layer_width]
            x = self._attention(layer, x, at, own, visible)
            x = self._mlp(layer, x)
        hidden = self.ops.rms_norm(x, self.final_norm, cfg.eps).view(r, cfg.block, -1)
        return hidden if cfg.shift else hidden[:, 1:]

    def _attention(
        self, layer: BodyLayer, x: Tensor, at: Tensor, context: Tensor, visible: Tensor
    ) -> Tensor:
        """The stream [r * B, hidden] behind attention over context [r, C, layer_width] and block."""
        cfg, r = self.config, at.shape[0]
        normed = self.ops.rms_norm(x, layer.attention_norm, cfg.eps)
        conv = layer.convolutions[0] if layer.convolutions else None
        delta = conv.kernels(normed, self.ops) if conv else None
        inner = conv.apply(normed, delta, 0, cfg.block) if conv and delta is not None else normed
        flat = at.flatten()
        (query,) = self.ops.products(inner, layer.query)
        query = self._turned(query, layer.query_norm, flat)
        key, value = self._keys_values(layer, inner, flat)
        shape = (r, cfg.block, -1, cfg.head_dim)
        attended = self.ops.draft_attention(
            query.view(shape), context, key.view(shape), value.view(shape), visible, cfg.causal
        ).reshape(r * cfg.block, -1)
        if conv and delta is not None:
            out = self.ops.linear(attended, layer.output)
            return x + conv.apply(out, delta, 1, cfg.block).float()
        return self.ops.linear(attended, layer.output, x)

    def _mlp(self, layer: BodyLayer, x: Tensor) -> Tensor:
        """The stream [r * B, hidden] behind the SwiGLU feed-forward."""
        cfg = self.config
        normed = self.ops.rms_norm(x, layer.mlp_norm, cfg.eps)
        if layer.convolutions is None:
            return self.ops.linear(self.ops.gated(normed, layer.gate_up), layer.down, x)
        conv = layer.convolutions[1]
        delta = conv.kernels(normed, self.ops)
        inner = conv.apply(normed, delta, 0, cfg.block)
        out = self.ops.linear(self.ops.gated(inner, layer.gate_up), layer.down)
        return x + conv.apply(out, delta, 1, cfg.block).float()

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's head on hidden states [r, K, hidden]: float32 [r, K, vocab]."""
        flat = self.ops.linear(hidden.flatten(0, 1), self.head)
        return flat.view(*hidden.shape[:2], -1)


def rotate_halves(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of the pairs (x[i], x[i + dim/2]), as Qwen3 has it: [n, heads * dim].

    x: float32 [n, heads, dim]. table: [2, P, dim/2], see ``rope_table``. positions: int64 [n].
    """
    cos, sin = table[0][positions][:, None], table[1][positions][:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(1)


def body_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of the body in a checkpoint, by the names of the public ones, with their shapes."""
    hidden, wide = config.hidden, config.heads * config.head_dim
    narrow = config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "mask_embedding": (hidden,),
        "fc.weight": (hidden, len(config.taps) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (wide, hidden),
        "self_attn.k_proj.weight": (narrow, hidden),
        "self_attn.v_proj.weight": (narrow, hidden),
        "self_attn.o_proj.weight": (hidden, wide),
        "self_attn.q_norm.weight": (config.head_dim,),
        "self_attn.k_norm.weight": (config.head_dim,),
        "mlp.gate_proj.weight": (config.mlp, hidden),
        "mlp.up_proj.weight": (config.mlp, hidden),
        "mlp.down_proj.weight": (hidden, config.mlp),
    }
    if config.method == "dflash2":
        outputs = 2 * config.conv_taps * (hidden // config.conv_group)
        for place in ("attention", "mlp"):
            layer[f"{place}_conv.base_kernel"] = (2, config.conv_taps, hidden)
            layer[f"{place}_conv.kernel_projection.weight"] = (outputs, hidden)
    for number in range(config.layers):
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    return shapes
