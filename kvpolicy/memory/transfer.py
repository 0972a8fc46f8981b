"""Copies from the device to the host that nobody has to wait for."""

from __future__ import annotations

import torch
from torch import Tensor


class ToHost:
    """A tensor on its way to the host, as it will be when the work launched so far is done."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._done: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    @property
    def ready(self) -> bool:
        """Whether it has arrived."""
        return self._done is None or bool(self._done.query())

    def read(self) -> Tensor:
        """The tensor on the host (on the CPU the tensor itself); waits until it is there."""
        if self._done is not None:
            self._done.synchronize()
        return self._tensor
