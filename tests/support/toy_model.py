"""A toy decoder for the ``toy-shared`` geometry: 2 stores, 3 selectors, 2 tokens per entry, a window.

It computes row by row on vectors of fixed length, so its bits depend on a row's own history only.
What it computes means nothing; that every read goes through the hierarchy is the point.
"""

from __future__ import annotations

import torch
from reads import keys_of, rows_of
from torch import Tensor

from kvpolicy.geometry.geometry import Geometry, Selector
from kvpolicy.geometry.presets import TOY
from kvpolicy.kernels.indexer import top_k
from kvpolicy.memory.step import StepMemory

ROW, KEY, HIDDEN = 6, 4, 16


class ToyModel:
    """DecodeModel over TOY with seeded random weights."""

    geometry: Geometry = TOY
    vocab = TOY.vocab_size
    bos = None
    eos: tuple[int, ...] = ()
    weight_bytes = 0
    backend = "reference"

    def __init__(self, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g) * shape[-1] ** -0.5

        layers = TOY.num_layers
        self.embedding = weight(self.vocab, HIDDEN) * 4
        self.to_row = weight(layers, ROW, HIDDEN)
        self.to_key = weight(layers, KEY, HIDDEN)
        self.to_query = weight(layers, KEY, HIDDEN)
        self.mix = weight(layers, HIDDEN, HIDDEN + 2 * ROW)
        self.head = weight(self.vocab, HIDDEN) * 3

    @torch.no_grad()
    def forward(self, tokens: Tensor, memory: StepMemory, wanted: Tensor) -> Tensor:
        hidden = [self.embedding[token] for token in tokens.tolist()]
        for layer in range(TOY.num_layers):
            window = self._window(layer, hidden, memory)
            self._own(layer, hidden, window, memory)
            read = self._read(layer, hidden, memory)
            hidden = [
                torch.tanh((self.mix[layer] * torch.cat([h, w[-1] + w.mean(0), r])).sum(-1))
                for h, w, r in zip(hidden, window, read, strict=True)
            ]
        return torch.stack(
            [(self.head * hidden[i]).sum(-1) for i in wanted.tolist()] or [torch.zeros(self.vocab)]
        )[: len(wanted)]

    def _window(self, layer: int, hidden: list[Tensor], memory: StepMemory) -> list[Tensor]:
        rows = torch.stack([(self.to_row[layer] * h).sum(-1) for h in hidden])
        memory.write_pinned("window", layer, rows)
        return [
            memory.read_pinned("window", layer, i, row)
            for i, segment in enumerate(memory.segments)
            for row in range(segment.count)
        ]

    def _own(
        self, layer: int, hidden: list[Tensor], window: list[Tensor], memory: StepMemory
    ) -> None:
        """Rows and keys of a store this layer owns; with 2 tokens per entry both tokens enter."""
        if not any(layer in store.layers for store in TOY.stores):
            return
        pairs = [w[-2:].sum(0) for w in window]
        memory.write_rows(layer, torch.stack(pairs))
        if any(layer == store.layers[0] for store in TOY.stores):
            keys = [(self.to_key[layer] * h).sum(-1) for h in hidden]
            memory.write_keys(layer, torch.stack(keys))

    def _read(self, layer: int, hidden: list[Tensor], memory: StepMemory) -> list[Tensor]:
        selector = TOY.selector_of_layer(layer)
        if selector is None:
            return [torch.zeros(ROW) for _ in hidden]
        if layer == selector.source_layer:
            self._select(layer, selector, hidden, memory)
        out: list[Tensor] = []
        for wave in memory.waves(selector):
            rows = rows_of(memory, layer, wave)
            for row, valid in zip(rows, wave.valid, strict=True):
                out.append(torch.where(valid[:, None], row, 0.0).sum(0))
        return out

    def _select(
        self, layer: int, selector: Selector, hidden: list[Tensor], memory: StepMemory
    ) -> None:
        chosen = []
        visible = memory.visible(selector)
        for i, segment in enumerate(memory.segments):
            keys = keys_of(memory, selector, i)
            for row in range(segment.start, segment.stop):
                query = (self.to_query[layer] * hidden[row]).sum(-1)
                scores = (keys * query).sum(-1)[None]
                if not keys.shape[0]:
                    chosen.append(torch.full((1, selector.topk), -1))
                    continue
                chosen.append(top_k(scores, visible[row : row + 1], selector.topk))
        memory.select(selector, torch.cat(chosen))
