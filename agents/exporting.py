"""From a saved model to an artifact that the controller ``learned`` reads."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from kvpolicy.agents.models import Saved, read_model
from kvpolicy.errors import UserError
from kvpolicy.learned.artifact import FORMAT, Artifact, Spec, write_artifact

__all__ = ["export"]

# Algorithm -> where in its policy the hidden layers and the last one are, and what follows them.
_PARTS = {
    "ppo": ("mlp_extractor.policy_net.", "action_net."),
    "a2c": ("mlp_extractor.policy_net.", "action_net."),
    "sac": ("actor.latent_pi.", "actor.mu."),
    "dqn": ("q_net.q_net.", None),
}


def export(path: Path, name: str) -> tuple[bytes, Artifact]:
    """The artifact of a model file, as bytes. name: of the policy. UserError for what cannot be exported."""
    saved = read_model(path)
    settings, about = saved.settings, saved.about
    layers = _layers(saved)
    arrays: dict[str, Any] = {}
    for number, (weight, bias) in enumerate(layers):
        arrays[f"weight{number}"], arrays[f"bias{number}"] = weight, bias
    clip = None
    if settings.normalize:
        found = saved.statistics
        clip = float(found["clip"])
        arrays["mean"] = found["mean"].astype(np.float64)
        arrays["scale"] = np.sqrt(found["variance"].astype(np.float64) + float(found["epsilon"]))
    levels = not _is_box(about["action"]["name"])
    values = {
        "format": FORMAT,
        "name": name,
        "algorithm": settings.algo,
        "env": {"id": settings.env, **settings.env_kwargs},
        "observation": about["observation"],
        "action": about["action"],
        "layers": len(layers),
        "activation": settings.policy_kwargs.get("activation_fn", "tanh"),
        "head": "argmax" if levels else "tanh" if settings.algo == "sac" else "clip",
        "clip": clip,
        "training": {
            **{key: about[key] for key in ("seed", "steps", "commit", "versions", "settings")},
            "validation_reward": about.get("reward"),
            "model_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        },
    }
    try:
        spec = Spec.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(
            f"model {str(path)!r}: {where} = {first['input']!r}: {first['msg']}"
        ) from None
    return write_artifact(spec, arrays)


def _is_box(action: str) -> bool:
    from kvpolicy.control.actions import make_actions

    return make_actions(action, 1, 1).kind == "box"


def _layers(saved: Saved) -> list[tuple[Any, Any]]:
    hidden, last = _PARTS[saved.settings.algo]
    state = saved.parameters["policy"]
    pattern = re.compile(re.escape(hidden) + r"(\d+)\.weight")
    numbers = sorted(int(found[1]) for key in state if (found := pattern.fullmatch(key)))
    prefixes = [f"{hidden}{number}." for number in numbers] + ([last] if last else [])
    try:
        return [
            (state[f"{prefix}weight"].numpy().copy(), state[f"{prefix}bias"].numpy().copy())
            for prefix in prefixes
        ]
    except KeyError as error:
        raise UserError(f"model {str(saved.path)!r}: it has no {error}") from None
