"""Which proposed tokens are kept, and which token follows them: the rules of speculative sampling.

r requests, K proposed tokens x_1..x_K each, of which the first l are verified; p_i is the target's law
of token i given those before it, q_i the law that x_i was drawn from. Standard: Leviathan et al.
(arXiv 2211.17192) and Chen et al. (arXiv 2302.01318). Block: Sun et al. (arXiv 2403.10444).

A rule is three parts: the chance of every step, what a set of uniform numbers makes of it, and the
weights that the next token is drawn from after a rejection. Tests enumerate the parts; the engine calls
:func:`accept`. All shapes are fixed and no number visits the host. Sums are of whole numbers and
maxima have no order, so a request's result has the same bits in any batch.

q comes as ``probabilities`` [r, K, V], or [r, K, c] at token ids ``candidates`` [r, K, c] (None: all
tokens), distinct where the probability is not zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .sampling import UNIT, first_of_highest

# Below any q of a drawn token; keeps 0 * p/q a number where a caller left q at zero.
LEAST = 2.0**-200


def proposed_probability(
    tokens: Tensor, candidates: Tensor | None, probabilities: Tensor
) -> Tensor:
    """q_i(x_i): float64 [r, K]. tokens: int64 [r, K]."""
    if candidates is None:
        return probabilities.gather(-1, tokens[..., None])[..., 0].double()
    hit = candidates == tokens[..., None]
    # One of them is not zero, so the order of the sum is of no account.
    return torch.where(hit, probabilities.double(), 0.0).sum(dim=-1)


def excess(target: Tensor, scale: Tensor, candidates: Tensor | None, proposed: Tensor) -> Tensor:
    """max(scale * p - q, 0), token by token: float64 [..., V].

    target: float64 [..., V]. scale: float64 [...]. candidates, proposed: one q per row, [..., c].
    """
    weight = scale[..., None] * target
    proposed = proposed.double()
    if candidates is None:
        return (weight - proposed).clamp_min(0.0)
    return weight.scatter_add(-1, candidates, -proposed).clamp_min(0.0)


def ratios(target: Tensor, tokens: Tensor, proposed: Tensor) -> Tensor:
    """p_i(x_i) / q_i(x_i): float64 [r, K]. target: [r, K, V]. proposed: q_i(x_i)."""
    own = target.gather(-1, tokens[..., None])[..., 0]
    return own / proposed.clamp_min(LEAST)


def standard_chances(ratio: Tensor) -> Tensor:
    """Chance that x_i is kept, given that those before it are: min(1, p/q). [r, K]."""
    return ratio.clamp_max(1.0)


def block_chances(
    target: Tensor,
    ratio: Tensor,
    lengths: Tensor,
    candidates: Tensor | None,
    proposed: Tensor,
) -> tuple[Tensor, Tensor]:
    """Chance h_i of every i = 1..l that i tokens pass, and the scales P_0..P_K.

    P_i = min(P_{i-1} p_i(x_i) / q_i(x_i), 1); h_i = R_i / (R_i + 1 - P_i) with
    R_i = sum of max(P_i p_{i+1} - q_{i+1}, 0), and h_l = P_l. target: float64 [r, K, V]. Returns
    float64 [r, K] and [r, K + 1].
    """
    width = ratio.shape[1]
    scale = torch.ones_like(lengths, dtype=torch.float64)
    scales = [scale]
    for i in range(width):
        scale = (scale * ratio[:, i]).clamp_max(1.0)
        scales.append(scale)
    scale = torch.stack(scales, dim=1)
    left = (excess(target, scale[:, :-1], candidates, proposed) * UNIT).long().sum(dim=-1)
    rest = left.double() / UNIT
    # P_i = 1 and R_i = 0: the next laws are equal and the next token passes for certain.
    below = rest + 1.0 - scale[:, :-1]
    inner = torch.where(below > 0.0, rest / below, 1.0)
    # h_i for i = 1..K: inner[i] below l, P_l at l. inner has no column K, where i = l at most.
    inner = torch.cat([inner[:, 1:], scale[:, -1:]], dim=1)
    index = torch.arange(1, width + 1, device=lengths.device)
    return torch.where(index == lengths[:, None], scale[:, 1:], inner), scale


def kept_in_turn(chances: Tensor, uniform: Tensor, lengths: Tensor) -> Tensor:
    """Tokens kept before the first one that fails: int64 [r]. chances, uniform: [r, K]."""
    index = torch.arange(chances.shape[1], device=lengths.device)
    passed = (uniform < chances) & (index < lengths[:, None])
    return passed.long().cumprod(dim=1).sum(dim=1)


def kept_at_most(chances: Tensor, uniform: Tensor, lengths: Tensor) -> Tensor:
    """The largest i that passes, 0 if none does: int64 [r]. chances, uniform: [r, K]."""
    index = torch.arange(1, chances.shape[1] + 1, device=lengths.device)
    passed = (uniform < chances) & (index <= lengths[:, None])
    return torch.cat([torch.zeros_like(lengths)[:, None], passed * index], dim=1).amax(dim=1)


def agreeing(tokens: Tensor, chosen: Tensor, lengths: Tensor) -> Tensor:
    """Verified tokens before the first that is not the target's own choice: int64 [r]. chosen: int64
    [r, K + 1], the target's tokens. Greedy and coupled acceptance."""
    index = torch.arange(tokens.shape[1], device=lengths.device)
    same = (tokens == chosen[:, : tokens.shape[1]]) & (index < lengths[:, None])
    return same.long().cumprod(dim=1).sum(dim=1)


def draw(weight: Tensor, fallback: Tensor, noise: Tensor) -> Tensor:
    """A token by Gumbel-max over weights, or over ``fallback`` where no weight is left: int64 [r].
    weight, fallback, noise: float64 [r, V]. The weights need no sum."""
    weight = torch.where((weight > 0.0).any(dim=-1, keepdim=True), weight, fallback)
    return first_of_highest(torch.where(weight > 0.0, weight.log() + noise, -torch.inf))


def row_of(x: Tensor, at: Tensor) -> Tensor:
    """x[i, at[i]] of every request: [r, ...]. at: int64 [r]."""
    index = at.view(-1, *[1] * (x.dim() - 1)).expand(-1, 1, *x.shape[2:])
    return x.gather(1, index)[:, 0]


def residual(
    target: Tensor,
    accepted: Tensor,
    scale: Tensor | None,
    candidates: Tensor | None,
    proposed: Tensor,
) -> tuple[Tensor, Tensor]:
    """What the token after a rejection is drawn from: weights max(P_a p_{a+1} - q_{a+1}, 0), and p_{a+1}
    itself: float64 [r, V]. scale: P_0..P_K [r, K + 1] (None: ones). Requests without a rejection
    get numbers that nobody reads."""
    at = accepted.clamp_max(proposed.shape[1] - 1)
    own = row_of(target, at)
    one = torch.ones_like(own[:, 0]) if scale is None else row_of(scale, at)
    ids = None if candidates is None else row_of(candidates, at)
    return excess(own, one, ids, row_of(proposed, at)), own


def accept(
    target: Tensor,
    tokens: Tensor,
    candidates: Tensor | None,
    proposed: Tensor,
    lengths: Tensor,
    uniform: Tensor,
    block: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Standard or block verification: (accepted int64 [r], weights [r, V], p [r, V]), the last two as of
    :func:`residual`. target: float64 [r, K, V]. uniform: float64 [r, K]. lengths: int64 [r], 0..K."""
    ratio = ratios(target, tokens, proposed_probability(tokens, candidates, proposed))
    if block:
        chances, scale = block_chances(target, ratio, lengths, candidates, proposed)
        accepted = kept_at_most(chances, uniform, lengths)
        return accepted, *residual(target, accepted, scale, candidates, proposed)
    accepted = kept_in_turn(standard_chances(ratio), uniform, lengths)
    return accepted, *residual(target, accepted, None, candidates, proposed)
