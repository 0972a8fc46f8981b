"""A decoder of whole numbers, for a hundred thousand steps: cheap, exact in any batch, and every read counts.

Rows, keys and hidden values are small whole numbers, so float32 sums of them are exact in any order,
and the next token depends on each row that is read. One store has two tokens per entry, the other
two layers that share a selection; a window of pinned rows stands beside them.
"""

from __future__ import annotations

import torch
from reads import keys_of, rows_of
from torch import Tensor

from kvpolicy.geometry.geometry import Geometry, Pinned, RowFormat, RowStore, Selector
from kvpolicy.kernels.indexer import top_k
from kvpolicy.memory.step import StepMemory

WIDTHS, KEY, WINDOW, PRIME = (48, 32), 16, 3, 997


def _formats(values: int) -> tuple[RowFormat, ...]:
    return (RowFormat("float32", 4 * values), RowFormat("bf16", 2 * values))


QUICK = Geometry(
    name="quick",
    num_layers=3,
    hidden_size=1,
    vocab_size=257,
    num_heads=1,
    max_context=512,
    stores=(
        RowStore("A", (0,), WIDTHS[0], _formats(WIDTHS[0]), KEY, _formats(KEY), tokens_per_entry=2),
        RowStore("B", (1, 2), WIDTHS[1], _formats(WIDTHS[1]), KEY, _formats(KEY)),
    ),
    selectors=(
        Selector("A0", "A", 0, (0,), topk=6, index_heads=1, index_head_dim=KEY),
        Selector("B1", "B", 1, (1, 2), topk=8, index_heads=1, index_head_dim=KEY),
    ),
    pinned=(Pinned("window", (0,), _formats(4), rows_per_request=WINDOW),),
    source="this project, made by hand for tests",
)


class QuickModel:
    """DecodeModel over QUICK. Its numbers mean nothing."""

    geometry: Geometry = QUICK
    vocab = QUICK.vocab_size
    bos = None
    eos: tuple[int, ...] = ()
    weight_bytes = 0
    backend = "reference"

    def __init__(self) -> None:
        self._spread = [torch.arange(width) * 2 + 3 for width in WIDTHS]
        self._key = torch.arange(KEY) * 5 + 1
        self._words = torch.arange(self.vocab) * 29

    @torch.no_grad()
    def forward(self, tokens: Tensor, memory: StepMemory, wanted: Tensor) -> Tensor:
        hidden = (tokens * 31 + memory.positions * 7 + 11) % PRIME
        memory.write_pinned("window", 0, (hidden[:, None] * torch.arange(1, 5) % 251).float())
        hidden = (hidden + self._window(memory)) % PRIME
        for layer, store in ((0, 0), (1, 1), (2, 1)):
            rows = (hidden[:, None] * self._spread[store] + layer) % 251
            memory.write_rows(layer, rows.float())
            selector = QUICK.selectors[store]
            if layer == selector.source_layer:
                memory.write_keys(layer, (hidden[:, None] * self._key % 13).float())
                self._select(hidden, selector, memory)
            hidden = (hidden * 3 + self._read(layer, selector, memory)) % PRIME
        return ((hidden[wanted, None] * 17 + self._words) % 263).float()

    def _window(self, memory: StepMemory) -> Tensor:
        sums = [
            memory.read_pinned("window", 0, i, row).sum()
            for i, segment in enumerate(memory.segments)
            for row in range(segment.count)
        ]
        return torch.stack(sums).long()

    def _select(self, hidden: Tensor, selector: Selector, memory: StepMemory) -> None:
        query = ((hidden[:, None] * (self._key + 2)) % 13).float()
        visible, chosen = memory.visible(selector), []
        for i, own in enumerate(memory.segments):
            rows = slice(own.start, own.stop)
            scores = query[rows] @ keys_of(memory, selector, i).T
            chosen.append(top_k(scores, visible[rows], selector.topk))
        memory.select(selector, torch.cat(chosen))

    def _read(self, layer: int, selector: Selector, memory: StepMemory) -> Tensor:
        """The sum of all values of all rows that are attended."""
        sums = [
            torch.where(wave.valid, rows_of(memory, layer, wave).sum(-1), 0.0).sum(-1)
            for wave in memory.waves(selector)
        ]
        return torch.cat(sums).long()
