"""A rule of somebody else: its key in torch and in Triton. Imported by tests that need triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpolicy.kernels.eviction import EvictionRule

FAR = tl.constexpr(1 << 62)
ODD = tl.constexpr((1 << 53) + 1)


def wide_key(stamp: Tensor, step: int, hand: int, draws: int) -> Tensor:
    """Keys over the whole range of int64 (they wrap around), many of them equal."""
    slot = torch.arange(stamp.shape[0], device=stamp.device)
    even = (slot // 2 + draws) * (1 << 62) - (1 << 62)
    return torch.where(slot % 2 == 0, even, stamp.long() * -((1 << 53) + 1))


@triton.jit
def wide_device_key(slot, stamp, capacity, step, hand, draws):  # type: ignore[no-untyped-def]
    even = (slot // 2 + draws) * FAR - FAR
    return tl.where(slot % 2 == 0, even, stamp * -ODD)


WIDE = EvictionRule("wide", touch=True, key=wide_key, device_key=wide_device_key)
