"""Many episodes of the fast twin as one Gymnasium VectorEnv."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from kvpolicy.env.replay import ResidencyReplay
from kvpolicy.env.spaces import check_arguments
from kvpolicy.episodes.fluid import FluidEpisodes
from kvpolicy.episodes.fluid_shares import knobs_of
from kvpolicy.episodes.twin import make_fluid
from kvpolicy.errors import UserError
from kvpolicy.telemetry.reward import Terms
from kvpolicy.workloads.workload import Workload

__all__ = ["ResidencyVector"]

Floats = NDArray[np.float64]
Arrays = dict[str, Any]


class ResidencyVector(VectorEnv[Any, Any, Any]):
    """``num_envs`` episodes of ``kvpolicy/ResidencyReplay-v0`` with ``fidelity="curves"``, stepped together.

    Arguments as of the environment. Autoreset in the same step: where an episode ends the observation is
    the first of the next one, and ``infos["final_obs"]`` and ``infos["final_info"]`` tell of the last one.
    Seeded with s, episode i is that of a single environment seeded with s + i.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(
        self,
        num_envs: int = 1,
        scenario: str = "burst",
        split: str = "train",
        action: str = "global",
        groups: Sequence[str] | None = None,
        reward: str = "goodput",
        max_steps: int = 0,
        engine: Mapping[str, Any] | None = None,
        fidelity: str = "curves",
        recording: str | None = None,
        cost: str | None = None,
        requests: int = 0,
        render_mode: str | None = None,
    ) -> None:
        if fidelity != "curves":
            raise UserError(
                f"fidelity = {fidelity!r}: episodes are stepped together with 'curves' only"
            )
        if render_mode is not None:
            raise UserError(f"render_mode = {render_mode!r}: many episodes are not drawn")
        check_arguments(scenario, requests, max_steps, engine, least=0)
        self.num_envs = num_envs
        # One of them, for all that they have in common.
        self.single = ResidencyReplay(
            scenario, split, action, groups, reward, max(requests, 1), max_steps, engine, fidelity,
            recording, cost,
        )  # fmt: skip
        self._where = (recording, cost)
        self.single_observation_space = self.single.observation_space
        self.single_action_space = self.single.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._fluid: FluidEpisodes | None = None
        self._random: list[np.random.Generator] = []
        self._taken = np.zeros(num_envs, dtype=np.int64)
        self._goals = np.zeros((3, num_envs))

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], Arrays]:
        """New loads for all. seed: of the first, or one for each."""
        seeds = (
            [None if seed is None else seed + i for i in range(self.num_envs)]
            if not isinstance(seed, list)
            else seed
        )
        if not self._random or any(each is not None for each in seeds):
            self._random = [seeding.np_random(each)[0] for each in seeds]
        if self._fluid is None:
            self._fluid = make_fluid(
                self.single.scenario, self.num_envs, self._draw, *self._where, **self.single.changes
            )
        else:
            self._fluid.begin(np.arange(self.num_envs))
        self._taken[:] = 0
        return self._fluid.observe(self.single.encoder.groups), {}

    def _draw(self, number: int) -> Workload:
        load = self.single.scenario.load(self.single.split, self._random[number])
        own = self.single.scenario.baseline(load)
        self._goals[:, number] = own.tokens_per_s, own.seconds, own.bytes_per_token
        return load

    def step(
        self, actions: Any
    ) -> tuple[NDArray[np.float32], Floats, NDArray[np.bool_], NDArray[np.bool_], Arrays]:
        """One interval of every episode; those that end begin anew."""
        fluid = self._fluid
        if fluid is None:
            raise UserError("step() before reset()")
        retained, reserve = knobs_of(self.single.actions.name, np.asarray(actions))
        found = fluid.step(retained, reserve)
        self._taken += 1
        rewards = self._rewards(found)
        over = fluid.over
        late = (
            (self._taken >= self.single.max_steps) if self.single.max_steps else np.zeros_like(over)
        )
        done = over | late
        observations = fluid.observe(self.single.encoder.groups)
        every = np.ones(self.num_envs, dtype=bool)
        infos: Arrays = {**found, **{f"_{name}": every for name in found}}
        which = np.flatnonzero(done)
        if which.size:
            infos |= self._final(which, observations, found, over)
            fluid.begin(which)
            self._taken[which] = 0
            observations = observations.copy()
            observations[which] = fluid.observe(self.single.encoder.groups)[which]
        return observations, rewards, np.zeros(self.num_envs, dtype=bool), done, infos

    def _rewards(self, found: Mapping[str, Floats]) -> Floats:
        """The single environment's reward, on arrays: its formulas know no other operations."""
        rate, seconds, per_token = self._goals
        terms = Terms(**found)  # type: ignore[arg-type]
        many: Any = _Many(rate, seconds, per_token)
        rewards: Floats = np.asarray(self.single._reward(terms, many), dtype=np.float64)
        return rewards

    def _final(
        self, which: NDArray[np.int64], observations: Any, found: Mapping[str, Floats], over: Any
    ) -> Arrays:
        mask = np.zeros(self.num_envs, dtype=bool)
        mask[which] = True
        last = np.full(self.num_envs, None, dtype=object)
        ended = np.full(self.num_envs, "", dtype=object)
        for i in which.tolist():
            last[i] = observations[i].copy()
            ended[i] = "the load is over" if over[i] else "max_steps"
        info = {name: np.where(mask, value, 0.0) for name, value in found.items()}
        info |= {f"_{name}": mask for name in found} | {"ended": ended, "_ended": mask}
        return {"final_obs": last, "_final_obs": mask, "final_info": info, "_final_info": mask}

    def close_extras(self, **kwargs: Any) -> None:
        """Nothing to free."""


class _Many:
    """Baselines of many episodes, as arrays under the names of Baseline."""

    def __init__(self, rate: Floats, seconds: Floats, bytes_per_token: Floats) -> None:
        self.tokens_per_s, self.seconds, self.bytes_per_token = rate, seconds, bytes_per_token
        self.tokens = np.maximum(rate * seconds, 1e-9)
