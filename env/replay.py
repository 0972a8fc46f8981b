"""The deterministic twin as an environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from kvpolicy.control.encoder import Vector
from kvpolicy.env.residency import PLACES, ResidencyEnv
from kvpolicy.episodes.fluid import FluidEpisodes
from kvpolicy.episodes.fluid_shares import ACTIONS as FLUID_ACTIONS
from kvpolicy.episodes.fluid_shares import knobs_of
from kvpolicy.episodes.twin import TwinEpisode, make_fluid, make_twin
from kvpolicy.errors import UserError, unknown_name
from kvpolicy.telemetry.reward import Terms
from kvpolicy.workloads.workload import Workload

__all__ = ["FIDELITIES", "ResidencyReplay", "check_fluid"]

FIDELITIES = ("exact", "curves")


def check_fluid(env: ResidencyEnv) -> None:
    """UserError for what miss curves cannot tell."""
    if env.actions.name not in FLUID_ACTIONS:
        raise UserError(
            f"action = {env.actions.name!r}: with fidelity='curves' there are {', '.join(FLUID_ACTIONS)}"
        )
    few = {"stores", "requests"} & set(env.encoder.groups)
    if few:
        raise UserError(f"groups: {', '.join(sorted(few))} are not known with fidelity='curves'")


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
        self._fluid: FluidEpisodes | None = None
        if fidelity == "curves":
            check_fluid(self)

    def _start(self, load: Workload) -> TwinEpisode:
        engine = make_twin(self.scenario, self.agent, self._recording, self._cost, **self.changes)
        return TwinEpisode(engine, self.scenario, load)

    # --- curves ----------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Vector, dict[str, Any]]:
        """A new load, drawn from the split."""
        if self.fidelity == "exact":
            return super().reset(seed=seed, options=options)
        gymnasium.Env.reset(self, seed=seed)
        if self._fluid is None:
            self._fluid = make_fluid(
                self.scenario, 1, self._draw, self._recording, self._cost, **self.changes
            )
        else:
            self._fluid.begin(np.zeros(1, dtype=np.int64))
        self.baseline, self._taken = self.scenario.baseline(self._drawn), 0
        info = self._about(self._drawn)
        return self._fluid.observe(self.encoder.groups)[0], info

    def _draw(self, number: int) -> Workload:
        self._drawn = self.scenario.load(self.split, self.np_random)
        return self._drawn

    def step(self, action: Any) -> tuple[Vector, float, bool, bool, dict[str, Any]]:
        """Decide, and serve until the next decision is due."""
        if self.fidelity == "exact":
            return super().step(action)
        fluid = self._fluid
        if fluid is None or fluid.over[0]:
            raise gymnasium.error.ResetNeeded("step() without an episode: call reset()")
        retained, reserve = knobs_of(self.actions.name, np.asarray(action)[None])
        found = fluid.step(retained, reserve)
        self._taken += 1
        terms = Terms(**{name: float(value[0]) for name, value in found.items()})  # type: ignore[arg-type]
        over = bool(fluid.over[0])
        late = bool(self.max_steps) and self._taken >= self.max_steps
        info = {
            "steps": fluid.interval,
            "seconds": terms.seconds,
            "terms": terms.to_dict(),
            "plan": {"retained": float(retained[0]), "reserve": float(reserve[0])},
            "ended": "the load is over" if over else "max_steps" if late else "",
        }
        observation = fluid.observe(self.encoder.groups)[0]
        return observation, float(self._reward(terms, self.baseline)), False, over or late, info

    def render(self) -> Any:
        """As the exact twin; with fidelity ``curves`` one line, or a bar of memory."""
        if self.fidelity == "exact" or self._fluid is None or self.render_mode is None:
            return super().render()
        return self._fluid.picture() if self.render_mode == "rgb_array" else self._fluid.line()
