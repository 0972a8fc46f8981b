"""A controller whose plans come from outside: an agent's actions, or a policy function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpolicy.control.actions import Actions
from kvpolicy.control.encoder import Encoder, Vector
from kvpolicy.control.observation import Observation
from kvpolicy.control.plan import Plan
from kvpolicy.errors import UserError

__all__ = ["Agent", "PolicyController"]

Policy = Callable[[Vector], Any]
"""From an encoded observation to an action."""


class PolicyController:
    """Encodes, asks the policy, decodes: what an environment does, inside the engine."""

    def __init__(self, policy: Policy, encoder: Encoder, actions: Actions) -> None:
        self.policy, self.encoder, self.actions = policy, encoder, actions
        self.wants_curves = actions.wants_curves or encoder.wants_curves

    def decide(self, observation: Observation) -> Plan:
        return self.actions.decode(self.policy(self.encoder.encode(observation)), observation)


class Agent:
    """Holds the action that has been chosen for the decision that is due. curves: whether measured miss curves
    are wanted."""

    def __init__(self, actions: Actions, curves: bool) -> None:
        self.actions, self.wants_curves = actions, curves
        self.action: Any = None

    def decide(self, observation: Observation) -> Plan:
        if self.action is None:
            raise UserError("no action has been given")
        return self.actions.decode(self.action, observation)
