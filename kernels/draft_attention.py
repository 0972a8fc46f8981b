"""Attention of a drafter's block: every row over the window of committed tokens, and over the block.

A request's bits depend on its own rows: requests are one dimension of a batched product, and a window
is one row of a softmax of fixed width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def draft_attention(
    query: Tensor, context: Tensor, key: Tensor, value: Tensor, visible: Tensor, causal: bool
) -> Tensor:
    """Attended values [r, B, H, d] float32, scaled by d^-0.5.

    query: [r, B, H, d]; key, value: [r, B, G, d], of the block, G heads shared by H / G queries each.
    context: [r, C, 2 * G * d], keys then values of committed tokens. visible: bool [r, B, C], which
    of them a row sees; what stands elsewhere does not matter, NaN included. causal: a row sees the
    rows of the block up to itself, else all of them.
    """
    r, block, heads, dim = query.shape
    groups = key.shape[2]
    past = context.float().view(r, -1, 2, groups, dim)
    seen = visible.any(1)[:, :, None, None, None]
    keys, values = torch.where(seen, past, 0.0).unbind(2)
    keys, values = torch.cat([keys, key.float()], 1), torch.cat([values, value.float()], 1)
    own = torch.ones(block, block, dtype=torch.bool, device=query.device)
    own = own.tril() if causal else own
    mask = torch.cat([visible, own.expand(r, -1, -1)], dim=2)
    # [r * G, H / G * B, d]: the queries that share a key head, one product each.
    rows = query.float().view(r, block, groups, -1, dim).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(r * groups, -1, dim)
    keys = keys.permute(0, 2, 3, 1).reshape(r * groups, dim, -1)
    values = values.transpose(1, 2).reshape(r * groups, -1, dim)
    scores = torch.bmm(rows, keys).view(r, groups, -1, block, mask.shape[2]) * dim**-0.5
    scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    weights = (weights / weights.sum(-1, keepdim=True)).view(r * groups, -1, mask.shape[2])
    out = torch.bmm(weights, values).view(r, groups, -1, block, dim)
    return out.permute(0, 3, 1, 2, 4).reshape(r, block, heads, dim)
