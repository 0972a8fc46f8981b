"""From a model's name to something that decodes."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kvpolicy.errors import UserError
from kvpolicy.geometry.geometry import Geometry
from kvpolicy.kernels.backend import BackendError, choose_backend
from kvpolicy.memory.step import StepMemory
from kvpolicy.models.checkpoint import checkpoint_folder


class DecodeModel(Protocol):
    """What the engine needs of a model. Every row's bits must depend on that row's history alone.

    backend: the kernels it runs on, for the run record.
    """

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
    @property
    def backend(self) -> str: ...

    def forward(self, tokens: Tensor, memory: StepMemory, wanted: Tensor) -> Tensor:
        """Compute the rows of one step.

        tokens: int64 [n], one per row of ``memory.segments``. For every layer: put the rows in
        flight, publish the selection, read the waves. wanted: int64 [m], rows whose logits are
        needed. Returns float32 [m, vocab].
        """
        ...


def load_model(model: str, device: torch.device, backend: str = "auto") -> DecodeModel:
    """An embedded model by name, or a checkpoint folder.

    backend: ``reference``, ``triton``, or ``auto``: triton on a GPU where it can run, else the
    reference. UserError if the model cannot be read, or the backend cannot run here.
    """
    from kvpolicy.models.glm_dsa import GlmDsa

    folder = checkpoint_folder(model)
    try:
        chosen = choose_backend(backend, device.type)
    except BackendError as error:
        raise UserError(f"backend = {backend!r}: {error}") from None
    return GlmDsa(folder, device, name=model, backend=chosen)
