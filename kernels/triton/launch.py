"""What the launchers share: block sizes and pointers that always look the same to the compiler."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

# Named in every launch: triton 3.9 warns where it is left open, 3.10 leaves it off, and with it the
# bits would change with the version.
FUSION = {"enable_fp_fusion": True}

# The compiler makes another program for a pointer that is no multiple of this.
ALIGNMENT = 16


def aligned(x: Tensor) -> Tensor:
    """``x``, copied if its first element is not 16-byte aligned (a slice along rows of odd width).
    The copy may have other strides."""
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def power_of_two(size: int, least: int = 1) -> int:
    """The smallest power of two that holds ``size`` and ``least``."""
    return max(least, int(triton.next_power_of_2(size)))


def blocks(size: int, block: int) -> int:
    """Blocks that cover ``size``."""
    return -(-size // block)


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device: for grids that stay the same whatever the work. Two, interpreted."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
