"""Counter-based random numbers on tensors: the numbers of ``philox.py``, for many streams at once.

A number is a function of (seed, position, role, index) alone. Plain torch: 32-bit words are held in
int64, whose products wrap around and so keep all 64 bits. No number visits the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def _high(product: Tensor) -> Tensor:
    """The upper 32 bits; the shift copies the sign, which the mask removes."""
    return (product >> 32) & _LOW


def words(seeds: Tensor, positions: Tensor, roles: Tensor, blocks: Tensor) -> Tensor:
    """Philox-4x32-10 (Salmon et al., SC 2011): int64 [..., 4], values below 2^32.

    seeds, positions, roles, blocks: int64, of shapes that broadcast. The counter is (block, low and
    high word of the position, role), the key is the seed.
    """
    c0, c1, c2, c3, k0, k1 = torch.broadcast_tensors(
        blocks, positions & _LOW, _high(positions), roles, seeds & _LOW, _high(seeds)
    )
    for _ in range(ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            _high(second) ^ c1 ^ k0,
            second & _LOW,
            _high(first) ^ c3 ^ k1,
            first & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return torch.stack([c0, c1, c2, c3], dim=-1)


def _in_unit(bits: Tensor) -> Tensor:
    """32-bit words as float64 in (0, 1)."""
    return (bits.double() + 0.5) * 2.0**-32


def uniforms(seeds: Tensor, positions: Tensor, roles: Tensor, width: int) -> Tensor:
    """The first ``width`` numbers of each stream: float64 [n, width]. Others: int64 [n]."""
    blocks = torch.arange(-(-width // 4), device=seeds.device)
    drawn = words(seeds[:, None], positions[:, None], roles[:, None], blocks)
    return _in_unit(drawn.reshape(seeds.shape[0], -1)[:, :width])


def uniforms_at(seeds: Tensor, positions: Tensor, roles: Tensor, indices: Tensor) -> Tensor:
    """Numbers of each stream by their index: float64 [n, c]. indices: int64 [n, c]."""
    drawn = words(seeds[:, None], positions[:, None], roles[:, None], indices // 4)
    return _in_unit(drawn.gather(-1, (indices % 4)[..., None])[..., 0])


def as_gumbel(uniform: Tensor) -> Tensor:
    """Standard Gumbel noise from numbers in (0, 1)."""
    return -torch.log(-torch.log(uniform))


def gumbel(seeds: Tensor, positions: Tensor, roles: Tensor, width: int) -> Tensor:
    """Standard Gumbel noise for token ids 0..width-1: float64 [n, width]."""
    return as_gumbel(uniforms(seeds, positions, roles, width))
