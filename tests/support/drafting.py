"""Small drafters with random weights, and the calls that tests make of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvpolicy.models.glm_dsa import GlmDsa
from kvpolicy.models.glm_weights import dtype_of
from kvpolicy.speculative.drafters.blockwise import Blockwise
from kvpolicy.speculative.drafters.checkpoint import KINDS, random_weights
from kvpolicy.speculative.drafters.config import DrafterConfig
from kvpolicy.speculative.drawing import RowSampling
from kvpolicy.speculative.proposal import Proposal

METHODS = tuple(KINDS)


def small_config(method: str, **changes: Any) -> DrafterConfig:
    """For the micro model: hidden 32, K = 4."""
    shift = method == "dspark"
    config = DrafterConfig(
        method=method, hidden=32, vocab=264, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48,
        taps=(0, 1), block=4 if shift else 5, window=12, max_positions=512, mask_token=259, shift=shift,
        rank=0 if method == "dflash" else 8, confidence=shift,
    )  # fmt: skip
    if method == "dflash2":
        config = replace(config, candidates=5, conv_group=8)
    return replace(config, **changes)


def weights_of(config: DrafterConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random, so that every part has its say."""
    return random_weights(KINDS[config.method].shapes(config), seed)


def drafter_of(
    config: DrafterConfig, target: GlmDsa, weights: dict[str, Tensor] | None = None
) -> Blockwise:
    """On the target's device, in its dtype."""
    own = {
        name: x.to(target.device, dtype_of(tuple(x.shape), target.ops.dtype))
        for name, x in (weights or weights_of(config)).items()
    }
    return KINDS[config.method](config, own, target)


def sampling(count: int, temperature: float = 0.0, seed: int = 0) -> RowSampling:
    """The same for every request, but for the seeds."""
    return RowSampling(
        torch.arange(count) + 1000 * seed,
        torch.full((count,), temperature, dtype=torch.float64),
        torch.zeros(count, dtype=torch.int64),
        torch.ones(count, dtype=torch.float64),
    )


def some_taps(positions: int, config: DrafterConfig, seed: int = 0) -> Tensor:
    """[positions, m, d]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(positions, len(config.taps), config.hidden, generator=generator)


def window_of(drafter: Blockwise, taps: Tensor, anchor: int, width: int) -> tuple[Tensor, Tensor]:
    """The last ``width`` positions before the anchor as the engine hands them over: context
    [1, width, ring_width], NaN where nothing stands, and their positions [1, width]."""
    kept = drafter.context(taps, torch.arange(len(taps)))
    at = torch.arange(anchor - width, anchor)
    context = torch.where((at >= 0)[:, None], kept[at.clamp(min=0)], torch.nan)
    return context[None], torch.where(at >= 0, at, -1)[None]


def propose(
    drafter: Blockwise, taps: Tensor, anchor: int, token: int, how: RowSampling | None = None,
    coupled: bool = False,
) -> Proposal:  # fmt: skip
    """For one request whose anchor ``token`` stands at position ``anchor``."""
    context, where = window_of(drafter, taps, anchor, drafter.window - 1)
    return drafter.propose(
        torch.tensor([token]), torch.tensor([anchor]), context, where, how or sampling(1), coupled
    )
