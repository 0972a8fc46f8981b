"""Sparse multi-head latent attention over retrieved rows (absorbed form, DeepSeek-V2, section 2.1).

A cached row is [latent | rotary key]; all heads read the same row. Keys and values are never
expanded: queries are taken into the latent space and the result is taken out of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import fp8
from .paging import gather
from .tiling import Tiling


def rows_at(view: Tensor, locations: Tensor, value_width: int) -> Tensor:
    """Rows of an arena view as float32: [n, k, w]. view: [F, per, w], or uint8 records (``fp8.py``)."""
    rows = gather(view, locations)
    return fp8.dequantize_rows(rows, value_width) if rows.dtype == torch.uint8 else rows.float()


def sparse_mla(
    query: Tensor, rows: Tensor, valid: Tensor, value_width: int, scale: float, tiling: Tiling
) -> Tensor:
    """Attention of n query rows over k retrieved rows each.

    query: [n, heads, width] in row space (latent part, then rotary part); rows: [n, k, width] in
    ascending position; valid: [n, k] bool, False for padding (its rows must be finite);
    value_width: leading columns that are the value. Returns [n, heads, value_width].
    k is the selector's width for every row, so each reduction has one fixed shape.
    """

    def attend(q: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
        scores = torch.bmm(q, kv.transpose(1, 2)) * scale
        # Padding rows of a tile have no valid entry: a large negative number keeps them finite.
        scores = scores.masked_fill(~mask[:, None, :], torch.finfo(scores.dtype).min)
        scores = scores - scores.amax(dim=-1, keepdim=True)
        weight = torch.exp(scores)
        weight = weight / weight.sum(dim=-1, keepdim=True)
        return torch.bmm(weight, kv[:, :, :value_width])

    return tiling.map_rows(attend, query, rows, valid)
