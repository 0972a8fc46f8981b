"""Fixed row tiles: what makes a matrix product independent of the batch it runs in.

A GEMM library picks its inner kernel by the shape it is given, and two kernels may add the same
products in another order. On the CPUs measured, ``F.linear`` gives other bits below 16 rows
(1, 2 and 15 rows differ, 4, 8, 16 and every multiple of 16 agree), and a score product gives other
bits below 16 keys. So every product here runs on whole tiles: rows padded to ``Tiling.rows``, keys
padded to ``Tiling.keys``. Where the library keeps one order for every multiple of the tile (checked
by :func:`choose_tiling` when an engine starts), tiles run fused in one call; where it does not,
one call per tile, so that the shape, and with it the kernel, is always the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Tiling:
    """How many rows and keys one call sees.

    rows: rows of a tile. keys: keys of a tile in the index-score product.
    fused: a multiple of the tile may go into one call (bits checked equal), else one call a tile.
    """

    rows: int = 16
    keys: int = 64
    fused: bool = True

    def pad(self, n: int) -> int:
        """Smallest multiple of ``rows`` that holds ``n`` rows (at least one tile)."""
        return max(1, -(-n // self.rows)) * self.rows

    def map_rows(self, fn: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """``fn`` over the leading dimension in whole tiles; padding rows are zero and dropped.

        inputs: tensors [n, ...] with equal n. fn: maps tiles [t, ...] to [t, ...].
        """
        n = inputs[0].shape[0]
        padded = self.pad(n)
        if padded != n:
            inputs = tuple(F.pad(x, (0, 0) * (x.dim() - 1) + (0, padded - n)) for x in inputs)
        if self.fused or padded == self.rows:
            return fn(*inputs)[:n]
        tiles = [fn(*(x[a : a + self.rows] for x in inputs)) for a in range(0, padded, self.rows)]
        return torch.cat(tiles)[:n]


def linear(x: Tensor, weight: Tensor, tiling: Tiling) -> Tensor:
    """Batch-invariant ``x @ weight.T``. x: [n, in], weight: [out, in] -> [n, out]."""
    return tiling.map_rows(lambda rows: F.linear(rows, weight), x)


def _same_bits(fn: Callable[[Tensor], Tensor], x: Tensor, tile: int) -> bool:
    """Whether ``fn`` over all rows equals ``fn`` tile by tile and with the rows moved."""
    whole = fn(x)
    for step in (tile, 3 * tile):
        parts = torch.cat([fn(x[a : a + step]) for a in range(0, x.shape[0], step)])
        if not torch.equal(parts, whole):
            return False
    return torch.equal(fn(x.flip(0).contiguous()).flip(0), whole)


def choose_tiling(
    linear_shapes: Iterable[tuple[int, int]],
    score_shapes: Iterable[tuple[int, int]],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Tiling:
    """The widest tiling whose results are bitwise independent of the batch on this machine.

    linear_shapes: (in, out) of every linear layer. score_shapes: (heads, head_dim) of every
    indexer. On a GPU a tile of 128 rows runs unfused: cuBLAS picks kernels by the row count.
    """
    if device.type != "cpu":
        return Tiling(rows=128, keys=512, fused=False)
    tiling = Tiling()
    generator = torch.Generator().manual_seed(0)
    for n_in, n_out in sorted(set(linear_shapes)):
        x = torch.randn(12 * tiling.rows, n_in, generator=generator).to(dtype)
        weight = (torch.randn(n_out, n_in, generator=generator) * n_in**-0.5).to(dtype)
        if not _same_bits(lambda rows, w=weight: F.linear(rows, w), x, tiling.rows):  # type: ignore[misc]
            return Tiling(fused=False)
    for heads, dim in sorted(set(score_shapes)):
        q = torch.randn(4 * tiling.rows * heads, dim, generator=generator).to(dtype)
        keys = torch.randn(5 * tiling.keys, dim, generator=generator).to(dtype)
        whole = q @ keys.T
        for t in (1, 2, 3):
            part = q[: tiling.rows * heads] @ keys[: t * tiling.keys].T
            if not torch.equal(part, whole[: tiling.rows * heads, : t * tiling.keys]):
                return Tiling(fused=False)
    return tiling
