"""Learned: a trained policy's artifact decides."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from kvpolicy.control.observation import Observation, StoreView
from kvpolicy.control.plan import Plan, Target
from kvpolicy.errors import UserError
from kvpolicy.learned.artifact import read_artifact
from kvpolicy.learned.network import Network

__all__ = ["SHIPPED", "Learned"]

SHIPPED = "global.npz"
"""The artifact that comes with kvpolicy, in the folder ``data`` here."""


class Learned:
    """A trained policy's artifact decides; see 'kvpolicy train' and 'kvpolicy export'.

    path: an artifact file; None means the one that comes with kvpolicy.
    """

    def __init__(self, path: str | None = None) -> None:
        if path is not None and not isinstance(path, str):
            raise UserError(f"path = {path!r}: must be the name of a file")
        self.path = shipped() if path is None else Path(path)
        self.artifact = read_artifact(self.path)
        self._policy = Network(self.artifact)
        self._encoder, self._actions = self.artifact.encoder, self.artifact.actions
        self.wants_curves = self._actions.wants_curves or self._encoder.wants_curves

    def initial(self, stores: tuple[StoreView, ...]) -> Target:
        """Nothing, as in training. UserError for a model with another number of stores than the policy's."""
        spec = self.artifact.spec
        for what, count in (("observes", spec.observation.stores), ("sets", spec.action.stores)):
            if count and count != len(stores):
                raise UserError(
                    f"policy artifact {str(self.path)!r} {what} {count} stores: this model has {len(stores)}"
                )
        return 0

    def decide(self, observation: Observation) -> Plan:
        return self._actions.decode(self._policy(self._encoder.encode(observation)), observation)


def shipped() -> Path:
    """Where the shipped artifact lies."""
    return Path(str(files("kvpolicy.learned").joinpath("data", SHIPPED)))
