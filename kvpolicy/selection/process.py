"""Selections from a process fitted to the published miss curve of GLM-5.1 (docs/selection-sources.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvpolicy.errors import UserError
from kvpolicy.geometry.geometry import Geometry, Selector
from kvpolicy.kernels.backend import REFERENCE
from kvpolicy.kernels.selection_process import RANKS, SHIFTS, ProcessTables, select

__all__ = ["GLM_5_1", "ProcessParameters", "ProcessSource", "make_tables"]


@dataclass(frozen=True, slots=True)
class ProcessParameters:
    """What is fitted. UserError for a value out of range.

    restless: how much more bins draw anew at every step than ``decline`` alone would say. decline: log2
    of how much rarer each class of bins is than the one whose epochs are half as long. longest: log2
    steps of the longest epochs. popularity, offset: a bin's entry of rank r = 1, 2, ... is drawn in
    proportion to (r + offset) ** -popularity (Zipf-Mandelbrot). drift: log2 steps between two orders of
    popularity; brief: the share of bins where they are ``brief_drift`` instead. window: newest
    entries, in 1/1024 of k.
    """

    restless: float
    decline: float
    longest: int
    popularity: float
    offset: float
    drift: int
    brief: float
    brief_drift: int
    window: int

    def __post_init__(self) -> None:
        bounds = {
            "restless": (0.0, 1e6),
            "decline": (-8.0, 8.0),
            "longest": (0, 15),
            "popularity": (0.0, 16.0),
            "offset": (-0.9, 1e3),
            "drift": (0, 20),
            "brief": (0.0, 1.0),
            "brief_drift": (0, 20),
            "window": (0, 1024),
        }
        for name, (least, most) in bounds.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise UserError(f"{name} = {value!r}: allowed {least} to {most}")


GLM_5_1 = ProcessParameters(
    restless=4.9,
    decline=0.196,
    longest=9,
    popularity=2.55,
    offset=0.669,
    drift=14,
    brief=0.31,
    brief_drift=5,
    window=177,
)
"""Fitted by ``benchmarks/fit_selection_process.py`` to the miss rates of GLM-5.1 that the HiSparse paper
gives (arXiv 2608.07009: k = 2048, contexts of 100K)."""

# Ranks that a draw can name: bins have some 55 entries at 100K, and ranks are taken modulo their number.
_RANKS = 64


def make_tables(parameters: ProcessParameters, device: torch.device) -> ProcessTables:
    """The process's tables on a device. Integers, so that they are the same everywhere."""
    classes = np.arange(parameters.longest + 1)
    length = 2.0 ** (-parameters.decline * classes)
    length[0] *= parameters.restless
    rank = np.arange(1.0, _RANKS + 1)
    draws = (rank + parameters.offset) ** -parameters.popularity
    shares = np.array([parameters.brief, 1 - parameters.brief])
    drifts = [parameters.brief_drift, parameters.drift]
    return ProcessTables(
        shifts=torch.from_numpy(_quantiles(length, SHIFTS)).to(device),
        ranks=torch.from_numpy(_quantiles(draws, RANKS)).to(device),
        drifts=torch.from_numpy(np.array(drifts)[_quantiles(shares, SHIFTS)]).to(device),
        window=parameters.window,
    )


def _quantiles(weights: NDArray[np.floating[Any]], size: int) -> NDArray[np.int64]:
    """Each index as often as its weight says, int64 [size]."""
    ends = np.round(np.cumsum(weights / weights.sum()) * size)
    index = np.searchsorted(ends, np.arange(size), side="right")
    return np.minimum(index, len(weights) - 1).astype(np.int64)


class ProcessSource:
    """The selection process as a :class:`~kvpolicy.selection.source.SelectionSource`.

    geometry: whose selectors ask. seed: of all requests together. backend: the kernels that draw,
    ``reference`` (some 40 small launches) or ``triton`` (one); they draw the same.
    """

    def __init__(
        self,
        geometry: Geometry,
        device: torch.device,
        seed: int = 0,
        parameters: ProcessParameters = GLM_5_1,
        backend: str = REFERENCE,
    ) -> None:
        if not 0 <= seed < 1 << 31:
            raise UserError(f"seed = {seed}: allowed 0 to {(1 << 31) - 1}")
        self.seed = seed
        self._number = {selector.name: i for i, selector in enumerate(geometry.selectors)}
        self._tables = make_tables(parameters, device)
        self._select = _select_on(backend)

    @property
    def name(self) -> str:
        return f"process:seed={self.seed}"

    def select(self, selector: Selector, requests: Tensor, visible: Tensor) -> Tensor:
        """See the protocol."""
        number = self._number[selector.name]
        return self._select(self._tables, self.seed, requests, number, visible, selector.topk)


def _select_on(backend: str) -> Callable[..., Tensor]:
    if backend == REFERENCE:
        return select
    from kvpolicy.kernels.triton.selection_process import select as select_triton

    return select_triton
