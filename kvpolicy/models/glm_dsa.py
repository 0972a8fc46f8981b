"""GLM-5's sparse-attention decoder (MLA rows, lightning indexer, shared selections), dense MLPs.

Float32, batch-invariant, on the kernels of one backend (``kernels/ops.py``). The same equations as
transformers' ``GlmMoeDsaForCausalLM`` with the key/value up-projection absorbed into query and
output (DeepSeek-V2, section 2.1.2), so that attention reads cached rows as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvpolicy.errors import UserError
from kvpolicy.geometry.dsa import from_hf_config
from kvpolicy.geometry.geometry import Geometry, Selector
from kvpolicy.geometry.hf_config import read_json
from kvpolicy.kernels.backend import REFERENCE
from kvpolicy.kernels.elementwise import apply_rope, rope_table, swiglu
from kvpolicy.kernels.indexer import KeyPages
from kvpolicy.kernels.ops import Ops, ReferenceOps, make_ops
from kvpolicy.kernels.tiling import Tiling, choose_tiling
from kvpolicy.memory.step import StepMemory
from kvpolicy.models.checkpoint import read_weights
from kvpolicy.models.glm_config import LATENT_EPS, GlmDsaConfig

# Tiles and keys of the self-check at load: a step of the default engine is 80 rows. The long tests
# run it at 64 tiles and 32,768 keys. The interpreter takes 2 ms and more for each of its programs,
# so there it is one row more than a tile, and one key more than a tile of keys.
PROBE_TILES, PROBE_KEYS, PROBE_FEW = 5, 1024, 63
INTERPRETED_ROWS, INTERPRETED_KEYS = 17, 129


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

    backend: ``reference`` or ``triton``, see ``choose_backend``. geometry: its KV geometry.
    vocab, bos, eos: token ids. weight_bytes: device bytes of weights. UserError if a row's bits
    depend on its neighbours on this device.
    """

    # A step of one row per request reads device tensors only: it can be captured in a CUDA graph.
    device_only = True

    def __init__(
        self, folder: Path, device: torch.device, name: str, backend: str = REFERENCE
    ) -> None:
        hf = read_json(folder / "config.json")
        self.geometry: Geometry = from_hf_config(hf, name=name)
        self.config = GlmDsaConfig.from_hf(hf, self.geometry)
        self.device = device
        self.ops: Ops = make_ops(backend)
        named = read_weights(folder, self.config.shapes(), device, torch.float32)
        self.embedding = named["model.embed_tokens.weight"]
        self.final_norm = named["model.norm.weight"]
        head = self.embedding if self.config.tied else named["lm_head.weight"]
        self.head = self.ops.pack(head)
        self.layers = [self._layer(named, layer) for layer in range(self.config.layers)]
        self.weight_bytes = sum(w.nbytes for w in named.values())
        if self.config.tied and self.head is not head:
            self.weight_bytes += self.head.nbytes
        self.rope = rope_table(
            self.config.max_positions, self.config.rope, self.config.theta, device
        )
        self._check_rows()

    @property
    def backend(self) -> str:
        """The kernels it runs on."""
        return self.ops.name

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

        def packed(name: str) -> Tensor:
            return self.ops.pack(get(f"{name}.weight"))

        up = get("self_attn.kv_b_proj.weight").view(cfg.heads, cfg.nope + cfg.value, cfg.kv_rank)
        indexer = None
        if layer in cfg.full_layers:
            indexer = IndexerWeights(
                wq_b=packed("self_attn.indexer.wq_b"),
                wk=packed("self_attn.indexer.wk"),
                norm=get("self_attn.indexer.k_norm.weight"),
                norm_bias=get("self_attn.indexer.k_norm.bias"),
                weights_proj=packed("self_attn.indexer.weights_proj"),
            )
        return LayerWeights(
            attention_norm=get("input_layernorm.weight"),
            mlp_norm=get("post_attention_layernorm.weight"),
            q_a=packed("self_attn.q_a_proj"),
            q_norm=get("self_attn.q_a_layernorm.weight"),
            q_b=packed("self_attn.q_b_proj"),
            kv_a=packed("self_attn.kv_a_proj_with_mqa"),
            kv_norm=get("self_attn.kv_a_layernorm.weight"),
            key_up=up[:, : cfg.nope].contiguous(),
            value_up=up[:, cfg.nope :].transpose(1, 2).contiguous(),
            o=packed("self_attn.o_proj"),
            gate=packed("mlp.gate_proj"),
            up=packed("mlp.up_proj"),
            down=packed("mlp.down_proj"),
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
        ops = self.ops
        return ops.map_rows(
            lambda x: ops.linear(ops.rms_norm(x, self.final_norm, self.config.eps), self.head),
            hidden,
        )

    def _mlp(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        """SwiGLU feed-forward [n, hidden]."""
        ops = self.ops

        def feed(x: Tensor) -> Tensor:
            x = ops.rms_norm(x, layer.mlp_norm, self.config.eps)
            return ops.linear(
                swiglu(ops.linear(x, layer.gate), ops.linear(x, layer.up)), layer.down
            )

        return ops.map_rows(feed, hidden)

    def _attention(
        self, number: int, layer: LayerWeights, hidden: Tensor, memory: StepMemory
    ) -> Tensor:
        x, latent_q = self._inputs(layer, hidden)
        memory.write_rows(number, self._rows(layer, x, memory.positions))
        selector = self.geometry.selector_of_layer(number)
        assert selector is not None  # every DSA layer reads a store
        if layer.indexer is not None:
            self._select(number, layer.indexer, selector, x, latent_q, memory)
        query = self._query(layer, latent_q, memory.positions)
        parts = []
        for wave in memory.waves(selector):
            own = query[wave.start : wave.stop]
            parts.append(self._attend(own, memory.row_view(number), wave.locations, wave.valid))
        return self._output(layer, parts[0] if len(parts) == 1 else torch.cat(parts))

    def _attend(self, query: Tensor, view: Tensor, locations: Tensor, valid: Tensor) -> Tensor:
        """Attended latents [n, heads, kv_rank] of queries over rows of an arena view."""
        cfg = self.config
        scale = (cfg.nope + cfg.rope) ** -0.5
        return self.ops.sparse_mla(query, view, locations, valid, cfg.kv_rank, scale)

    def _inputs(self, layer: LayerWeights, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised hidden rows [n, hidden] and query latents [n, q_rank]."""
        ops = self.ops
        x = ops.map_rows(lambda h: ops.rms_norm(h, layer.attention_norm, self.config.eps), hidden)
        latent_q = ops.map_rows(
            lambda h: ops.rms_norm(ops.linear(h, layer.q_a), layer.q_norm, LATENT_EPS), x
        )
        return x, latent_q

    def _output(self, layer: LayerWeights, latent: Tensor) -> Tensor:
        """From attended latents [n, heads, kv_rank] to [n, hidden]."""
        ops = self.ops

        def project(rows: Tensor) -> Tensor:
            return ops.linear(ops.head_linear(rows, layer.value_up).flatten(1), layer.o)

        return ops.map_rows(project, latent)

    def _rows(self, layer: LayerWeights, x: Tensor, positions: Tensor) -> Tensor:
        """KV rows of this step: [n, kv_rank + rope], latent normalised, key part rotated."""
        rank, ops = self.config.kv_rank, self.ops

        def project(h: Tensor, at: Tensor) -> Tensor:
            both = ops.linear(h, layer.kv_a)
            latent = ops.rms_norm(both[:, :rank], layer.kv_norm, LATENT_EPS)
            return torch.cat([latent, apply_rope(both[:, rank:], self.rope, at)], dim=-1)

        return ops.map_rows(project, x, positions)

    def _query(self, layer: LayerWeights, latent_q: Tensor, positions: Tensor) -> Tensor:
        """Queries in row space: [n, heads, kv_rank + rope]."""
        cfg, ops = self.config, self.ops

        def project(h: Tensor, at: Tensor) -> Tensor:
            q = ops.linear(h, layer.q_b).view(h.shape[0], cfg.heads, cfg.nope + cfg.rope)
            absorbed = ops.head_linear(q[..., : cfg.nope], layer.key_up)
            return torch.cat([absorbed, apply_rope(q[..., cfg.nope :], self.rope, at)], dim=-1)

        return ops.map_rows(project, latent_q, positions)

    # --- self-check ------------------------------------------------------------------------------

    def _check_rows(self) -> None:
        """Hold the backend to its promise on this machine: a row's bits depend on that row alone.

        The reference backend takes the fastest tiling that keeps it. Of the Triton kernels rows
        are computed together, moved, and alone.
        """
        if isinstance(self.ops, ReferenceOps):
            self.ops = ReferenceOps(choose_tiling(self._probe_tiling, self.device))
            return
        rows, keys = PROBE_TILES * 16, PROBE_KEYS
        if self.device.type == "cpu":
            rows, keys = INTERPRETED_ROWS, INTERPRETED_KEYS
        every = torch.arange(rows, device=self.device)
        whole = self._probe(self.ops, every, rows, keys)
        for order in (every.roll(5), every[rows - 1 :], every[2:5]):
            part = self._probe(self.ops, order, rows, keys)
            if not all(torch.equal(y, x[order]) for x, y in zip(whole, part, strict=True)):
                raise UserError(
                    f"backend = {self.backend!r}: on {self.device} a row's bits depend on its place "
                    "among others; use backend = 'reference'"
                )

    def _probe_tiling(
        self, tiling: Tiling, shift: int, tiles: int = PROBE_TILES, keys: int = PROBE_KEYS
    ) -> list[Tensor]:
        """The probe of ``choose_tiling``."""
        rows = tiles * tiling.rows
        order = torch.arange(rows, device=self.device).roll(shift)
        return [y.roll(-shift, 0) for y in self._probe(ReferenceOps(tiling), order, rows, keys)]

    @torch.no_grad()
    def _probe(self, ops: Ops, order: Tensor, rows: int, keys: int) -> list[Tensor]:
        """Every kind of operation of the forward pass, for some of ``rows`` fixed random rows.

        order: int64 [n], the rows, in the order in which they are computed. Returns [n, ...] each.
        """
        cfg, topk = self.config, self.geometry.selectors[0].topk
        g = torch.Generator().manual_seed(0)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g).to(self.device)

        x, view = noise(rows, cfg.hidden)[order], noise(topk, 16, cfg.kv_rank + cfg.rope)
        locations = torch.randint(topk * 16, (rows, topk), generator=g).to(self.device)[order]
        pages = KeyPages(
            noise(-(-keys // 16), 16, cfg.index_dim),
            torch.arange(-(-keys // 16), device=self.device)[None],
        )
        valid, at = torch.ones_like(locations, dtype=torch.bool), order % cfg.max_positions
        own, all_keys = torch.zeros_like(order), torch.full_like(order, keys)
        self.ops, kept = ops, self.ops
        found = [self._head(x)]
        for layer in (self.layers[0], self.layers[-1]):
            h, latent_q = self._inputs(layer, x)
            query = self._query(layer, latent_q, at)
            latent = self._attend(query, view, locations, valid)
            found += [self._rows(layer, h, at), query, latent, self._output(layer, latent)]
            found.append(self._mlp(layer, x))
            if layer.indexer is not None:
                key, q, weights = self._index(layer.indexer, h, latent_q, at)
                many = ops.index_scores(q, weights, pages, own, all_keys, keys, 1.0)
                few = min(PROBE_FEW, keys)
                seen = torch.full_like(order, few)
                some = ops.index_scores(q, weights, pages, own, seen, few, 1.0)
                found += [key, many, some - many[:, :few]]
        self.ops = kept
        return found

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
        selection = self.ops.index_top_k(
            q,
            head_weights,
            memory.key_pages(selector),
            memory.row_segment,
            memory.visible(selector),
            memory.most_visible(selector),
            selector.topk,
            self.config.index_dim**-0.5,
        )
        memory.select(selector, selection)

    def _index(
        self, weights: IndexerWeights, x: Tensor, latent_q: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Index keys [n, dim], queries [n, heads, dim] and head weights [n, heads]."""
        cfg, ops = self.config, self.ops

        def key(h: Tensor, at: Tensor) -> Tensor:
            raw = ops.linear(h, weights.wk)
            return self._turn_front(
                ops.layer_norm(raw, weights.norm, weights.norm_bias, LATENT_EPS), at
            )

        def query(h: Tensor, at: Tensor) -> Tensor:
            raw = ops.linear(h, weights.wq_b).view(h.shape[0], cfg.index_heads, cfg.index_dim)
            return self._turn_front(raw, at)

        def head_weight(h: Tensor) -> Tensor:
            scaled: Tensor = ops.linear(h, weights.weights_proj) * cfg.index_heads**-0.5
            return scaled

        return (
            ops.map_rows(key, x, positions),
            ops.map_rows(query, latent_q, positions),
            ops.map_rows(head_weight, x),
        )

    def _turn_front(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding of the first ``rope`` values of the last dimension."""
        turned = apply_rope(x[..., : self.config.rope], self.rope, positions)
        return torch.cat([turned, x[..., self.config.rope :]], dim=-1)
