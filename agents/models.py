"""Saved models: weights as stable-baselines3 writes them, with what they mean and their normalisation beside.

``NAME.zip`` is SB3's own file, ``NAME.json`` says what it is, ``NAME.npz`` holds the normalisation.
Reading them executes nothing: of the zip only tensors are read, never its pickled members.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.save_util import load_from_zip_file, recursive_setattr
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from kvpolicy.agents.settings import Settings, settings_of
from kvpolicy.errors import UserError, reason

__all__ = ["Saved", "read_model", "restore", "save_model"]


@dataclass(frozen=True)
class Saved:
    """What a model file holds. about: its JSON. parameters: state dicts by name; variables: tensors besides.
    statistics: of normalisation, or nothing."""

    path: Path
    settings: Settings
    about: dict[str, Any]
    parameters: dict[str, Any]
    variables: dict[str, Any]
    statistics: dict[str, Any]


def save_model(model: Any, path: Path, about: dict[str, Any]) -> None:
    """Write the three files. path: of the zip."""
    path.parent.mkdir(parents=True, exist_ok=True)
    model.save(path)
    path.with_suffix(".json").write_text(
        json.dumps({**about, "steps": int(model.num_timesteps)}, indent=2) + "\n"
    )
    env = model.get_vec_normalize_env()
    if env is not None:
        np.savez(
            path.with_suffix(".npz"),
            mean=env.obs_rms.mean,
            variance=env.obs_rms.var,
            count=env.obs_rms.count,
            returns=np.array([env.ret_rms.mean, env.ret_rms.var, env.ret_rms.count]),
            epsilon=env.epsilon,
            clip=env.clip_obs,
        )


def read_model(path: Path) -> Saved:
    """A model and what lies beside it. UserError for anything that is not readable."""
    try:
        about = json.loads(path.with_suffix(".json").read_text())
        values = dict(about["settings"])
        settings = settings_of(values, values.pop("algo"), values.pop("env"))
        _, parameters, variables = load_from_zip_file(path, load_data=False, device="cpu")
        statistics: dict[str, Any] = {}
        if settings.normalize:
            with np.load(path.with_suffix(".npz"), allow_pickle=False) as file:
                statistics = {name: file[name] for name in file.files}
    except OSError as error:
        raise UserError(
            f"model {str(path)!r}: {error.strerror or error} ({error.filename})"
        ) from None
    except UserError as error:
        raise UserError(f"model {str(path)!r}: {error}") from None
    except Exception as error:  # a damaged zip fails in many ways
        raise UserError(f"model {str(path)!r}: {reason(error)}") from None
    return Saved(path, settings, about, dict(parameters), dict(variables or {}), statistics)


def restore(model: Any, env: VecEnv, saved: Saved) -> None:
    """Put a saved state into a fresh model and its environment: weights, optimisers, normalisation, steps."""
    model.set_parameters(saved.parameters, exact_match=True, device="cpu")
    for name, value in saved.variables.items():
        recursive_setattr(model, f"{name}.data", value.data)
    model.num_timesteps = int(saved.about["steps"])
    if isinstance(env, VecNormalize):
        found = saved.statistics
        seen: Any = env.obs_rms  # a mapping where observations are one
        seen.mean, seen.var = found["mean"].copy(), found["variance"].copy()
        seen.count = float(found["count"])
        returns: Any = env.ret_rms
        returns.mean, returns.var, returns.count = map(np.float64, found["returns"])
