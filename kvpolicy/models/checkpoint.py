"""Reading a Hugging Face checkpoint folder: config.json and safetensors, every fault one clear line."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvpolicy.errors import UserError, unknown_name
from kvpolicy.geometry.dsa import from_hf_config
from kvpolicy.geometry.geometry import Geometry
from kvpolicy.geometry.hf_config import EMBEDDED, is_folder, read_json
from kvpolicy.geometry.presets import preset_names
from kvpolicy.models.glm_config import GlmDsaConfig
from kvpolicy.models.glm_weights import dtype_of

WEIGHT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def checkpoint_folder(model: str) -> Path:
    """The folder of an embedded model's name or of a path. UserError if there is none."""
    if model in EMBEDDED:
        return Path(str(files("kvpolicy.models").joinpath(EMBEDDED[model])))
    path = Path(model)
    if is_folder(path):
        return path
    if model in preset_names():
        raise UserError(
            f"model {model!r} is a geometry without weights: run it with dummy_weights "
            "(--dummy-weights), or name a checkpoint folder"
        )
    raise UserError(f"{unknown_name('model', model, EMBEDDED)}, or a checkpoint folder")


class Checkpoint:
    """The weights of a checkpoint folder, see ``glm_weights.Weights``. UserError for one that cannot
    be read, or is of another kind."""

    def __init__(self, folder: Path, name: str, device: torch.device, dtype: torch.dtype) -> None:
        hf = read_json(folder / "config.json")
        self.geometry: Geometry = from_hf_config(hf, name=name)
        self.config = GlmDsaConfig.from_hf(hf, self.geometry)
        self._named = read_weights(folder, self.config.shapes(), device, dtype)

    def take(self, name: str) -> Tensor:
        return self._named.pop(name)


def read_weights(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The named tensors, checked against ``shapes`` and converted: matrices to ``dtype``.

    UserError naming the file and the tensor if one is missing, has another shape, is unexpected,
    holds a value that is not finite, or if the file is broken.
    """
    path = folder / "model.safetensors"
    if not path.is_file():
        raise UserError(f"checkpoint {str(folder)!r} has no model.safetensors")
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"checkpoint file {str(path)!r} is broken: {error}") from None
    unexpected = sorted(set(found) - set(shapes))
    if unexpected:
        raise UserError(f"checkpoint file {str(path)!r}: unexpected tensor {unexpected[0]!r}")
    weights: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        tensor = found.get(name)
        if tensor is None:
            raise UserError(f"checkpoint file {str(path)!r}: tensor {name!r} is missing")
        if tuple(tensor.shape) != shape:
            raise UserError(
                f"checkpoint file {str(path)!r}: {name!r} has shape {tuple(tensor.shape)}, "
                f"config.json asks for {shape}"
            )
        if tensor.dtype not in WEIGHT_DTYPES:
            raise UserError(
                f"checkpoint file {str(path)!r}: {name!r} is {tensor.dtype}, allowed "
                f"{', '.join(str(d) for d in WEIGHT_DTYPES)}"
            )
        tensor = tensor.to(dtype_of(shape, dtype))
        if not bool(tensor.isfinite().all()):
            raise UserError(
                f"checkpoint file {str(path)!r}: {name!r} holds values that are not finite numbers"
            )
        weights[name] = tensor.to(device).contiguous()
    return weights
