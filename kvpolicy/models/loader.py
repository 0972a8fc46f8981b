"""From a model's name to something that decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from kvpolicy.errors import UserError
from kvpolicy.geometry.geometry import Geometry
from kvpolicy.kernels.backend import BackendError, choose_backend
from kvpolicy.memory.access import StepAccess
from kvpolicy.memory.step import StepMemory
from kvpolicy.models.checkpoint import checkpoint_folder
from kvpolicy.selection.spec import MODEL, make_source


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


class DeviceModel(DecodeModel, Protocol):
    """A model whose step asks the host for no number (``device_only`` is true), so that steps of plain
    decoding may run on device tensors alone, and as CUDA graphs."""

    @property
    def device_only(self) -> bool: ...

    def forward(self, tokens: Tensor, memory: StepAccess, wanted: Tensor) -> Tensor:
        """As :meth:`DecodeModel.forward`."""
        ...


@runtime_checkable
class TappedModel(Protocol):
    """A model whose layers a drafter may read."""

    def forward_with_taps(
        self, tokens: Tensor, memory: StepAccess, wanted: Tensor, taps: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """As :meth:`DecodeModel.forward`, with float32 [n, len(taps), hidden], the outputs of the layers
        ``taps`` for every row of the step (-1: the embedding's), None without any."""
        ...


def on_device_only(model: DecodeModel) -> TypeGuard[DeviceModel]:
    """Whether it says so."""
    return bool(getattr(model, "device_only", False))


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""By the name that a config gives them."""


@dataclass(frozen=True, slots=True)
class Dummy:
    """Random weights instead of a checkpoint's, see ``kvpolicy.models.dummy``. None: all layers, and
    their share of the vocabulary. selection: whose choices stand in for the indexer's, see
    ``make_source``."""

    layers: int | None = None
    vocab: int | None = None
    selection: str = MODEL


def load_model(
    model: str,
    device: torch.device,
    backend: str = "auto",
    dtype: str = "float32",
    dummy: Dummy | None = None,
) -> DecodeModel:
    """An embedded model by name, a checkpoint folder, or with ``dummy`` a preset.

    backend: ``reference``, ``triton``, or ``auto``: triton on a GPU where it can run, else the
    reference. dtype: float32 or bfloat16. UserError if the model cannot be read, or the backend
    cannot run here.
    """
    from kvpolicy.models.dummy import DummyWeights
    from kvpolicy.models.glm_dsa import GlmDsa

    torch_dtype = DTYPES[dtype]
    try:
        chosen = choose_backend(backend, device.type)
    except BackendError as error:
        raise UserError(f"backend = {backend!r}: {error}") from None
    if dummy is None:
        return GlmDsa(checkpoint_folder(model), device, model, chosen, torch_dtype)
    weights = DummyWeights(model, device, torch_dtype, dummy.layers, dummy.vocab)
    selection = make_source(dummy.selection, weights.geometry, device, chosen)
    return GlmDsa(weights, device, model, chosen, torch_dtype, selection)
