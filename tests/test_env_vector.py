"""The fast fidelity, alone and many at once: the same numbers, both checkers, learners' interfaces."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from stable_baselines3 import PPO
from stable_baselines3.common.env_checker import check_env as sb3_check_env
from stable_baselines3.common.vec_env import VecMonitor

import kvpolicy.env
from kvpolicy.env.sb3 import ResidencyVecEnv
from kvpolicy.env.vector import ResidencyVector
from kvpolicy.errors import UserError

REPLAY = kvpolicy.env.REPLAY


def alone(**extra: Any) -> gymnasium.Env[Any, Any]:
    return gymnasium.make(REPLAY, **{"scenario": "tiny-burst", "fidelity": "curves", **extra})


@pytest.mark.parametrize("action", ["global", "discrete"])
def test_both_checkers_are_content(action: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(alone(action=action).unwrapped)
        sb3_check_env(alone(action=action).unwrapped)


@pytest.mark.parametrize("scenario", ["burst", "load-step"])
def test_many_episodes_equal_each_alone(scenario: str) -> None:
    """Bit for bit, over ends of episodes, which reset in the same step."""
    count, kwargs = 3, {"scenario": scenario, "max_steps": 30}
    many = gymnasium.make_vec(REPLAY, count, vectorization_mode="vector_entry_point", **kwargs)
    assert many.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    singles = [alone(**kwargs) for _ in range(count)]
    observations, _ = many.reset(seed=5)
    for i, env in enumerate(singles):
        assert np.array_equal(observations[i], env.reset(seed=5 + i)[0])
    random = np.random.default_rng(0)
    for _ in range(70):
        actions = random.uniform(-1, 1, (count, 3)).astype(np.float32)
        observations, rewards, terminated, truncated, infos = many.step(actions)
        assert many.observation_space.contains(observations) and not terminated.any()
        for i, env in enumerate(singles):
            obs, reward, _, done, info = env.step(actions[i])
            assert (reward, done) == (rewards[i], truncated[i])
            assert infos["good_tokens"][i] == info["terms"]["good_tokens"]
            if done:
                assert np.array_equal(infos["final_obs"][i], obs) and infos["_final_obs"][i]
                assert infos["final_info"]["ended"][i] == info["ended"] == "max_steps"
                obs, _ = env.reset()
            assert np.array_equal(observations[i], obs)


def test_a_learner_of_stable_baselines3_takes_them() -> None:
    vec = VecMonitor(ResidencyVecEnv(ResidencyVector(4, scenario="tiny-burst", max_steps=16)))
    vec.seed(3)
    model = PPO("MlpPolicy", vec, n_steps=16, batch_size=32, n_epochs=1, device="cpu", seed=0)
    model.learn(128)
    assert len(model.ep_info_buffer) >= 4 and model.ep_info_buffer[0]["l"] == 16


def test_what_curves_cannot_tell_is_refused() -> None:
    for wrong in ({"action": "per_request"}, {"groups": ["load", "requests"]}):
        with pytest.raises(UserError, match="curves"):
            alone(**wrong)
    with pytest.raises(UserError, match="fidelity = 'exact'"):
        ResidencyVector(2, fidelity="exact")


def test_close_to_the_exact_twin() -> None:
    """Tokens, bytes and time of an episode under the same actions; docs/environments.md has the table."""
    found = []
    for fidelity in ("exact", "curves"):
        env = gymnasium.make(REPLAY, scenario="burst", fidelity=fidelity, split="validation")
        env.reset(seed=1)
        total = {"tokens": 0.0, "link_bytes": 0.0, "seconds": 0.0}
        done = False
        while not done:
            *_, done, info = env.step(np.array([0.4, -0.9, -1.0], dtype=np.float32))
            for name in total:
                total[name] += info["terms"][name]
        found.append(total)
    exact, curves = found
    assert curves["tokens"] == pytest.approx(exact["tokens"], rel=0.05)
    assert curves["link_bytes"] == pytest.approx(exact["link_bytes"], rel=0.3)
