"""Miss curves of a recording, measured once: what the fast fidelity of the twin knows of selections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpolicy.control.curves import MissSampler
from kvpolicy.geometry.geometry import Geometry
from kvpolicy.twin.streams import Streams

__all__ = ["MissTable", "miss_table"]

Floats = NDArray[np.float64]

# Streams that are measured: their curves lie close together, and each takes a tenth of a second.
STREAMS = 8


@dataclass(frozen=True)
class MissTable:
    """Records fetched per decode row of a request, by store and budget.

    rows: budgets in rows, float64 [points], ascending, the same for all stores. misses: float64 [stores,
    points], not rising. topk: entries selected per row, float64 [stores].
    """

    rows: Floats
    misses: Floats
    topk: Floats

    def at(self, budgets: NDArray[Any]) -> Floats:
        """Misses at budgets [..., stores]; same shape."""
        found: Floats = np.empty(budgets.shape)
        for store, curve in enumerate(self.misses):
            found[..., store] = np.interp(budgets[..., store], self.rows, curve)
        return found


def miss_table(streams: Streams, geometry: Geometry) -> MissTable:
    """Curves by stack distances (least recently used), averaged over streams. Stretched streams are gone
    through twice, since requests repeat them: the second time everything has been seen before."""
    columns = [
        [i for i, s in enumerate(geometry.selectors) if s.store == store.name]
        for store in geometry.stores
    ]
    units = [_topk(geometry, store.name) // streams.unit for store in geometry.stores]
    grid = np.unique(np.geomspace(1, streams.units, 64).astype(np.int64))
    grid = np.concatenate(([0], grid)).astype(np.float64)
    total, weight = np.zeros((len(units), grid.size)), np.zeros((len(units), grid.size))
    for stream in streams.streams[:STREAMS]:
        sampler = MissSampler(units, streams.units)
        sampler.begin(0)
        for turn in range(1 if streams.context is None else 2):
            for i in range(stream.rows):
                committed = stream.prompt_tokens + i if streams.context is None else None
                _note(
                    sampler,
                    streams,
                    columns,
                    stream.base + 1 + i,
                    turn * stream.rows + i,
                    committed,
                )
        for store, curve in enumerate(sampler.curves()):
            if curve.rows:
                known = grid <= curve.rows[-1]
                total[store, known] += np.interp(grid[known], curve.rows, curve.misses)
                weight[store, known] += 1
    misses = np.divide(total, weight, out=np.zeros_like(total), where=weight > 0)
    for store, own in enumerate(weight > 0):
        last = int(np.flatnonzero(own)[-1]) if own.any() else 0
        # Beyond what a short history can know misses are taken to fall as 1 / rows.
        tail = grid[last] / np.maximum(grid, 1)
        misses[store] = np.where(own, misses[store], misses[store, last] * np.minimum(tail, 1))
    misses = np.minimum.accumulate(misses, axis=1)
    per_row = np.array([float(_topk(geometry, store.name)) for store in geometry.stores])
    return MissTable((grid * streams.unit).astype(np.float64), misses * streams.unit, per_row)


def _topk(geometry: Geometry, store: str) -> int:
    return sum(selector.topk for selector in geometry.selectors_of(store))


def _note(
    sampler: MissSampler,
    streams: Streams,
    columns: list[list[int]],
    row: int,
    step: int,
    committed: int | None,
) -> None:
    for store, own in enumerate(columns):
        entries = np.unique(streams.table[row, own]).astype(np.int64)
        entries = entries[(entries >= 0) & (entries < (committed or streams.units))]
        sampler.note(store, step, entries, committed)
