"""Inputs of indexer and attention kernels: scattered pages, ragged rows, NaN where nothing belongs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvpolicy.kernels import fp8
from kvpolicy.kernels.indexer import KeyPages
from kvpolicy.kernels.ops import Ops


def randn(device: torch.device, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """NaN everywhere; uint8: all bits set, which is NaN as e4m3, bf16 and float32."""
    return torch.full(shape, 255 if dtype == torch.uint8 else math.nan, dtype=dtype)


def paged_keys(device: torch.device, counts: list[int], dim: int, dtype: torch.dtype) -> KeyPages:
    """Keys of several segments in scattered frames of 7 keys; NaN wherever no key lies. uint8: 8-bit
    records."""
    width, dim = dim, dim + 4 if dtype == torch.uint8 else dim
    per = 7
    frames = [-(-count // per) for count in counts]
    order = torch.randperm(sum(frames) + 3, generator=torch.Generator().manual_seed(5))
    arena = poisoned(sum(frames) + 3, per * dim + 8, dtype=dtype)
    view = arena[:, : per * dim].view(-1, per, dim)
    table = torch.full((len(counts), max(frames) + 1), -1)
    taken = 0
    for segment, (count, own) in enumerate(zip(counts, frames, strict=True)):
        table[segment, :own] = order[taken : taken + own]
        taken += own
        keys = torch.randn(count, width, generator=torch.Generator().manual_seed(segment))
        keys = fp8.quantize_keys(keys) if dtype == torch.uint8 else keys.to(dtype)
        for entry in range(count):
            view[table[segment, entry // per], entry % per] = keys[entry]
    arena = arena.to(device)
    return KeyPages(arena[:, : per * dim].view(-1, per, dim), table.to(device))


class IndexCase:
    """Rows of three segments of 200, 9 and 131 keys; some rows see less than their segment has."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.heads, self.dim, self.most = 3, 20, 200
        self.pages = paged_keys(device, [200, 9, 131], self.dim, dtype)
        self.segment = torch.tensor([0, 0, 0, 1, 2, 2], device=device)
        self.visible = torch.tensor([130, 199, 200, 9, 128, 131], device=device)
        self.q = randn(device, 6, self.heads, self.dim)
        self.weights = randn(device, 6, self.heads, seed=1)

    def scores(self, ops: Ops, own: slice = slice(None), most: int = 200) -> Tensor:
        rows = (self.q[own], self.weights[own], self.pages, self.segment[own], self.visible[own])
        return ops.index_scores(*rows, most, 0.3)

    def top_k(self, ops: Ops, k: int, own: slice = slice(None), most: int = 200) -> Tensor:
        rows = (self.q[own], self.weights[own], self.pages, self.segment[own], self.visible[own])
        return ops.index_top_k(*rows, most, k, 0.3)


class AttentionCase:
    """Queries over rows scattered in the middle layer of an arena of three; NaN everywhere else.

    Padding points into the NaN, and stands between valid rows as well as after them. dtype: of rows;
    uint8: 8-bit records.
    """

    def __init__(
        self,
        device: torch.device,
        n: int = 5,
        shape: tuple[int, int, int, int] = (3, 33, 21, 40),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        heads, width, self.value, k = shape
        self.scale = width**-0.5
        eight_bit = dtype == torch.uint8
        item = fp8.row_bytes(self.value, width - self.value) if eight_bit else width
        g = torch.Generator().manual_seed(3)
        arena = poisoned(30, 11 * 3 * item + 8, dtype=dtype).to(device)
        self.view = arena[:, : 11 * 3 * item].view(30, 11, 3, item)[:, :, 1]
        places = torch.stack([torch.randperm(320, generator=g)[:k] for _ in range(n)]).to(device)
        self.valid = torch.rand(n, k, generator=g).to(device) < 0.8
        self.locations = torch.where(self.valid, places, 320 + places % 10)
        used = places[self.valid].unique()
        rows = torch.randn(320, width, generator=g)
        rows = (fp8.quantize_rows(rows, self.value) if eight_bit else rows.to(dtype)).to(device)
        self.view[used // 11, used % 11] = rows[used]
        self.query = torch.randn(n, heads, width, generator=g).to(device)

    def run(self, ops: Ops, own: slice = slice(None)) -> Tensor:
        rows = (self.query[own], self.view, self.locations[own], self.valid[own])
        return ops.sparse_mla(*rows, self.value, self.scale)
