"""The forward pass of a policy network in numpy: 3 to 10 us for two hidden layers of 64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpolicy.control.encoder import Vector
from kvpolicy.learned.artifact import Artifact

__all__ = ["Network"]

Floats = NDArray[np.float32]


class Network:
    """The deterministic action of an artifact's policy for one observation, as the trained model gives it.

    Call it with float32 [size]. Returns float32 [n] for a box; an integer, or int64 [n], for levels.
    """

    def __init__(self, artifact: Artifact) -> None:
        spec, arrays = artifact.spec, artifact.arrays
        last = spec.layers - 1
        self._hidden = [_layer(arrays, i) for i in range(last)]
        self._last = _layer(arrays, last)
        self._activate = np.tanh if spec.activation == "tanh" else _relu
        self._head = spec.head
        self._clip = spec.clip
        if spec.clip is not None:
            self._mean, self._scale = arrays["mean"], arrays["scale"]
        self._levels = [knob.levels for knob in artifact.actions.knobs]
        self._single = artifact.actions.kind == "discrete"

    def __call__(self, observation: Vector) -> Any:
        found = self.outputs(observation)
        if self._head == "clip":
            return np.minimum(np.maximum(found, -1.0), 1.0)
        if self._head == "tanh":
            return np.tanh(found)
        if self._single:
            return int(found.argmax())
        parts = np.split(found, np.cumsum(self._levels)[:-1])
        return np.array([int(part.argmax()) for part in parts], dtype=np.int64)

    def outputs(self, observation: Vector) -> Floats:
        """The last layer's numbers, float32."""
        x: Any = observation
        if self._clip is not None:
            x = (x - self._mean) / self._scale
            x = np.minimum(np.maximum(x, -self._clip), self._clip).astype(np.float32)
        for weight, bias in self._hidden:
            x = self._activate(x @ weight + bias)
        weight, bias = self._last
        found: Floats = x @ weight + bias
        return found


def _layer(arrays: dict[str, NDArray[Any]], number: int) -> tuple[Floats, Floats]:
    # Transposed once: x @ W^T with W^T contiguous.
    return np.ascontiguousarray(arrays[f"weight{number}"].T), arrays[f"bias{number}"]


def _relu(x: Floats) -> Floats:
    found: Floats = np.maximum(x, np.float32(0))
    return found
