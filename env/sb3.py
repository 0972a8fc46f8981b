"""The batch-native twin as a stable-baselines3 VecEnv (which takes no Gymnasium VectorEnv)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from kvpolicy.env.vector import ResidencyVector
from kvpolicy.errors import UserError

__all__ = ["ResidencyVecEnv"]


class ResidencyVecEnv(VecEnv):
    """Steps a :class:`~kvpolicy.env.vector.ResidencyVector`; wrap it in ``VecMonitor`` for episode returns.

    Infos have the ``seconds`` that a step took. Ended episodes are truncated ones (``TimeLimit.truncated``),
    with their ``terminal_observation``.
    """

    def __init__(self, vector: ResidencyVector) -> None:
        self.vector = vector
        self._actions: Any = None
        super().__init__(
            vector.num_envs, vector.single_observation_space, vector.single_action_space
        )

    def reset(self) -> VecEnvObs:
        """All episodes anew, with the seeds of :meth:`seed`."""
        seeds = self._seeds
        given = list(seeds) if any(each is not None for each in seeds) else None
        observations, _ = self.vector.reset(seed=given)
        self._reset_seeds()
        self._reset_options()
        return observations

    def step_async(self, actions: np.ndarray[Any, Any]) -> None:
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        observations, rewards, _, done, found = self.vector.step(self._actions)
        infos: list[dict[str, Any]] = [{"seconds": s} for s in found["seconds"].tolist()]
        for i in np.flatnonzero(done).tolist():
            infos[i] |= {
                "terminal_observation": found["final_obs"][i],
                "TimeLimit.truncated": True,
                "ended": found["final_info"]["ended"][i],
            }
        return observations, rewards.astype(np.float32), done, infos

    def close(self) -> None:
        self.vector.close()

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        return [getattr(self.vector.single, attr_name)] * len(self._numbers(indices))

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        raise UserError(
            f"{attr_name}: episodes that are stepped together have no attributes of their own"
        )

    def env_method(
        self, method_name: str, *args: Any, indices: VecEnvIndices = None, **kwargs: Any
    ) -> list[Any]:
        raise UserError(
            f"{method_name}: episodes that are stepped together have no methods of their own"
        )

    def env_is_wrapped(self, wrapper_class: Any, indices: VecEnvIndices = None) -> list[bool]:
        return [False] * len(self._numbers(indices))

    def _numbers(self, indices: VecEnvIndices) -> Sequence[int]:
        return list(self._get_indices(indices))
