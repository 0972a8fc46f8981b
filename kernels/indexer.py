"""Lightning indexer: score every visible entry of a request and take the top k, deterministically.

score(row, entry) = sum_h w_h * relu(q_h . key * scale)   (DeepSeek-V3.2 technical report, eq. 1)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from . import fp8
from .paging import Paged
from .tiling import Tiling

_POSITION_BITS = 32
_LOW = (1 << _POSITION_BITS) - 1


@dataclass(frozen=True, slots=True)
class KeyPages:
    """Index keys of several segments as they lie in the arena.

    view: [F, per, d] strided view of the arena, or uint8 [F, per, d + 4] for 8-bit keys
    (``fp8.py``). frames: int64 [segments, m], the frames of each
    segment's keys in order; short rows are filled up with any frame number.
    """

    view: Tensor
    frames: Tensor

    def keys(self, segment: int, count: int) -> Tensor:
        """The first ``count`` keys of a segment: [count, d] (a copy); float32 from 8-bit keys."""
        keys = Paged(self.view, self.frames[segment]).prefix(count)
        return fp8.dequantize_keys(keys) if keys.dtype == torch.uint8 else keys

    def queries(self, q: Tensor) -> Tensor:
        """Queries [n, heads, d] as these keys are scored with: float32, and where keys have 8 bits
        rounded to 8 bits too."""
        return fp8.rounded_queries(q) if self.view.dtype == torch.uint8 else q.float()


def index_scores(q: Tensor, weights: Tensor, keys: Tensor, scale: float, tiling: Tiling) -> Tensor:
    """Scores of n query rows against T keys.

    q: [n, heads, d], weights: [n, heads], keys: [T, d], all float32 -> [n, T] float32.
    Heads are added one after the other, so the order does not depend on n or T.
    """
    _, heads, dim = q.shape
    count = keys.shape[0]
    padded = -(-count // tiling.keys) * tiling.keys
    keys = F.pad(keys, (0, 0, 0, padded - count))

    def product(rows: Tensor) -> Tensor:
        flat = rows.reshape(-1, dim)
        if tiling.fused:
            return (flat @ keys.T).view(rows.shape[0], heads, padded)
        blocks = [flat @ block.T for block in keys.split(tiling.keys)]
        return torch.cat(blocks, dim=1).view(rows.shape[0], heads, padded)

    dots = tiling.map_rows(product, q)[..., :count].mul_(scale).clamp_min_(0.0)
    total = dots[:, 0] * weights[:, 0, None]
    for head in range(1, heads):
        total = total + dots[:, head] * weights[:, head, None]
    return total


def sortable_key(scores: Tensor, positions: Tensor) -> Tensor:
    """One int64 per (score, position) whose order is: higher score first, then lower position.

    scores: float32 [..., T], positions: int64 [T]. -0.0 counts as +0.0. Bits of a float read as an
    integer keep its order when negative values are mirrored.
    """
    bits = (scores + 0.0).view(torch.int32).to(torch.int64)
    ordered = torch.where(bits >= 0, bits, (bits ^ 0x7FFFFFFF))
    return (ordered << _POSITION_BITS) | (_LOW - positions)


def top_k(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Exact top-k entries of each row, ties to the lowest entry, in ascending entry order.

    scores: [n, T] float32, visible: [n] int64 (entries 0..visible-1 may be chosen), k: entries.
    Returns int64 [n, k]; rows with fewer than k visible entries end in -1.
    """
    count = scores.shape[1]
    entries = torch.arange(count, device=scores.device)
    keys = sortable_key(scores, entries)
    lowest = torch.iinfo(torch.int64).min
    keys = keys.masked_fill(entries >= visible[:, None], lowest)
    best = torch.topk(keys, min(k, count), dim=-1, sorted=False).values
    chosen = torch.where(best == lowest, count, _LOW - (best & _LOW))
    chosen = chosen.sort(dim=-1).values
    chosen = chosen.masked_fill(chosen == count, -1)
    return F.pad(chosen, (0, k - chosen.shape[1]), value=-1)


def all_visible(visible: Tensor, k: int) -> Tensor:
    """The selection of rows that see at most k entries: all of them. visible: [n] -> [n, k]."""
    entries = torch.arange(k, device=visible.device).expand(visible.shape[0], k)
    return torch.where(entries < visible[:, None], entries, -1)
