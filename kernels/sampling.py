"""The law that a request samples from, on tensors: temperature, top-k, top-p, and choice of a token.

Nothing depends on the batch. Maxima have no order; sums are of whole numbers (weights in units of
2^-40), so they have none either; everything else is element by element.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Weights in units of 2^-40: a vocabulary of 2^22 tokens still sums below 2^63.
UNIT = 2.0**40


def first_of_highest(scores: Tensor) -> Tensor:
    """The lowest index of each row's maximum: int64 [n]; any index where a row is not a number."""
    highest = scores.max(dim=-1, keepdim=True).values
    width = scores.shape[-1]
    index = torch.arange(width, device=scores.device)
    return torch.where(scores == highest, index, width).min(dim=-1).values.clamp_max(width - 1)


def allowed(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """What top-k and top-p leave: bool [n, V]. scores: float64 [n, V], logits / temperature. top_k:
    int64 [n], 0 off. top_p: float64 [n], 1 off. Ties go to the lowest id."""
    width = scores.shape[-1]
    ordered, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    most = torch.where(top_k > 0, top_k, width)[:, None]
    within = torch.arange(width, device=scores.device) < most
    weight = torch.where(within, (ordered - ordered[:, :1]).exp(), 0.0)
    mass = (weight * UNIT).long()
    before = torch.cumsum(mass, dim=-1) - mass
    enough = top_p[:, None] * mass.sum(dim=-1, keepdim=True)
    keep = within & ((before < enough) | (top_p >= 1.0)[:, None])
    return torch.zeros_like(keep).scatter_(1, order, keep)


def scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    """Logits from their maximum down, over the temperature (greedy rows: over 1): float64 [n, V]."""
    from_highest = logits.double() - logits.max(dim=-1, keepdim=True).values
    return from_highest / torch.where(temperature == 0.0, 1.0, temperature)[:, None]


def probabilities(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The law of each row's token: float64 [n, V]; greedy rows have all mass on one token.

    logits: float32 [n, V]. temperature, top_p: float64 [n]. top_k: int64 [n]. A token below 2^-40 of
    the likeliest one has no mass.
    """
    scores = scaled(logits, temperature)
    weight = torch.where(allowed(scores, top_k, top_p), scores.exp(), 0.0)
    law = normalised(weight)
    only = torch.zeros_like(law).scatter_(1, first_of_highest(logits)[:, None], 1.0)
    return torch.where((temperature == 0.0)[:, None], only, law)


def normalised(weight: Tensor) -> Tensor:
    """Weights in [0, 1] over their sum: float64 [n, V], the same bits in any batch."""
    mass = (weight * UNIT).long()
    return mass.double() / mass.sum(dim=-1, keepdim=True).clamp_min(1).double()


def choose(
    logits: Tensor,
    noise: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
) -> Tensor:
    """The token of each row by Gumbel-max: int64 [n]. noise: float64 [n, V], standard Gumbel."""
    scores = scaled(logits, temperature)
    noisy = torch.where(allowed(scores, top_k, top_p), scores + noise, -torch.inf)
    greedy = (temperature == 0.0)[:, None]
    return first_of_highest(torch.where(greedy, logits.double(), noisy))
