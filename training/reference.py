"""The kernels' functions in plain torch, for checks and for machines without a GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def index_scores(iq: Tensor, ik: Tensor, iw: Tensor, seq_len: int) -> Tensor:
    """Scores [B, T, T] fp32, -inf in the future; iq [N, H, D], ik [N, D], iw [N, H]."""
    batch, (_, heads, dim) = iq.shape[0] // seq_len, iq.shape
    query = iq.view(batch, seq_len, heads, dim).float()
    key = ik.view(batch, seq_len, dim).float()
    weight = iw.view(batch, seq_len, heads).float()
    total = torch.zeros(batch, seq_len, seq_len, device=iq.device)
    for head in range(heads):
        dots = query[:, :, head] @ key.transpose(1, 2)
        total += weight[:, :, head, None] * torch.relu(dots)
    future = torch.ones(seq_len, seq_len, dtype=torch.bool, device=iq.device).triu(1)
    return total.masked_fill(future, float("-inf"))


@torch.no_grad()
def select(iq: Tensor, ik: Tensor, iw: Tensor, seq_len: int, k: int) -> Tensor:
    """Positions [N, k] int32, ascending, ties to the lowest position, -1 where none is left."""
    scores = index_scores(iq, ik, iw, seq_len)
    order = torch.sort(scores, dim=-1, descending=True, stable=True)
    width = min(k, seq_len)
    chosen, value = order.indices[..., :width], order.values[..., :width]
    chosen = torch.where(value == float("-inf"), seq_len, chosen).sort(-1).values
    chosen = torch.where(chosen == seq_len, -1, chosen).to(torch.int32)
    out = torch.full((iq.shape[0], k), -1, dtype=torch.int32, device=iq.device)
    out[:, :width] = chosen.view(-1, width)
    return out


def gather_rows(table: Tensor, idx: Tensor, base: Tensor) -> Tensor:
    """Rows [M, k, D] of `table` [N, D] at positions idx [M, k] of the sequences that start at base.

    `index_select`, because its backward is a plain index_add that a CUDA graph can hold.
    """
    flat = (idx.clamp(min=0).long() + base[:, None]).view(-1)
    return table.index_select(0, flat).view(*idx.shape, table.shape[1])


def sparse_attention(
    ql: Tensor, qr: Tensor, lat: Tensor, rope: Tensor, idx: Tensor, seq_len: int, scale: float
) -> Tensor:
    """Latent output [N, H, L]; the arguments are those of `sparse_kernels.SparseAttention`."""
    token = torch.arange(ql.shape[0], device=ql.device)
    base = token // seq_len * seq_len
    rows, ropes = gather_rows(lat, idx, base), gather_rows(rope, idx, base)
    s = (ql @ rows.transpose(1, 2) + qr @ ropes.transpose(1, 2)).float() * scale
    s = s.masked_fill((idx < 0)[:, None, :], float("-inf"))
    return s.softmax(-1).to(lat.dtype) @ rows
