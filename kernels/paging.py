"""Paged tables: a growing vector of equal items that lives in frames of one device arena.

Item i of a table lies in its frame ``i // per_frame`` at place ``i % per_frame``. The *location* of
an item is ``frame * per_frame + place``: one integer that addresses any item of that layout in the
arena, whichever table owns the frame. Kernels see locations only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Paged:
    """One table of an arena.

    view: [frames_in_arena, per_frame, *item] strided view of the arena.
    frames: [n] int64, the table's frames in order.
    """

    view: Tensor
    frames: Tensor

    @property
    def per_frame(self) -> int:
        """Items in one frame."""
        return int(self.view.shape[1])

    def locate(self, index: Tensor) -> Tensor:
        """Locations of items. index: int64 [...] -> int64 [...]."""
        per = self.per_frame
        return self.frames[index // per] * per + index % per

    def get(self, index: Tensor) -> Tensor:
        """Items at ``index``. int64 [...] -> [..., *item]."""
        return gather(self.view, self.locate(index))

    def put(self, index: Tensor, items: Tensor) -> None:
        """Write items at ``index`` (distinct). index: int64 [n], items: [n, *item] or scalar."""
        scatter(self.view, self.locate(index), items)

    def prefix(self, count: int) -> Tensor:
        """The first ``count`` items, in order: [count, *item] (a copy)."""
        used = self.frames[: -(-count // self.per_frame)]
        return self.view[used].flatten(0, 1)[:count]


def gather(view: Tensor, location: Tensor) -> Tensor:
    """Items of an arena view at locations. view: [F, per, *item] -> [..., *item]."""
    per = view.shape[1]
    return view[location // per, location % per]


def scatter(view: Tensor, location: Tensor, items: Tensor) -> None:
    """Write items at distinct locations of an arena view."""
    per = view.shape[1]
    view[location // per, location % per] = items.to(view.dtype)


def upload(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """int64 numbers of the host on a device. Does not wait for what the device is doing: a copy of
    pageable memory is taken before the call returns."""
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)


def arange(count: int, device: torch.device) -> Tensor:
    """int64 0..count-1 on a device."""
    return torch.arange(count, dtype=torch.int64, device=device)
