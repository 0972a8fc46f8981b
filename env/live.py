"""The engine itself as an environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvpolicy.env.residency import PLACES, ResidencyEnv
from kvpolicy.episodes.live import PATIENCE, LiveEngine, LiveEpisode
from kvpolicy.workloads.workload import Workload

__all__ = ["ResidencyLive"]


class ResidencyLive(ResidencyEnv):
    """## Description
    Residency decisions on live decode steps: the engine serves a seeded load on this machine, and waits for
    the agent whenever a decision is due. Time is the wall clock's, so two episodes of one seed differ.
    """

    def __init__(
        self,
        scenario: str = "tiny",
        split: str = "train",
        action: str = "global",
        groups: Sequence[str] | None = None,
        reward: str = "goodput",
        requests: int = PLACES,
        max_steps: int = 0,
        engine: Mapping[str, Any] | None = None,
        patience: float = PATIENCE,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(
            scenario, split, action, groups, reward, requests, max_steps, engine, render_mode
        )
        self._patience = patience
        self._holder = LiveEngine(self.scenario, self.agent, **self.changes)

    def _start(self, load: Workload) -> LiveEpisode:
        return LiveEpisode(self._holder, self.scenario, load, self._patience)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._holder.close()
