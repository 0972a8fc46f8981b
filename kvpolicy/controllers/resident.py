"""Resident: the baseline without any hierarchy."""

from __future__ import annotations

from kvpolicy.control.observation import Observation, StoreView
from kvpolicy.control.plan import FULL, Plan, Target


class Resident:
    """Full KV on the GPU; a request waits until all of it fits."""

    def initial(self, stores: tuple[StoreView, ...]) -> Target:
        """Everything: admission is limited by memory."""
        return FULL

    def decide(self, observation: Observation) -> Plan:
        return Plan.full()
