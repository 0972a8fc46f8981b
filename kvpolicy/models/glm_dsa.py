"""GLM-5's sparse-attention decoder (MLA rows, lightning indexer, shared selections), dense MLPs.

Reference backend: plain torch, float32, batch-invariant. The same equations as transformers'
``GlmMoeDsaForCausalLM`` with the key/value up-projection absorbed into query and output
(DeepSeek-V2, section 2.1.2), so that attention reads cached rows as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from kvpolicy.geometry.dsa import from_hf_config
from kvpolicy.geometry.geometry import Geometry, Selector
from kvpolicy.geometry.hf_config import read_json
from kvpolicy.kernels.elementwise import apply_rope, layer_norm, rms_norm, rope_table, swiglu
from kvpolicy.kernels.indexer import all_visible, index_scores, top_k
from kvpolicy.kernels.sparse_mla import sparse_mla
from kvpolicy.kernels.tiling import Tiling, choose_tiling
from kvpolicy.memory.step import StepMemory
from kvpolicy.models.checkpoint import read_weights
from kvpolicy.models.glm_config import LATENT_EPS, GlmDsaConfig

# Rows and keys of the self-check at load: a step of the default engine is 80 rows. The long tests
# run it at 64 tiles and 32,768 keys.
PROBE_TILES, PROBE_KEYS, PROBE_FEW = 5, 1024, 63


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """Lightning indexer of a layer that chooses."""

    wq_b: Tensor
    wk: Tensor
    norm: Tensor
    norm_bias: Tensor
    weights_proj: Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. key_up [heads, nope, kv_rank] and value_up [heads, value, kv_rank]."""

    attention_norm: Tensor
    mlp_norm: Tensor
    q_a: Tensor
    q_norm: Tensor
    q_b: Tensor
    kv_a: Tensor
    kv_norm: Tensor
    key_up: Tensor
    value_up: Tensor
    o: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    indexer: IndexerWeights | None


class GlmDsa:
    """The model of one checkpoint on one device.

    geometry: its KV geometry. vocab, bos, eos: token ids. weight_bytes: device bytes of weights.
    """

    def __init__(self, folder: Path, device: torch.device, name: str) -> None:
        hf = read_json(folder / "config.json")
        self.geometry: Geometry = from_hf_config(hf, name=name)
        self.config = GlmDsaConfig.from_hf(hf, self.geometry)
        self.device = device
        named = read_weights(folder, self.config.shapes(), device, torch.float32)
        self.embedding = named["model.embed_tokens.weight"]
        self.final_norm = named["model.norm.weight"]
        self.head = self.embedding if self.config.tied else named["lm_head.weight"]
        self.layers = [self._layer(named, layer) for layer in range(self.config.layers)]
        self.weight_bytes = sum(w.numel() * w.element_size() for w in named.values())
        self.rope = rope_table(
            self.config.max_positions, self.config.rope, self.config.theta, device
        )
        self.tiling = Tiling()
        self.tiling = choose_tiling(self._probe, device)

    @property
    def vocab(self) -> int:
        return self.config.vocab

    @property
    def bos(self) -> int | None:
        return self.config.bos

    @property
    def eos(self) -> tuple[int, ...]:
        return self.config.eos

    def _layer(self, named: dict[str, Tensor], layer: int) -> LayerWeights:
        cfg = self.config

        def get(name: str) -> Tensor:
            return named[f"model.layers.{layer}.{name}"]

        up = get("self_attn.kv_b_proj.weight").view(cfg.heads, cfg.nope + cfg.value, cfg.kv_rank)
        indexer = None
        if layer in cfg.full_layers:
            indexer = IndexerWeights(
                wq_b=get("self_attn.indexer.wq_b.weight"),
                wk=get("self_attn.indexer.wk.weight"),
                norm=get("self_attn.indexer.k_norm.weight"),
                norm_bias=get("self_attn.indexer.k_norm.bias"),
                weights_proj=get("self_attn.indexer.weights_proj.weight"),
            )
        return LayerWeights(
            attention_norm=get("input_layernorm.weight"),
            mlp_norm=get("post_attention_layernorm.weight"),
            q_a=get("self_attn.q_a_proj.weight"),
            q_norm=get("self_attn.q_a_layernorm.weight"),
            q_b=get("self_attn.q_b_proj.weight"),
            kv_a=get("self_attn.kv_a_proj_with_mqa.weight"),
            kv_norm=get("self_attn.kv_a_layernorm.weight"),
            key_up=up[:, : cfg.nope].contiguous(),
            value_up=up[:, cfg.nope :].transpose(1, 2).contiguous(),
            o=get("self_attn.o_proj.weight"),
            gate=get("mlp.gate_proj.weight"),
            up=get("mlp.up_proj.weight"),
            down=get("mlp.down_proj.weight"),
            indexer=indexer,
        )

    # --- forward ---------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, tokens: Tensor, memory: StepMemory, wanted: Tensor) -> Tensor:
        """One step. tokens: [n] int64, the rows of ``memory.segments``; wanted: rows whose logits
        are needed, int64 [m]. Returns logits [m, vocab] float32. Row by row, the bits do not
        depend on the other rows of the step."""
        hidden = self.embedding[tokens]
        for number, layer in enumerate(self.layers):
            hidden = hidden + self._attention(number, layer, hidden, memory)
            hidden = hidden + self._mlp(layer, hidden)
        return self._head(hidden[wanted])

    def _head(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocab]."""
        return self.tiling.map_rows(
            lambda x: F.linear(rms_norm(x, self.final_norm, self.config.eps), self.head), hidden
        )

    def _mlp(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        """SwiGLU feed-forward [n, hidden]."""

        def feed(x: Tensor) -> Tensor:
            x = rms_norm(x, layer.mlp_norm, self.config.eps)
            return F.linear(swiglu(F.linear(x, layer.gate), F.linear(x, layer.up)), layer.down)

        return self.tiling.map_rows(feed, hidden)

    def _attention(
        self, number: int, layer: LayerWeights, hidden: Tensor, memory: StepMemory
    ) -> Tensor:
        cfg = self.config
        x, latent_q = self._inputs(layer, hidden)
        memory.write_rows(number, self._rows(layer, x, memory.positions))
        selector = self.geometry.selector_of_layer(number)
        assert selector is not None  # every DSA layer reads a store
        if layer.indexer is not None:
            self._select(number, layer.indexer, selector, x, latent_q, memory)
        query = self._query(layer, latent_q, memory.positions)
        out = torch.empty(query.shape[0], cfg.heads, cfg.kv_rank, device=self.device)
        scale = (cfg.nope + cfg.rope) ** -0.5
        for wave in memory.waves(selector):
            rows = memory.gather(number, wave).float()
            own = slice(wave.start, wave.stop)
            out[own] = sparse_mla(query[own], rows, wave.valid, cfg.kv_rank, scale, self.tiling)
        return self._output(layer, out)

    def _inputs(self, layer: LayerWeights, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised hidden rows [n, hidden] and query latents [n, q_rank]."""
        x = self.tiling.map_rows(
            lambda h: rms_norm(h, layer.attention_norm, self.config.eps), hidden
        )
        latent_q = self.tiling.map_rows(
            lambda h: rms_norm(F.linear(h, layer.q_a), layer.q_norm, LATENT_EPS), x
        )
        return x, latent_q

    def _output(self, layer: LayerWeights, latent: Tensor) -> Tensor:
        """From attended latents [n, heads, kv_rank] to [n, hidden]."""

        def project(rows: Tensor) -> Tensor:
            value = torch.einsum("nhc,hcv->nhv", rows, layer.value_up)
            return F.linear(value.flatten(1), layer.o)

        return self.tiling.map_rows(project, latent)

    def _rows(self, layer: LayerWeights, x: Tensor, positions: Tensor) -> Tensor:
        """KV rows of this step: [n, kv_rank + rope], latent normalised, key part rotated."""
        rank = self.config.kv_rank

        def project(h: Tensor, at: Tensor) -> Tensor:
            both = F.linear(h, layer.kv_a)
            latent = rms_norm(both[:, :rank], layer.kv_norm, LATENT_EPS)
            return torch.cat([latent, apply_rope(both[:, rank:], self.rope, at)], dim=-1)

        return self.tiling.map_rows(project, x, positions)

    def _query(self, layer: LayerWeights, latent_q: Tensor, positions: Tensor) -> Tensor:
        """Queries in row space: [n, heads, kv_rank + rope]."""
        cfg = self.config

        def project(h: Tensor, at: Tensor) -> Tensor:
            q = F.linear(h, layer.q_b).view(h.shape[0], cfg.heads, cfg.nope + cfg.rope)
            absorbed = torch.einsum("nhd,hdc->nhc", q[..., : cfg.nope], layer.key_up)
            return torch.cat([absorbed, apply_rope(q[..., cfg.nope :], self.rope, at)], dim=-1)

        return self.tiling.map_rows(project, latent_q, positions)

    # --- self-check ------------------------------------------------------------------------------

    @torch.no_grad()
    def _probe(
        self, tiling: Tiling, shift: int, tiles: int = PROBE_TILES, keys: int = PROBE_KEYS
    ) -> list[Tensor]:
        """Every kind of operation of the forward pass on random rows; see ``choose_tiling``."""
        cfg, rows, topk = self.config, tiles * tiling.rows, self.geometry.selectors[0].topk
        g = torch.Generator().manual_seed(0)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g).to(self.device)

        x = noise(rows, cfg.hidden).roll(shift, 0)
        kv = noise(rows, topk, cfg.kv_rank + cfg.rope).roll(shift, 0)
        all_keys = noise(keys, cfg.index_dim)
        valid = torch.ones(rows, topk, dtype=torch.bool, device=self.device)
        at = torch.arange(rows, device=self.device).roll(shift) % cfg.max_positions
        self.tiling, kept = tiling, self.tiling
        found = [self._head(x)]
        for layer in (self.layers[0], self.layers[-1]):
            h, latent_q = self._inputs(layer, x)
            query = self._query(layer, latent_q, at)
            scale = (cfg.nope + cfg.rope) ** -0.5
            latent = sparse_mla(query, kv, valid, cfg.kv_rank, scale, tiling)
            found += [self._rows(layer, h, at), query, latent, self._output(layer, latent)]
            found.append(self._mlp(layer, x))
            if layer.indexer is not None:
                own, q, weights = self._index(layer.indexer, h, latent_q, at)
                some = index_scores(q, weights, all_keys[:PROBE_FEW], 1.0, tiling)
                many = index_scores(q, weights, all_keys, 1.0, tiling)
                found += [own, many, some - many[:, :PROBE_FEW]]
        self.tiling = kept
        return [y.roll(-shift, 0) for y in found]

    # --- selection -------------------------------------------------------------------------------

    def _select(
        self,
        number: int,
        weights: IndexerWeights,
        selector: Selector,
        x: Tensor,
        latent_q: Tensor,
        memory: StepMemory,
    ) -> None:
        keys, q, head_weights = self._index(weights, x, latent_q, memory.positions)
        memory.write_keys(number, keys)
        visible = memory.visible(selector)
        selection = all_visible(visible, selector.topk)
        for i, segment in enumerate(memory.segments):
            if segment.position + segment.count <= selector.topk:
                continue  # every row sees at most k entries: it takes them all
            own = slice(segment.start, segment.stop)
            seen = memory.keys(selector, i).float()
            scale = self.config.index_dim**-0.5
            scores = index_scores(q[own], head_weights[own], seen, scale, self.tiling)
            selection[own] = top_k(scores, visible[own], selector.topk)
        memory.select(selector, selection)

    def _index(
        self, weights: IndexerWeights, x: Tensor, latent_q: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Index keys [n, dim], queries [n, heads, dim] and head weights [n, heads]."""
        cfg = self.config

        def key(h: Tensor, at: Tensor) -> Tensor:
            raw = F.linear(h, weights.wk)
            return self._turn_front(
                layer_norm(raw, weights.norm, weights.norm_bias, LATENT_EPS), at
            )

        def query(h: Tensor, at: Tensor) -> Tensor:
            raw = F.linear(h, weights.wq_b).view(-1, cfg.index_heads, cfg.index_dim)
            return self._turn_front(raw, at)

        def head_weight(h: Tensor) -> Tensor:
            scaled: Tensor = F.linear(h, weights.weights_proj) * cfg.index_heads**-0.5
            return scaled

        return (
            self.tiling.map_rows(key, x, positions),
            self.tiling.map_rows(query, latent_q, positions),
            self.tiling.map_rows(head_weight, x),
        )

    def _turn_front(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding of the first ``rope`` values of the last dimension."""
        turned = apply_rope(x[..., : self.config.rope], self.rope, positions)
        return torch.cat([turned, x[..., self.config.rope :]], dim=-1)
