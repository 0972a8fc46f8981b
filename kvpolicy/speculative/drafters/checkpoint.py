"""From a method and a model to a drafter: weights that ship, a folder's, or random ones of any shape."""

from __future__ import annotations

import logging
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpolicy.errors import UserError
from kvpolicy.geometry.hf_config import is_folder, read_json
from kvpolicy.models.checkpoint import read_weights
from kvpolicy.models.glm_weights import dtype_of
from kvpolicy.speculative.drafters.blockwise import Blockwise
from kvpolicy.speculative.drafters.body import DraftTarget
from kvpolicy.speculative.drafters.config import DrafterConfig, default_taps
from kvpolicy.speculative.drafters.dflash import DFlash
from kvpolicy.speculative.drafters.dflash2 import DFlash2
from kvpolicy.speculative.drafters.dspark import DSpark

log = logging.getLogger(__name__)

KINDS: dict[str, type[Blockwise]] = {k.method: k for k in (DFlash, DFlash2, DSpark)}

# Target model and method -> folder of kvpolicy.models.
EMBEDDED = {("tiny-dsa", method): f"tiny_dsa_{method}" for method in KINDS}


def for_model(method: str, model: Any, folder: str | None = None) -> Blockwise:
    """The drafter of a loaded model. folder: its checkpoint, None for the one that ships with the model.

    A model of dummy weights gets a drafter of dummy weights. UserError where there is none.
    """
    if not isinstance(getattr(model, "embedding", None), Tensor):
        raise UserError(f"drafter {method!r}: this model has no embedding and head to share")
    if folder is not None:
        return load(Path(folder), model, method)
    if getattr(model, "dummy", False):
        log.info("drafter %r: random weights, as the model's", method)
        return with_random_weights(sized_for(method, model), model)
    name = model.geometry.name
    embedded = embedded_folder(name, method)
    if embedded is None:
        known = ", ".join(sorted({model for model, _ in EMBEDDED}))
        raise UserError(
            f"drafter {method!r}: none ships for model {name!r} (but for {known}); give a checkpoint "
            f"folder as {method}:FOLDER"
        )
    return load(embedded, model, method)


def sized_for(method: str, model: Any) -> DrafterConfig:
    """The shape that public drafters of large models have: five layers, K = 7, heads of 64, four queries a
    key head, an MLP of twice the hidden size."""
    vocab, hidden = model.embedding.shape
    layers = model.geometry.num_layers
    heads = max(4, hidden // 384 * 4)
    shift = method == "dspark"
    return DrafterConfig(
        method=method,
        hidden=hidden,
        vocab=vocab,
        layers=5,
        heads=heads,
        kv_heads=heads // 4,
        head_dim=64,
        mlp=2 * hidden,
        taps=default_taps(layers, 5) if layers > 4 else tuple(range(layers)),
        block=7 if shift else 8,
        window=512,
        max_positions=model.geometry.max_context,
        mask_token=vocab - 1,
        shift=shift,
        rank=0 if method == "dflash" else 256,
        confidence=shift,
    )


def embedded_folder(model: str, method: str) -> Path | None:
    """The folder of the drafter that ships for a model, None if there is none."""
    folder = EMBEDDED.get((model, method))
    return None if folder is None else Path(str(files("kvpolicy.models").joinpath(folder)))


def load(folder: Path, target: DraftTarget, method: str | None = None) -> Blockwise:
    """The drafter of a checkpoint folder, for a target on whose device it will be.

    method: what it must be, None for anything. UserError, in one line, if it cannot be read, is of
    another method, or does not fit the target.
    """
    if not is_folder(folder):
        raise UserError(f"drafter checkpoint {str(folder)!r} is no folder")
    config = DrafterConfig.from_json(read_json(folder / "config.json"))
    if method is not None and config.method != method:
        raise UserError(
            f"drafter checkpoint {str(folder)!r} is of method {config.method}, asked for {method}"
        )
    _check_target(config, target)
    kind = KINDS[config.method]
    weights = read_weights(folder, kind.shapes(config), target.embedding.device, target.ops.dtype)
    return kind(config, weights, target)


def with_random_weights(config: DrafterConfig, target: DraftTarget, seed: int = 0) -> Blockwise:
    """A drafter that was never trained, for measurements of time and for tests."""
    config.check()
    _check_target(config, target)
    kind = KINDS[config.method]
    random = random_weights(kind.shapes(config), seed)
    device, dtype = target.embedding.device, target.ops.dtype
    weights = {name: x.to(device, dtype_of(tuple(x.shape), dtype)) for name, x in random.items()}
    return kind(config, weights, target)


def random_weights(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """float32 on the CPU: norms near 1, matrices with the variance of their inner width."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in name:
            weights[name] = 1.0 + 0.1 * noise
        else:
            weights[name] = noise * shape[-1] ** -0.5
    return weights


def _check_target(config: DrafterConfig, target: DraftTarget) -> None:
    vocab, hidden = target.embedding.shape
    for field, own, theirs in (
        ("vocab_size", config.vocab, vocab),
        ("hidden_size", config.hidden, hidden),
    ):
        if own != theirs:
            raise UserError(f"drafter config field {field} is {own}, its target has {theirs}")
    layers = getattr(getattr(target, "geometry", None), "num_layers", None)
    if layers is not None and config.taps[-1] >= layers:
        raise UserError(
            f"drafter config field target_layer_ids has {config.taps[-1]}, its target has layers 0 to "
            f"{layers - 1}"
        )
