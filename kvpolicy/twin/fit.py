"""Fitting the cost model: non-negative least squares over windows of live steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpolicy.errors import UserError
from kvpolicy.twin.cost import TERMS, CostModel
from kvpolicy.twin.records import Window

__all__ = ["Error", "error_of", "fit", "nnls"]

Floats = NDArray[np.float64]


def nnls(matrix: Floats, target: Floats, rounds: int = 300) -> Floats:
    """x >= 0 that minimises |matrix x - target|: the active-set method of Lawson and Hanson (Solving Least
    Squares Problems, 1974, chapter 23). matrix: [n, m]; target: [n]."""
    count = matrix.shape[1]
    free = np.zeros(count, dtype=bool)
    x = np.zeros(count)
    slack = 1e-10 * max(1.0, float(np.abs(matrix).max()) * float(np.abs(target).max()))
    for _ in range(rounds):
        gradient = matrix.T @ (target - matrix @ x)
        gradient[free] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= slack:
            break
        free[best] = True
        while True:
            inner = np.zeros(count)
            inner[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            if inner[free].min() > 0:
                x = inner
                break
            below = free & (inner <= 0)
            step = float((x[below] / np.maximum(x[below] - inner[below], 1e-300)).min())
            x += step * (inner - x)
            free &= x > 1e-300
            x[~free] = 0.0
            if not free.any():
                break
    return x


@dataclass(frozen=True, slots=True)
class Error:
    """How far a model is from windows. total: of the whole time, signed; mean, worst: of single windows'
    times, absolute; parts of 1. windows, seconds: what it was measured on."""

    total: float
    mean: float
    worst: float
    windows: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def error_of(model: CostModel, windows: Sequence[Window]) -> Error:
    """UserError without windows."""
    if not windows:
        raise UserError("there are no windows to measure the cost model's error on")
    real = np.array([window.seconds for window in windows])
    told = np.array([model.time(window.work) for window in windows])
    off = np.abs(told / real - 1)
    return Error(
        float(told.sum() / real.sum() - 1),
        float(off.mean()),
        float(off.max()),
        len(windows),
        float(real.sum()),
    )


def fit(name: str, windows: Sequence[Window], source: Mapping[str, Any]) -> CostModel:
    """Relative errors are minimised, so that a slow window counts no more than a fast one; windows that
    are far off (a compilation, somebody else's load) are left out in a second fit. UserError for fewer
    windows than terms."""
    if len(windows) < 2 * len(TERMS):
        raise UserError(
            f"{len(windows)} windows: {2 * len(TERMS)} are needed for {len(TERMS)} terms"
        )
    work = np.array([window.work.values() for window in windows])
    seconds = np.array([window.seconds for window in windows])
    kept = np.ones(len(windows), dtype=bool)
    scale = np.maximum(work.max(axis=0), 1e-30)
    weights = np.zeros(len(TERMS))
    for _ in range(2):
        matrix = work[kept] / scale / seconds[kept, None]
        weights = nnls(matrix, np.ones(int(kept.sum()))) / scale
        off = np.abs(work @ weights / seconds - 1)
        kept = off <= max(4 * float(np.median(off)), 0.1)
    found = {term: float(w) for term, w in zip(TERMS, weights, strict=True) if w > 0}
    model = CostModel(name, found, source)
    about = {
        **source,
        "fit": error_of(model, windows).to_dict(),
        "left_out": int((~kept).sum()),
    }
    return CostModel(name, found, about)
