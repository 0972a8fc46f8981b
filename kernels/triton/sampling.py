"""Next tokens on the device: greedy, or Gumbel-max with counter-based noise.

The same rule as ``kvpolicy/sampling.py`` states for one row on the host. Nothing depends on the batch:
noise is a function of (seed, position, token id), maxima have no order, and the running sums of top-p
are of whole numbers (weights in units of 2^-40).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import FUSION

BLOCK = 256
# Weights of top-p in units of 2^-40: a vocabulary of 2^22 tokens still sums below 2^63.
UNIT = 2.0**40


@triton.jit
def _mix(c0, c1, c2, c3, k0, k1):
    """One round of Philox-4x32 (Salmon et al., SC 2011) on 32-bit words held in uint64."""
    first = c0 * 0xD2511F53
    second = c2 * 0xCD9E8D57
    low = 0xFFFFFFFF
    return (second >> 32) ^ c1 ^ k0, second & low, (first >> 32) ^ c3 ^ k1, first & low


@triton.jit
def _gumbel_kernel(seeds, positions, noise, width, ROLE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seeds + row).to(tl.uint64)
    position = tl.load(positions + row).to(tl.uint64)
    zero = tl.zeros([BLOCK], tl.uint64)
    low = zero + 0xFFFFFFFF
    c0, c1, c2, c3 = (
        block.to(tl.uint64),
        zero + (position & low),
        zero + (position >> 32),
        zero + ROLE,
    )
    k0, k1 = zero + (seed & low), zero + (seed >> 32)
    for _ in tl.static_range(10):
        c0, c1, c2, c3 = _mix(c0, c1, c2, c3, k0, k1)
        k0 = (k0 + 0x9E3779B9) & low
        k1 = (k1 + 0xBB67AE85) & low
    at = noise + row * width
    for word in tl.static_range(4):
        bits = c0 if word == 0 else c1 if word == 1 else c2 if word == 2 else c3
        uniform = (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32
        token = block * 4 + word
        tl.store(at + token, -tl.log(-tl.log(uniform)), mask=token < width)


def gumbel(seeds: Tensor, positions: Tensor, width: int, role: int = 0) -> Tensor:
    """Standard Gumbel noise, see ``kvpolicy.sampling.gumbel``. seeds, positions: int64 [n]. Returns
    float64 [n, width]."""
    n = seeds.shape[0]
    noise = torch.empty(n, width, dtype=torch.float64, device=seeds.device)
    if noise.numel():
        grid = (n, triton.cdiv(triton.cdiv(width, 4), BLOCK))
        _gumbel_kernel[grid](
            seeds.contiguous(),
            positions.contiguous(),
            noise,
            width,
            ROLE=role,
            BLOCK=BLOCK,
            **FUSION,
        )
    return noise


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
    greedy = (temperature == 0.0)[:, None]
    scaled = logits.double() - logits.max(dim=-1, keepdim=True).values
    scaled = scaled / torch.where(greedy, 1.0, temperature[:, None])
    noisy = scaled + gumbel(seeds, positions, logits.shape[-1])
    noisy = torch.where(allowed(scaled, top_k, top_p), noisy, -torch.inf)
    return first_of_highest(torch.where(greedy, logits.double(), noisy))
