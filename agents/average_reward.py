"""Rewards less what time is worth: the semi-Markov average-reward form of a training problem.

A decision takes as long as the engine takes for its steps, and an episode has a fixed length in seconds: a
fast policy makes more decisions, each with about the same reward. A learner that discounts by decisions, and
is told that episodes are cut off rather than over, sees nothing of that. So each reward is lowered by
(reward per second so far) x (seconds it took). Over a whole episode that takes away the same amount
whatever the policy does, so which policy is best does not change; but a slow decision now costs at once.
(R-learning, Schwartz 1993; SMART, Das et al. 1999.)
"""

from __future__ import annotations

import numpy as np
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

__all__ = ["AverageReward"]

# Steps of all episodes together that the rate remembers: an episode or two.
MEMORY = 1000


class AverageReward(VecEnvWrapper):
    """``info["seconds"]`` of each step must say how long it took. rate: reward per second so far."""

    def __init__(self, venv: VecEnv) -> None:
        super().__init__(venv)
        self._reward = self._seconds = 0.0

    @property
    def rate(self) -> float:
        """Reward per second, of the last steps."""
        return self._reward / self._seconds if self._seconds > 0 else 0.0

    def reset(self) -> VecEnvObs:
        return self.venv.reset()

    def step_wait(self) -> VecEnvStepReturn:
        observations, rewards, dones, infos = self.venv.step_wait()
        seconds = np.array([info["seconds"] for info in infos])
        keep = 1 - 1 / MEMORY
        self._reward = keep * self._reward + float(rewards.mean())
        self._seconds = keep * self._seconds + float(seconds.mean())
        lowered = rewards - self.rate * seconds
        return observations, lowered.astype(np.float32), dones, infos
