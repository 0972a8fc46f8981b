"""DFlash2's grouped dynamic depthwise convolution over the rows of a block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicy.kernels.ops import Ops
from kvpolicy.kernels.packing import Packed


@dataclass(frozen=True, slots=True)
class GroupedConvolution:
    """Before (side 0) and after (side 1) one sublayer. base: float32 [2, taps, hidden]. projection: to
    what is added to it, one number per side, tap and group of channels."""

    base: Tensor
    projection: Packed

    def kernels(self, normed: Tensor, ops: Ops) -> Tensor:
        """The kernels of each row: float32 [n, 2, taps, hidden]. normed: narrow [n, hidden]."""
        sides, taps, _ = self.base.shape
        (shift,) = ops.products(normed, self.projection)
        shift = shift.view(normed.shape[0], sides, taps, -1, 1)
        groups = shift.shape[3]
        return (self.base.view(sides, taps, groups, -1) + shift).flatten(3)

    def apply(self, x: Tensor, kernels: Tensor, side: int, block: int) -> Tensor:
        """Row i of a block: the sum over taps t of kernel t of row i times row i - t, zero before the
        block. x: [r * block, hidden], of any float dtype, which the result has."""
        rows = x.float().view(-1, block, x.shape[-1])
        own = kernels[:, side].view(rows.shape[0], block, kernels.shape[2], -1)
        out = own[:, :, 0] * rows
        for tap in range(1, kernels.shape[2]):
            before = torch.nn.functional.pad(rows, (0, 0, tap, 0))[:, :block]
            out = out + own[:, :, tap] * before
        return out.view(x.shape).to(x.dtype)
