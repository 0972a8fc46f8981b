"""Next tokens on the device: greedy, or Gumbel-max with counter-based noise.

The same rule as ``kvpolicy/sampling.py`` states for one row on the host. Nothing depends on the batch:
noise is a function of (seed, position, role, token id), the rest is ``kernels/sampling.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sampling import choose
from .launch import FUSION

BLOCK = 256


@triton.jit
def _mix(c0, c1, c2, c3, k0, k1):
    """One round of Philox-4x32 (Salmon et al., SC 2011) on 32-bit words held in uint64."""
    first = c0 * 0xD2511F53
    second = c2 * 0xCD9E8D57
    low = 0xFFFFFFFF
    return (second >> 32) ^ c1 ^ k0, second & low, (first >> 32) ^ c3 ^ k1, first & low


@triton.jit
def philox(block, position, role, seed):
    """Four 32-bit words of each counter, uint64. block: the shape of the result; the others are of that
    shape or numbers, uint64."""
    zero = tl.zeros_like(block)
    low = zero + 0xFFFFFFFF
    c0, c1, c2, c3 = block, zero + (position & low), zero + (position >> 32), zero + role
    k0, k1 = zero + (seed & low), zero + (seed >> 32)
    for _ in tl.static_range(10):
        c0, c1, c2, c3 = _mix(c0, c1, c2, c3, k0, k1)
        k0 = (k0 + 0x9E3779B9) & low
        k1 = (k1 + 0xBB67AE85) & low
    return c0, c1, c2, c3


@triton.jit
def in_unit(bits):
    """32-bit words as float64 in (0, 1)."""
    return (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32


@triton.jit
def _gumbel_kernel(
    seeds,
    positions,
    roles,
    noise,
    width,
    ROLE: tl.constexpr,  # of every row, unless ROLES
    ROLES: tl.constexpr,  # each row has its own
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seeds + row).to(tl.uint64)
    position = tl.load(positions + row).to(tl.uint64)
    role = tl.load(roles + row).to(tl.uint64) if ROLES else ROLE
    c0, c1, c2, c3 = philox(block.to(tl.uint64), position, role, seed)
    at = noise + row * width
    for word in tl.static_range(4):
        bits = c0 if word == 0 else c1 if word == 1 else c2 if word == 2 else c3
        token = block * 4 + word
        tl.store(at + token, -tl.log(-tl.log(in_unit(bits))), mask=token < width)


def gumbel(seeds: Tensor, positions: Tensor, width: int, role: int | Tensor = 0) -> Tensor:
    """Standard Gumbel noise, see ``kvpolicy.sampling.gumbel``. seeds, positions: int64 [n]. role: of all
    rows, or int64 [n]. Returns float64 [n, width]."""
    n = seeds.shape[0]
    noise = torch.empty(n, width, dtype=torch.float64, device=seeds.device)
    if noise.numel():
        grid = (n, triton.cdiv(triton.cdiv(width, 4), BLOCK))
        _gumbel_kernel[grid](
            seeds.contiguous(),
            positions.contiguous(),
            role.contiguous() if isinstance(role, Tensor) else seeds,
            noise,
            width,
            ROLE=0 if isinstance(role, Tensor) else role,
            ROLES=isinstance(role, Tensor),
            BLOCK=BLOCK,
            **FUSION,
        )
    return noise


def sample(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
) -> Tensor:
    """The token at each position: int64 [n].

    logits: float32 [n, V]. seeds, positions, top_k: int64 [n]. temperature (0: greedy), top_p:
    float64 [n].
    """
    noise = gumbel(seeds, positions, logits.shape[-1])
    return choose(logits, noise, temperature, top_k, top_p)
