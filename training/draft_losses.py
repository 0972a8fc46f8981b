"""What the drafters learn: their law against the text and the target's law, position by position."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from draft_model import Params, confidence_logits, previous_scores
from torch import Tensor

from kvpolicy.speculative.drafters.config import DrafterConfig

# Later tokens count only if the earlier ones are accepted.
DECAY = 4.0
# Share of the text itself in the label; the rest is the target's law, which varies less.
TEXT = 0.5


def weights(valid: Tensor) -> Tensor:
    """exp(-(k - 1) / DECAY) of rows [N, K] that have a label, summing to one."""
    k = torch.arange(valid.shape[1], device=valid.device)
    raw = torch.exp(-k / DECAY) * valid
    return raw / raw.sum()


def soft_label(law: Tensor, label: Tensor) -> Tensor:
    """TEXT parts of the text's token, the rest the target's law: [N, V]."""
    text = label[:, None] == torch.arange(law.shape[-1], device=law.device)
    return law * (1.0 - TEXT) + text.to(law.dtype) * TEXT


def cross_entropy(logp: Tensor, soft: Tensor, w: Tensor) -> Tensor:
    """Weighted cross entropy; logp, soft: [N, V]; w: [N]."""
    return -((logp * soft).sum(-1) * w).sum()


def dflash_loss(u: Tensor, law: Tensor, label: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, statistics [2]: top-1 and overlap with the target's law, both weighted)."""
    logp = torch.log_softmax(u, -1)
    loss = cross_entropy(logp, soft_label(law, label), w)
    return loss, statistics(logp, law, label, w)


def dflash2_loss(
    u: Tensor, bias: Tensor, law: Tensor, label: Tensor, w: Tensor, candidates: int
) -> tuple[Tensor, Tensor]:
    """Cross entropy of the block, and of the selector over its candidates."""
    soft = soft_label(law, label)
    loss = cross_entropy(torch.log_softmax(u, -1), soft, w)
    least = u.detach().topk(candidates, -1).values[:, -1:]
    inside = u.detach() >= least
    scores = (u + bias).masked_fill(~inside, -1e9)
    logp = torch.log_softmax(scores, -1)
    chosen = cross_entropy(torch.where(inside, logp, 0.0), soft, w)
    return loss + chosen, statistics(logp, law, label, w)


def dspark_loss(
    u: Tensor, bias: Tensor, sure: Tensor, law: Tensor, label: Tensor, w: Tensor, share: Tensor
) -> tuple[Tensor, Tensor]:
    """Cross entropy and total variation of the corrected law, and confidence against the overlap.

    share: of the total variation, a scalar tensor: 0.9 is the paper's recipe; from scratch it learns
    slowly, so it is reached late.
    """
    logp = torch.log_softmax(u + bias, -1)
    apart = (logp.exp() - law).abs().sum(-1)
    accepted = (1.0 - 0.5 * apart).detach().clamp(0.0, 1.0)
    calibrated = F.binary_cross_entropy_with_logits(sure, accepted, reduction="none")
    entropy = cross_entropy(logp, soft_label(law, label), w)
    loss = (1.0 - share) * entropy + share * (apart * w).sum() + (calibrated * w).sum()
    return loss, statistics(logp, law, label, w)


def statistics(logp: Tensor, law: Tensor, label: Tensor, w: Tensor) -> Tensor:
    """Weighted share of rows whose likeliest token is the text's, and mean overlap with the law."""
    with torch.no_grad():
        right = (logp.argmax(-1) == label).float()
        overlap = torch.minimum(logp.exp(), law).sum(-1)
        return torch.stack([(right * w).sum(), (overlap * w).sum()])


def loss_of(
    params: Params, cfg: DrafterConfig, h: Tensor, head: Tensor, law: Tensor, tokens: Tensor,
    valid: Tensor, share: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(loss, statistics). h: [N, K, d]; law: fp32 [N, K, V]; tokens: int64 [N, K + 1], the anchor and
    the text behind it; valid: [N, K]."""
    flat = h.flatten(0, 1)
    w = weights(valid).flatten()
    u = F.linear(flat, head).float()
    label, previous = tokens[:, 1:].flatten(), tokens[:, :-1].flatten()
    law = law.flatten(0, 1)
    if cfg.method == "dflash":
        return dflash_loss(u, law, label, w)
    bias = previous_scores(params, cfg, flat, previous)
    if cfg.method == "dflash2":
        return dflash2_loss(u, bias, law, label, w, cfg.candidates)
    return dspark_loss(u, bias, confidence_logits(params, flat, previous), law, label, w, share)


def compile_all() -> None:
    """Replace the losses by compiled ones."""
    for name in ("dflash_loss", "dflash2_loss", "dspark_loss"):
        globals()[name] = torch.compile(globals()[name], dynamic=False)
