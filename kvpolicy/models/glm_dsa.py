"""GLM-5's sparse-attention decoder (MLA rows, lightning indexer, shared selections), dense MLPs.

Batch-invariant, in float32 or bfloat16 (``kernels/ops.py`` says what is rounded where), on the kernels
of one backend. The same equations as transformers' ``GlmMoeDsaForCausalLM`` with the key/value
up-projection absorbed into query and output (DeepSeek-V2, section 2.1.2), so that attention reads
cached rows as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kvpolicy.errors import UserError
from kvpolicy.geometry.geometry import Geometry, Selector
from kvpolicy.kernels.backend import REFERENCE
from kvpolicy.kernels.elementwise import rope_table
from kvpolicy.kernels.indexer import KeyPages
from kvpolicy.kernels.ops import Ops, ReferenceOps, make_ops
from kvpolicy.kernels.tiling import Tiling, choose_tiling
from kvpolicy.memory.access import StepAccess
from kvpolicy.models.checkpoint import Checkpoint
from kvpolicy.models.glm_config import GlmDsaConfig
from kvpolicy.models.glm_weights import LayerWeights, Weights, layer_weights
from kvpolicy.selection.source import SelectionSource

# Tiles and keys of the self-check at load: a step of the default engine is 80 rows. The long tests
# run it at 64 tiles and 32,768 keys. On a GPU more rows, since Triton's tiles grow up to 256 rows. The
# interpreter takes 2 ms and more for each of its programs, so there it is one row more than a
# tile, and one key more than a tile of keys.
PROBE_TILES, PROBE_KEYS, PROBE_FEW = 5, 1024, 63
GPU_ROWS = 272
INTERPRETED_ROWS, INTERPRETED_KEYS = 17, 129


class GlmDsa:
    """A model on one device.

    source: a checkpoint folder, or where else the weights come from. backend: ``reference`` or
    ``triton``, see ``choose_backend``. dtype: float32 or bfloat16. geometry: its KV geometry.
    vocab, bos, eos: token ids. weight_bytes: device bytes of weights. selection: takes the place of what
    the indexer chooses, which works all the same. dummy: weights that were never trained. UserError if a
    row's bits depend on its neighbours on this device.
    """

    # A step of one row per request reads device tensors only: it can be captured in a CUDA graph.
    device_only = True

    def __init__(
        self,
        source: Path | Weights,
        device: torch.device,
        name: str,
        backend: str = REFERENCE,
        dtype: torch.dtype = torch.float32,
        selection: SelectionSource | None = None,
    ) -> None:
        if isinstance(source, Path):
            source = Checkpoint(source, name, device, dtype)
        self.geometry: Geometry = source.geometry
        self.config: GlmDsaConfig = source.config
        self.device = device
        self.selection = selection
        self.dummy: bool = getattr(source, "dummy", False)
        self.ops: Ops = make_ops(backend, dtype)
        self.embedding = source.take("model.embed_tokens.weight")
        self.final_norm = source.take("model.norm.weight")
        tied = self.config.tied
        self.head = self.ops.pack(self.embedding if tied else source.take("lm_head.weight"))
        self.layers = [layer_weights(source, self.ops, n) for n in range(self.config.layers)]
        self.weight_bytes = self._weight_bytes()
        self.rope = rope_table(
            self.config.max_positions, self.config.rope, self.config.theta, device
        )
        self._check_rows()

    def _weight_bytes(self) -> int:
        shared = self.head.parts[0].data_ptr() == self.embedding.data_ptr()
        ends = (self.embedding.nbytes, self.final_norm.nbytes, 0 if shared else self.head.nbytes)
        return sum(ends) + sum(layer.nbytes for layer in self.layers)

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

    # --- forward ---------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, tokens: Tensor, memory: StepAccess, wanted: Tensor) -> Tensor:
        """One step. tokens: [n] int64, one per row of the step; wanted: rows whose logits
        are needed, int64 [m]. Returns logits [m, vocab] float32. Row by row, the bits do not
        depend on the other rows of the step. Nothing here waits for the device or uploads to it."""
        return self.forward_with_taps(tokens, memory, wanted, ())[0]

    @torch.no_grad()
    def forward_with_taps(
        self, tokens: Tensor, memory: StepAccess, wanted: Tensor, taps: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """As :meth:`forward`, and the residual stream behind some layers, -1 for the embedding's: float32
        [n, len(taps), hidden], None without any."""
        hidden = self.embedding[tokens].float()
        found = {-1: hidden}
        for number, layer in enumerate(self.layers):
            hidden = self._attention(number, layer, hidden, memory)
            hidden = self._mlp(layer, hidden)
            if number in taps:
                found[number] = hidden
        tapped = torch.stack([found[number] for number in taps], dim=1) if taps else None
        return self._head(hidden[wanted]), tapped

    def _head(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocab]."""
        x = self.ops.rms_norm(hidden, self.final_norm, self.config.eps)
        return self.ops.linear(x, self.head)

    def _mlp(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        """The residual stream [n, hidden] behind the SwiGLU feed-forward."""
        x = self.ops.rms_norm(hidden, layer.mlp_norm, self.config.eps)
        return self.ops.linear(self.ops.gated(x, layer.gate_up), layer.down, hidden)

    def _attention(
        self, number: int, layer: LayerWeights, hidden: Tensor, memory: StepAccess
    ) -> Tensor:
        """The residual stream [n, hidden] behind attention."""
        latent_q, row, *index = self._inputs(layer, hidden, memory.positions)
        memory.write_rows(number, row)
        query, *index_q = self._queries(layer, latent_q, memory.positions)
        selector = self.geometry.selector_of_layer(number)
        assert selector is not None  # every DSA layer reads a store
        if layer.chooses:
            memory.write_keys(number, index[0])
            self._select(selector, index_q[0], index[1], memory)
        parts = []
        for wave in memory.waves(selector):
            own = query[wave.start : wave.stop]
            parts.append(self._attend(own, memory.row_view(number), wave.locations, wave.valid))
        return self._output(layer, parts[0] if len(parts) == 1 else torch.cat(parts), hidden)

    def _inputs(self, layer: LayerWeights, hidden: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """Query latents [n, q_rank], KV rows [n, kv_rank + rope], and in a layer that chooses index
        keys [n, dim] and head weights [n, heads]."""
        ops = self.ops
        x = ops.rms_norm(hidden, layer.attention_norm, self.config.eps)
        return ops.latents(ops.products(x, layer.inputs), layer.norms, self.rope, positions)

    def _queries(
        self, layer: LayerWeights, latent_q: Tensor, positions: Tensor
    ) -> tuple[Tensor, ...]:
        """Queries in row space [n, heads, kv_rank + rope], and of the indexer [n, heads, dim]."""
        parts = self.ops.products(latent_q, layer.queries, narrow=True)
        heads = self.config.index_heads
        return self.ops.queries(parts, layer.key_up, heads, self.rope, positions)

    def _attend(self, query: Tensor, view: Tensor, locations: Tensor, valid: Tensor) -> Tensor:
        """Attended latents [n, heads, kv_rank] of queries over rows of an arena view."""
        cfg = self.config
        scale = (cfg.nope + cfg.rope) ** -0.5
        return self.ops.sparse_mla(query, view, locations, valid, cfg.kv_rank, scale)

    def _output(self, layer: LayerWeights, latent: Tensor, hidden: Tensor) -> Tensor:
        """Attended latents [n, heads, kv_rank] taken out of row space and added to [n, hidden]."""
        values = self.ops.head_linear(latent, layer.value_up).flatten(1)
        return self.ops.linear(values, layer.o, hidden)

    def _select(
        self, selector: Selector, index_q: Tensor, head_weights: Tensor, memory: StepAccess
    ) -> None:
        selection = self.ops.index_top_k(
            index_q,
            head_weights,
            memory.key_pages(selector),
            memory.row_segment,
            memory.visible(selector),
            memory.most_visible(selector),
            selector.topk,
            self.config.index_dim**-0.5,
        )
        if self.selection is not None:
            requests, visible = memory.request_numbers, memory.visible(selector)
            selection = self.selection.select(selector, requests, visible)
        memory.select(selector, selection)

    # --- self-check ------------------------------------------------------------------------------

    def _check_rows(self) -> None:
        """Hold the backend to its promise on this machine: a row's bits depend on that row alone.

        The reference backend takes the fastest tiling that keeps it. Of the Triton kernels rows
        are computed together, moved, and alone.
        """
        if isinstance(self.ops, ReferenceOps):
            tiling = choose_tiling(self._probe_tiling, self.device)
            self.ops = ReferenceOps(tiling, self.ops.dtype)
            return
        interpreted = self.device.type == "cpu"
        rows, keys = (INTERPRETED_ROWS, INTERPRETED_KEYS) if interpreted else (GPU_ROWS, PROBE_KEYS)
        every = torch.arange(rows, device=self.device)
        orders = [every.roll(5), every[rows - 1 :], every[2:5]]
        if not interpreted:
            orders += [every[1:41], every[3:103]]
        whole = self._probe(self.ops, every, rows, keys)
        for order in orders:
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
        ops = ReferenceOps(tiling, self.ops.dtype)
        return [y.roll(-shift, 0) for y in self._probe(ops, order, rows, keys)]

    @torch.no_grad()
    def _probe(self, ops: Ops, order: Tensor, rows: int, keys: int) -> list[Tensor]:
        """Every kind of operation of the forward pass, for some of ``rows`` fixed random rows.

        order: int64 [n], the rows, in the order in which they are computed. Returns [n, ...] each.
        """
        cfg, topk = self.config, self.geometry.selectors[0].topk
        g = torch.Generator().manual_seed(0)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g).to(self.device)

        x = noise(rows, cfg.hidden)[order]
        view = noise(topk, 16, cfg.kv_rank + cfg.rope).to(ops.dtype)
        locations = torch.randint(topk * 16, (rows, topk), generator=g).to(self.device)[order]
        pages = KeyPages(
            noise(-(-keys // 16), 16, cfg.index_dim).to(ops.dtype),
            torch.arange(-(-keys // 16), device=self.device)[None],
        )
        valid, at = torch.ones_like(locations, dtype=torch.bool), order % cfg.max_positions
        own, all_keys = torch.zeros_like(order), torch.full_like(order, keys)
        self.ops, kept = ops, self.ops
        found = [self._head(x)]
        for layer in (self.layers[0], self.layers[-1]):
            latent_q, row, *index = self._inputs(layer, x, at)
            query, *index_q = self._queries(layer, latent_q, at)
            latent = self._attend(query, view, locations, valid)
            found += [latent_q, row, query, latent, self._output(layer, latent, x)]
            found.append(self._mlp(layer, x))
            if layer.chooses:
                key, weights = index
                many = ops.index_scores(index_q[0], weights, pages, own, all_keys, keys, 1.0)
                few = min(PROBE_FEW, keys)
                seen = torch.full_like(order, few)
                some = ops.index_scores(index_q[0], weights, pages, own, seen, few, 1.0)
                found += [key, many, some - many[:, :few]]
        self.ops = kept
        return found
