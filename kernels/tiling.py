"""Fixed row tiles: what makes a product independent of the batch it runs in.

A GEMM library picks its inner kernel by the shape it is given, and two kernels may add the same
products in another order. On the CPUs measured, ``F.linear`` gives other bits below 16 rows (1, 2
and 15 rows differ; 4, 8, 16 and every multiple of 16 agree), and a score product gives other bits
below 16 keys. So everything that multiplies runs on whole tiles: rows padded to ``Tiling.rows``,
keys to ``Tiling.keys``.

*Unfused*, one call takes one tile: its shape, and with it the kernel, is always the same. *Fused*,
one call takes all tiles, which is faster and right only where the library keeps one order for every
multiple of the tile. :func:`choose_tiling` finds out with the model's own operations.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

log = logging.getLogger(__name__)

Rows = TypeVar("Rows", Tensor, tuple[Tensor, ...])

Probe = Callable[["Tiling", int], list[Tensor]]
"""(tiling, shift) -> results of the model's operations on fixed random rows, moved ``shift`` places
along and moved back: [n, ...] each."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How many rows and keys one call sees.

    rows: rows of a tile. keys: keys of a tile in the index-score product.
    fused: all tiles of an operation go into one call.
    """

    rows: int = 16
    keys: int = 64
    fused: bool = False

    def pad(self, n: int) -> int:
        """Smallest multiple of ``rows`` that holds ``n`` rows (at least one tile)."""
        return max(1, -(-n // self.rows)) * self.rows

    def map_rows(self, fn: Callable[..., Rows], *inputs: Tensor) -> Rows:
        """``fn`` over the leading dimension in whole tiles; padding rows are zero and dropped.

        inputs: tensors [n, ...] with equal n. fn: maps tiles [t, ...] to one tensor [t, ...], or to
        several.
        """
        n = inputs[0].shape[0]
        padded = self.pad(n)
        if padded != n:
            inputs = tuple(F.pad(x, (0, 0) * (x.dim() - 1) + (0, padded - n)) for x in inputs)
        if self.fused:
            return _joined([fn(*inputs)], n)
        # A copy of each tile: a library may pick its kernel by the alignment of the address too.
        starts = range(0, padded, self.rows)
        return _joined([fn(*(x[a : a + self.rows].clone() for x in inputs)) for a in starts], n)


def _joined(tiles: list[Rows], n: int) -> Rows:
    """The first ``n`` rows of all tiles."""
    if isinstance(tiles[0], Tensor):
        return (tiles[0] if len(tiles) == 1 else torch.cat(tiles))[:n]
    return tuple(_joined(list(parts), n) for parts in zip(*tiles, strict=True))


def linear(x: Tensor, weight: Tensor, tiling: Tiling) -> Tensor:
    """Batch-invariant ``x @ weight.T``. x: [n, in], weight: [out, in] -> [n, out]."""
    return tiling.map_rows(lambda rows: F.linear(rows, weight), x)


def choose_tiling(probe: Probe, device: torch.device) -> Tiling:
    """The fastest tiling that keeps every row's bits on this machine.

    A CPU runs fused if that gives the bits of the unfused form; a GPU runs unfused tiles of 128
    rows, since its library picks kernels by the row count. Where a row's bits depend on its place
    in a tile (seen with inner widths that are no multiple of 4), rows run one by one: slow, and
    independent of each other whatever the library does.
    """
    tiling = Tiling() if device.type == "cpu" else Tiling(rows=128, keys=512)
    plain = probe(tiling, 0)
    if not _equal(plain, probe(tiling, 5)):
        log.warning("a row's bits depend on its place among others here: running row by row, slow")
        return replace(tiling, rows=1)
    if device.type == "cpu":
        fused = replace(tiling, fused=True)
        if _equal(plain, probe(fused, 0)):
            return fused
        log.warning("fused tiles give other bits on this machine: running tile by tile, slower")
    return tiling


def _equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
