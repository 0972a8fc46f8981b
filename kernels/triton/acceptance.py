"""Acceptance of proposed tokens in one launch, two with block verification: ``kernels/acceptance.py`` fused.

The reference is some 300 operators of a few microseconds each, most of them rounds of Philox. Here a
program decides one request: which tokens are kept, and the token drawn behind them, its noise made as it
goes. Reads p [r, K, V] (float64) once for block verification and one row of it for the draw.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import power_of_two
from .sampling import in_unit, philox

# Blocks of four tokens that a program draws at once.
BLOCK = 256
# A product and a difference stay two operations, as in the reference.
SEPARATE = {"enable_fp_fusion": False}


@triton.jit
def _proposed_at(candidates, proposed, row, token, live, C, SPARSE: tl.constexpr):
    """q of a row at token ids: float64. token, live: [BLOCK]."""
    if SPARSE:
        found = tl.zeros(token.shape, tl.float64)
        for c in range(C):
            own = tl.load(candidates + row * C + c)
            chance = tl.load(proposed + row * C + c).to(tl.float64)
            found += tl.where(token == own, chance, 0.0)
        return found
    return tl.load(proposed + row * C + token, mask=live, other=0.0).to(tl.float64)


@triton.jit
def _ratio(target, tokens, candidates, proposed, row, live, V, C, SPARSE: tl.constexpr):
    """p(x) / q(x) of rows: float64. row, live: [n]."""
    token = tl.load(tokens + row, mask=live, other=0)
    own = tl.load(target + row * V + token, mask=live, other=0.0)
    if SPARSE:
        chance = tl.zeros(token.shape, tl.float64)
        for c in range(C):
            same = tl.load(candidates + row * C + c, mask=live, other=-1) == token
            drawn = tl.load(proposed + row * C + c, mask=live, other=0.0).to(tl.float64)
            chance += tl.where(same, drawn, 0.0)
    else:
        chance = tl.load(proposed + row * C + token, mask=live, other=0.0).to(tl.float64)
    return own / tl.maximum(chance, 6.223015277861142e-61)  # 2^-200


@triton.jit
def _scale_kernel(
    target,
    tokens,
    candidates,
    proposed,
    scales,
    left,
    V,
    C,
    K: tl.constexpr,
    SPARSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """P_i of a request and R_i in units of 2^-40, for i = 0..K; R_K is not defined."""
    request = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1).to(tl.int64)
    one = tl.arange(0, 1)
    scale = tl.zeros([1], tl.float64) + 1.0
    for k in tl.static_range(K):
        before = request * K + k + one
        ratio = _ratio(target, tokens, candidates, proposed, before, one == 0, V, C, SPARSE)
        scale = tl.where(k < i, tl.minimum(scale * ratio, 1.0), scale)
    tl.store(scales + request * (K + 1) + i + one, scale)
    own = tl.max(scale, axis=0)
    if i < K:
        row = request * K + i
        total = tl.zeros([BLOCK], tl.int64)
        for start in range(0, V, BLOCK):
            token = start + tl.arange(0, BLOCK)
            live = token < V
            p = tl.load(target + row * V + token, mask=live, other=0.0)
            q = _proposed_at(candidates, proposed, row, token, live, C, SPARSE)
            weight = tl.maximum(own * p - q, 0.0)
            total += tl.where(live, (weight * 1099511627776.0).to(tl.int64), 0)
        tl.store(left + request * K + i, tl.sum(total, axis=0))


@triton.jit
def _kept(chance, uniform, length, k, K: tl.constexpr, IN_BLOCK: tl.constexpr):
    """Tokens kept of a request. chance, uniform, k: [KB]."""
    passed = (uniform < chance) & (k < length)
    if IN_BLOCK:
        return tl.max(tl.where(passed, k + 1, 0), axis=0)
    return tl.min(tl.where(passed, K, k), axis=0)


@triton.jit
def _better(best, at, score, token, V):
    """The first of the highest of what was found and one more block."""
    top = tl.max(score, axis=0)
    where = tl.min(tl.where(score == top, token, V), axis=0)
    more = (top > best) | ((top == best) & (where < at))
    return tl.where(more, top, best), tl.where(more, where, at)


@triton.jit
def _accept_kernel(
    target,
    tokens,
    candidates,
    proposed,
    lengths,
    seeds,
    anchors,
    bonus,
    scales,
    left,
    accepted,
    following,
    V,
    C,
    K: tl.constexpr,
    KB: tl.constexpr,
    ACCEPT: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SHIFT: tl.constexpr,
    SPARSE: tl.constexpr,
    IN_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + request)
    seed = tl.load(seeds + request).to(tl.uint64)
    anchor = tl.load(anchors + request)
    k = tl.arange(0, KB).to(tl.int64)
    live = k < K
    if IN_BLOCK:
        scale = tl.load(scales + request * (K + 1) + k + 1, mask=live, other=0.0)
        inner = live & (k + 1 < K)
        rest = tl.load(left + request * K + k + 1, mask=inner, other=0).to(tl.float64)
        rest = rest * 9.094947017729282e-13  # 2^-40
        below = rest + 1.0 - scale
        within = tl.where(below > 0.0, rest / tl.where(below > 0.0, below, 1.0), 1.0)
        chance = tl.where(k + 1 == length, scale, within)
    else:
        rows = request * K + k
        ratio = _ratio(target, tokens, candidates, proposed, rows, live, V, C, SPARSE)
        chance = tl.minimum(ratio, 1.0)
    word = (ACCEPT | ((k + 1) << SHIFT)).to(tl.uint64)
    position = (anchor + 1 + k).to(tl.uint64)
    bits, _, _, _ = philox(tl.zeros([KB], tl.uint64), position, word, seed)
    count = _kept(chance, in_unit(bits), length, k, K, IN_BLOCK)
    tl.store(accepted + request, count)
    if count == length:
        tl.store(following + request, tl.load(bonus + request))
    else:
        own = tl.load(scales + request * (K + 1) + count) if IN_BLOCK else 1.0
        row = request * K + count
        own_word = (RESIDUAL | ((count + 1) << SHIFT)).to(tl.uint64)
        own_position = (anchor + 1 + count).to(tl.uint64)
        nothing = tl.full([], -float("inf"), tl.float64)
        end = tl.full([], 0, tl.int64) + V
        best, at, plain, plain_at = nothing, end, nothing, end
        for start in range(0, (V + 3) // 4, BLOCK):
            four = start + tl.arange(0, BLOCK).to(tl.int64)
            c0, c1, c2, c3 = philox(four.to(tl.uint64), own_position, own_word, seed)
            for lane in tl.static_range(4):
                drawn = c0 if lane == 0 else c1 if lane == 1 else c2 if lane == 2 else c3
                noise = -tl.log(-tl.log(in_unit(drawn)))
                token = four * 4 + lane
                here = token < V
                p = tl.load(target + row * V + token, mask=here, other=0.0)
                q = _proposed_at(candidates, proposed, row, token, here, C, SPARSE)
                weight = tl.maximum(own * p - q, 0.0)
                some = here & (weight > 0.0)
                score = tl.where(some, tl.log(tl.where(some, weight, 1.0)) + noise, -float("inf"))
                best, at = _better(best, at, score, token, V)
                some = here & (p > 0.0)
                score = tl.where(some, tl.log(tl.where(some, p, 1.0)) + noise, -float("inf"))
                plain, plain_at = _better(plain, plain_at, score, token, V)
        chosen = tl.where(best > -float("inf"), at, plain_at)
        tl.store(following + request, tl.minimum(chosen, V - 1))


def accept_and_draw(
    target: Tensor,
    tokens: Tensor,
    candidates: Tensor | None,
    proposed: Tensor,
    lengths: Tensor,
    seeds: Tensor,
    anchors: Tensor,
    bonus: Tensor,
    roles: tuple[int, int],
    shift: int,
    block: bool,
) -> tuple[Tensor, Tensor]:
    """(accepted, next token) of each request, int64 [r]: ``acceptance.accept`` and ``acceptance.draw``.

    target: float64 [r, K, V]. bonus: int64 [r], the token where all that was verified is kept. roles: of
    the acceptance and of the residual numbers; a role word is role | distance << shift.
    """
    count, width = tokens.shape
    vocabulary, many = target.shape[-1], proposed.shape[-1]
    target, proposed, tokens = target.contiguous(), proposed.contiguous(), tokens.contiguous()
    ids = tokens if candidates is None else candidates.contiguous()
    scales = torch.empty((count, width + 1), dtype=torch.float64, device=target.device)
    left = torch.empty((count, width), dtype=torch.int64, device=target.device)
    accepted, following = torch.empty_like(lengths), torch.empty_like(lengths)
    if not count:
        return accepted, following
    shared = {"K": width, "SPARSE": candidates is not None, "BLOCK": BLOCK}
    if block:
        _scale_kernel[(count, width + 1)](
            target, tokens, ids, proposed, scales, left, vocabulary, many, **shared, **SEPARATE
        )
    _accept_kernel[(count,)](
        target,
        tokens,
        ids,
        proposed,
        lengths.contiguous(),
        seeds.contiguous(),
        anchors.contiguous(),
        bonus.contiguous(),
        scales,
        left,
        accepted,
        following,
        vocabulary,
        many,
        KB=power_of_two(width),
        ACCEPT=roles[0],
        RESIDUAL=roles[1],
        SHIFT=shift,
        IN_BLOCK=block,
        **shared,
        **SEPARATE,
    )
    return accepted, following
