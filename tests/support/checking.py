"""A model wrapper that holds every retrieved row against what was written for it, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from reads import rows_of
from torch import Tensor

from kvpolicy.geometry.geometry import Selector
from kvpolicy.memory.segments import Wave
from kvpolicy.memory.step import StepMemory
from kvpolicy.models.loader import DecodeModel

Truth = dict[tuple[int, int], Tensor]
"""(request, layer) -> the row last written for each entry, [entries, width]."""


class CheckedMemory:
    """Stands between a model and a StepMemory. rows_checked: retrieved rows compared so far."""

    def __init__(self, memory: StepMemory, owner: CheckingModel) -> None:
        self._memory = memory
        self._owner = owner

    def __getattr__(self, name: str) -> object:
        return getattr(self._memory, name)

    def write_rows(self, layer: int, rows: Tensor) -> None:
        store = next(s for s in self._memory.layout.stores if layer in s.store.layers)
        per = store.store.tokens_per_entry
        for segment in self._memory.segments:
            table = self._owner.table(segment.request_id, layer, rows, store.record.dtype)
            positions = torch.arange(segment.position, segment.position + segment.count)
            positions = positions.to(rows.device)
            complete = (positions + 1) % per == 0
            own = rows[segment.start : segment.stop]
            table[positions[complete] // per] = own[complete].to(table.dtype)
        self._memory.write_rows(layer, rows)

    def select(self, selector: Selector, selection: Tensor) -> None:
        visible = self._memory.visible(selector)
        assert bool((selection < visible[:, None]).all()), (
            "an entry was chosen before it is visible"
        )
        self._owner.selections.append((selector.name, selection.clone()))
        self._memory.select(selector, selection)

    def waves(self, selector: Selector) -> Iterator[Wave]:
        covered = 0
        for wave in self._memory.waves(selector):
            assert wave.start == covered, "waves must cover the rows in order, without gaps"
            covered = wave.stop
            self._wave = wave
            yield wave
        assert covered == self._memory.rows

    def row_view(self, layer: int) -> Tensor:
        """Asked for inside a wave: the wave's rows are checked where the model will read them."""
        self._check(layer, self._wave)
        return self._memory.row_view(layer)

    def _check(self, layer: int, wave: Wave) -> None:
        rows = rows_of(self._memory, layer, wave)
        geometry = self._memory.layout.geometry
        selector = geometry.selector_of_layer(layer)
        assert selector is not None
        store = geometry.store(selector.store)
        at = geometry.row_of_layer(layer)
        assert at is not None
        chosen = self._memory.selection(selector)[wave.start : wave.stop]
        assert torch.equal(wave.valid, chosen >= 0)
        assert bool(rows.isfinite().all()), "padding must be finite too"
        for segment in self._memory.segments:
            own = slice(max(segment.start, wave.start) - wave.start, segment.stop - wave.start)
            if own.start >= own.stop or not rows[own].shape[0]:
                continue
            table = self._owner.truth[segment.request_id, store.layers[at]]
            got, truth = rows[own][wave.valid[own]], table[chosen[own][wave.valid[own]]]
            assert torch.equal(got.view(torch.uint8), truth.view(torch.uint8)), "a row is not exact"
            self._owner.rows_checked += got.shape[0]


class CheckingModel:
    """DecodeModel that checks every row it is given. logits: of every wanted row, in order."""

    def __init__(self, model: DecodeModel) -> None:
        self.model = model
        self.truth: Truth = {}
        self.selections: list[tuple[str, Tensor]] = []
        self.rows_checked = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.model, name)

    def table(self, request: int, layer: int, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """The truth table of one request and layer, NaN where nothing was written."""
        key = (request, layer)
        if key not in self.truth:
            most = self.model.geometry.max_context
            shape = (most, rows.shape[1])
            self.truth[key] = torch.full(shape, float("nan"), dtype=dtype, device=rows.device)
        return self.truth[key]

    def forward(self, tokens: Tensor, memory: StepMemory, wanted: Tensor) -> Tensor:
        return self.model.forward(tokens, CheckedMemory(memory, self), wanted)  # type: ignore[arg-type]
