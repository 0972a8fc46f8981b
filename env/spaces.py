"""Gymnasium spaces of encoders and action spaces."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from kvpolicy.control.actions import Actions
from kvpolicy.control.encoder import Encoder

__all__ = ["action_space", "observation_space"]


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
