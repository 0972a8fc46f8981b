"""The sizes that kernels are measured at: a model's dimensions, batches, a context."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvpolicy.errors import UserError
from kvpolicy.geometry.dsa import from_hf_config
from kvpolicy.geometry.geometry import Geometry
from kvpolicy.geometry.hf_config import read_json
from kvpolicy.kernels.backend import BackendError, choose_backend
from kvpolicy.kernels.ops import Ops, make_ops
from kvpolicy.models.checkpoint import checkpoint_folder
from kvpolicy.models.dummy import DIMENSIONS, DummyWeights
from kvpolicy.models.glm_config import GlmDsaConfig
from kvpolicy.models.loader import DTYPES

# 8-bit rows keep one scale for so many values of the latent.
FP8_GROUP = 128


@dataclass(frozen=True, slots=True)
class Sizes:
    """What to measure at, and by which kernels.

    context: entries that a request may choose from. formats: of rows and index keys, by name.
    """

    config: GlmDsaConfig
    geometry: Geometry
    batches: tuple[int, ...]
    context: int
    device: torch.device
    backend: str
    dtype: torch.dtype

    @property
    def topk(self) -> int:
        return self.geometry.selectors[0].topk

    @property
    def group_layers(self) -> int:
        """Layers of the largest store: they share a selection and a record."""
        return max(store.n_layers for store in self.geometry.stores)

    @property
    def formats(self) -> tuple[str, ...]:
        if self.dtype == torch.float32:
            return ("float32",)
        return ("bf16", "fp8") if self.config.kv_rank % FP8_GROUP == 0 else ("bf16",)

    def row_bytes(self, form: str) -> int:
        return self.geometry.stores[0].row_bytes(form)

    def ops(self) -> Ops:
        """The model's operations on the backend that is measured."""
        return make_ops(self.backend, self.dtype)


def sizes_of(
    model: str,
    batches: tuple[int, ...],
    context: int | None,
    device: torch.device,
    backend: str,
    dtype: str | None,
) -> Sizes:
    """Defaults by device: bfloat16 and 100,352 entries on a GPU, float32 and 512 on a CPU. UserError for
    a model whose dimensions are not known, or sizes that it does not have."""
    config, geometry = _dimensions(model, device)
    large = device.type == "cuda"
    context = context or min(100_352 if large else 512, geometry.max_context)
    topk = geometry.selectors[0].topk
    if not 4 * topk <= context <= geometry.max_context or context % 8:
        raise UserError(
            f"--context {context}: {model} allows {4 * topk} to {geometry.max_context}, a multiple of 8"
        )
    try:
        chosen = choose_backend(backend, device.type)
    except BackendError as error:
        raise UserError(f"backend = {backend!r}: {error}") from None
    torch_dtype = DTYPES[dtype or ("bfloat16" if large else "float32")]
    return Sizes(config, geometry, batches, context, device, chosen, torch_dtype)


def _dimensions(model: str, device: torch.device) -> tuple[GlmDsaConfig, Geometry]:
    if model in DIMENSIONS:  # no tensor is made: nothing is taken
        weights = DummyWeights(model, torch.device("cpu"), torch.bfloat16)
        return weights.config, weights.geometry
    hf = read_json(checkpoint_folder(model) / "config.json")
    geometry = from_hf_config(hf, name=model)
    return GlmDsaConfig.from_hf(hf, geometry), geometry
