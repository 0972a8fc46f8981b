"""The random numbers of speculative decoding: one stream per (request seed, position, role, distance).

``Role`` says what a number is for. TARGET numbers belong to a position: they choose its token without
speculation, its bonus token, and both sides of coupled acceptance. DRAFT, ACCEPT and RESIDUAL numbers
belong to a position *and its distance from the anchor*, so a position that is proposed again in the
next cycle gets fresh ones. It must: whether tokens 1..i of a cycle are kept may depend on what was
drawn behind them (block verification keeps the largest i that passes; a budget looks at older
confidences), and a number that is used again after such a look is no longer uniform. Anchors only move
forward, so (position, distance) never repeats in a request.

A counter is (index / 4, position, role word), the key the seed; the role word holds the role in its
low 8 bits, the distance above.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.kernels import noise
from kvpolicy.sampling import Role

ROLE_BITS = 8


def role_word(role: Role, distance: int) -> int:
    """What stands in the counter. distance: positions from the anchor, from 1; 0 for TARGET."""
    if (role is Role.TARGET) != (distance == 0) or not 0 <= distance < 1 << 24:
        raise ValueError(f"distance = {distance}: role {role.name} has none such")
    return int(role) | distance << ROLE_BITS


def role_words(role: Role, distances: Tensor) -> Tensor:
    """:func:`role_word` of each distance, which must be at least 1 (TARGET: ignored). int64."""
    if role is Role.TARGET:
        return torch.zeros_like(distances)
    return (distances << ROLE_BITS) | int(role)


def uniforms(seeds: Tensor, anchors: Tensor, width: int, role: Role) -> Tensor:
    """A number in (0, 1) for each of the ``width`` positions behind the anchor: float64 [r, width].
    seeds, anchors: int64 [r]."""
    distances = torch.arange(1, width + 1, device=seeds.device).expand(seeds.shape[0], -1)
    flat = (seeds[:, None].expand_as(distances), anchors[:, None] + distances, distances)
    own, positions, far = (part.reshape(-1) for part in flat)
    drawn = noise.uniforms(own, positions, role_words(role, far), 1)
    return drawn.view(seeds.shape[0], width)


def gumbel(seeds: Tensor, anchors: Tensor, distances: Tensor, role: Role, width: int) -> Tensor:
    """Standard Gumbel noise of token ids 0..width-1 at ``anchor + distance``: float64 [r, width].
    seeds, anchors, distances: int64 [r]."""
    return noise.gumbel(seeds, anchors + distances, role_words(role, distances), width)


def gumbel_at(
    seeds: Tensor, anchors: Tensor, distances: Tensor, role: Role, candidates: Tensor
) -> Tensor:
    """The same noise at some token ids only: float64 [r, c]. candidates: int64 [r, c]."""
    words = role_words(role, distances)
    return noise.as_gumbel(noise.uniforms_at(seeds, anchors + distances, words, candidates))
