"""Vectorised environments of a training."""

from __future__ import annotations

from typing import Any

import gymnasium
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecMonitor

import kvpolicy.env
from kvpolicy.agents.settings import Settings
from kvpolicy.control.actions import Actions
from kvpolicy.control.encoder import Encoder
from kvpolicy.errors import UserError, unknown_name

__all__ = ["ENVIRONMENTS", "make_vector", "spaces_of"]

ENVIRONMENTS = (kvpolicy.env.REPLAY, kvpolicy.env.LIVE)


def make_vector(settings: Settings, split: str, count: int) -> VecEnv:
    """``count`` episodes at once, with their returns monitored. The fast fidelity steps them together, in
    one process; all else plays them one after the other."""
    _check(settings.env)
    kwargs = {**settings.env_kwargs, "split": split}
    if settings.env == kvpolicy.env.REPLAY and kwargs.get("fidelity") == "curves":
        from kvpolicy.env.sb3 import ResidencyVecEnv
        from kvpolicy.env.vector import ResidencyVector

        return VecMonitor(ResidencyVecEnv(ResidencyVector(count, **kwargs)))
    if settings.env == kvpolicy.env.LIVE and count > 1:
        raise UserError(f"n_envs = {count}: {settings.env} has one engine, n_envs must be 1")

    def one() -> gymnasium.Env[Any, Any]:
        return gymnasium.make(settings.env, **kwargs)

    return VecMonitor(DummyVecEnv([one] * count))


def spaces_of(env: VecEnv) -> tuple[Encoder, Actions]:
    """What its observations and actions mean."""
    encoder: Encoder = env.get_attr("encoder", [0])[0]
    actions: Actions = env.get_attr("actions", [0])[0]
    return encoder, actions


def _check(name: str) -> None:
    if name not in ENVIRONMENTS:
        raise unknown_name("environment", name, ENVIRONMENTS)
