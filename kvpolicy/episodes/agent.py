"""A controller whose plans come from outside: an agent's actions, or a policy function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpolicy.control.actions import Actions
from kvpolicy.control.encoder import Encoder, Vector
from kvpolicy.control.observation import Observation
from kvpolicy.control.plan import Plan

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
    """Gives the plan that was made for the decision that is due. wants_curves: whether measured miss curves
    are to be in observations."""

    def __init__(self, wants_curves: bool) -> None:
        self.wants_curves = wants_curves
        self.plan = Plan()

    def decide(self, observation: Observation) -> Plan:
        return self.plan
