"""The deterministic twin as an environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvpolicy.env.residency import PLACES, ResidencyEnv
from kvpolicy.episodes.twin import TwinEpisode, make_twin
from kvpolicy.errors import unknown_name
from kvpolicy.workloads.workload import Workload

__all__ = ["FIDELITIES", "ResidencyReplay"]

FIDELITIES = ("exact",)


class ResidencyReplay(ResidencyEnv):
    """## Description
    Residency decisions on the deterministic twin: recorded selections, the runtime's own admission, growth,
    preemption and projection, and time from a cost model that was fitted to live runs.
    """

    def __init__(
        self,
        scenario: str = "burst",
        split: str = "train",
        action: str = "global",
        groups: Sequence[str] | None = None,
        reward: str = "goodput",
        requests: int = PLACES,
        max_steps: int = 0,
        engine: Mapping[str, Any] | None = None,
        fidelity: str = "exact",
        recording: str | None = None,
        cost: str | None = None,
        render_mode: str | None = None,
    ) -> None:
        if fidelity not in FIDELITIES:
            raise unknown_name("fidelity", fidelity, FIDELITIES)
        self.fidelity, self._recording, self._cost = fidelity, recording, cost
        super().__init__(
            scenario, split, action, groups, reward, requests, max_steps, engine, render_mode
        )

    def _start(self, load: Workload, seed: int) -> TwinEpisode:
        engine = make_twin(self.scenario, self.agent, self._recording, self._cost, **self.changes)
        return TwinEpisode(engine, self.scenario, load)
