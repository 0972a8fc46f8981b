"""Gymnasium spaces of encoders and action spaces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from kvpolicy.control.actions import Actions
from kvpolicy.control.encoder import Encoder
from kvpolicy.errors import UserError

__all__ = ["action_space", "check_arguments", "observation_space"]


def check_arguments(
    scenario: object, requests: object, max_steps: object, engine: object, least: int = 1
) -> None:
    """UserError for an argument of an environment that is of the wrong kind. least: of ``requests``."""
    if not isinstance(scenario, str):
        raise UserError(f"scenario = {scenario!r}: must be a scenario's name")
    for name, value, low in (("requests", requests, least), ("max_steps", max_steps, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise UserError(f"{name} = {value!r}: must be a whole number from {low}")
    if engine is not None and not isinstance(engine, Mapping):
        raise UserError(f"engine = {engine!r}: must be a mapping of an engine's settings")


def observation_space(encoder: Encoder) -> spaces.Box:
    """float32 [size] from 0 to 1."""
    return spaces.Box(0.0, 1.0, (encoder.size,), np.float32)


def action_space(actions: Actions) -> spaces.Space[Any]:
    """Box of [-1, 1], Discrete or MultiDiscrete."""
    if actions.kind == "box":
        return spaces.Box(-1.0, 1.0, (len(actions.knobs),), np.float32)
    if actions.kind == "discrete":
        return spaces.Discrete(actions.knobs[0].levels)
    return spaces.MultiDiscrete([knob.levels for knob in actions.knobs])
