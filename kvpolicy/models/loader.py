"""From a model's name to something that decodes."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kvpolicy.geometry.geometry import Geometry
from kvpolicy.memory.step import StepMemory
from kvpolicy.models.checkpoint import checkpoint_folder


class DecodeModel(Protocol):
    """What the engine needs of a model. Every row's bits must depend on that row's history alone."""

    @property
    def geometry(self) -> Geometry: ...
    @property
    def vocab(self) -> int: ...
    @property
    def bos(self) -> int | None: ...
    @property
    def eos(self) -> tuple[int, ...]: ...
    @property
    def weight_bytes(self) -> int: ...

    def forward(self, tokens: Tensor, memory: StepMemory, wanted: Tensor) -> Tensor:
        """Compute the rows of one step.

        tokens: int64 [n], one per row of ``memory.segments``. For every layer: put the rows in
        flight, publish the selection, read the waves. wanted: int64 [m], rows whose logits are
        needed. Returns float32 [m, vocab].
        """
        ...


def load_model(model: str, device: torch.device) -> DecodeModel:
    """An embedded model by name, or a checkpoint folder. UserError if it cannot be read."""
    from kvpolicy.models.glm_dsa import GlmDsa

    return GlmDsa(checkpoint_folder(model), device, name=model)
