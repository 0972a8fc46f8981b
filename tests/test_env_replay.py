"""The replay environment: both checkers, every action space, registration, determinism across processes."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as sb3_check_env

import kvpolicy.env
from kvpolicy.control.actions import ACTIONS
from kvpolicy.episodes.twin import TwinEpisode
from kvpolicy.errors import UserError

REPLAY = kvpolicy.env.REPLAY


def make(**extra: Any) -> gymnasium.Env[Any, Any]:
    return gymnasium.make(REPLAY, scenario="tiny-burst", **extra)


@pytest.mark.parametrize("action", ACTIONS)
def test_both_checkers_are_content(action: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(make(action=action).unwrapped)
        sb3_check_env(make(action=action).unwrapped)


def test_episodes_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next reset and by close(): each lets go of its twin once."""
    closed: list[Any] = []
    monkeypatch.setattr(TwinEpisode, "close", lambda episode: closed.append(episode))
    env = make().unwrapped
    seen = []
    for seed in (0, 1):
        env.reset(seed=seed)
        seen.append(env._episode)  # type: ignore[attr-defined]
    env.close()
    env.close()
    assert closed == seen


# Prints a digest of everything that an episode gives.
DIGEST = """
import hashlib, json, sys
import gymnasium, numpy as np
env = gymnasium.make("kvpolicy.env:kvpolicy/ResidencyReplay-v0", scenario="tiny-burst", max_steps=40)
digest = hashlib.sha256()
for seed in (3, None):
    obs, info = env.reset(seed=seed)
    env.action_space.seed(7)
    done = False
    while not done:
        digest.update(obs.tobytes())
        obs, reward, terminated, truncated, info = env.step(env.action_space.sample())
        digest.update(np.float64(reward).tobytes() + repr(sorted(info.items())).encode())
        done = terminated or truncated
print(digest.hexdigest())
"""


def run_digest(**environment: str) -> str:
    import os

    done = subprocess.run(
        [sys.executable, "-P", "-c", DIGEST],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    return done.stdout.strip()


def test_equal_bytes_in_two_fresh_processes() -> None:
    """Module-prefixed id, two episodes: observations, rewards and infos, whatever the hash seed."""
    first, second = run_digest(PYTHONHASHSEED="1"), run_digest(PYTHONHASHSEED="2")
    assert first == second and len(first) == 64


def test_the_spec_round_trips() -> None:
    env = make(action="discrete", groups=["load", "memory"], engine={"device_kv_mib": 40.0})
    spec = gymnasium.envs.registration.EnvSpec.from_json(env.spec.to_json())
    again = gymnasium.make(spec)
    (a, _), (b, _) = env.reset(seed=5), again.reset(seed=5)
    assert np.array_equal(a, b) and again.unwrapped.changes == {"device_kv_mib": 40.0}
    assert again.action_space == env.action_space


def test_in_subprocesses() -> None:
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import SubprocVecEnv

    kwargs = {"scenario": "tiny-burst", "max_steps": 5}
    many = make_vec_env(
        f"kvpolicy.env:{REPLAY}", 2, 11, env_kwargs=kwargs, vec_env_cls=SubprocVecEnv
    )
    try:
        found = [many.reset()]
        for _ in range(7):
            found.append(many.step(np.zeros((2, 3), dtype=np.float32))[0])
    finally:
        many.close()
    alone = make(max_steps=5)
    obs, _ = alone.reset(seed=11)
    assert np.array_equal(found[0][0], obs)
    obs, *_ = alone.step(np.zeros(3, dtype=np.float32))
    assert np.array_equal(found[1][0], obs)


def test_what_an_action_did() -> None:
    env = make()
    env.reset(seed=1)
    _, reward, *_, info = env.step(np.array([1.0, -1.0, -1.0], dtype=np.float32))
    assert info["fallback"] == ""
    assert set(info["plan"]) == {"targets", "default", "reserve_bytes"}
    assert set(info["projected"]["budgets"]) == set(info["plan"]["targets"])
    assert reward == info["terms"]["good_tokens"] / env.unwrapped.baseline.tokens


def test_rewards_of_an_episode_are_its_goodput() -> None:
    env = make(split="test")
    env.reset(seed=2)
    total, done = 0.0, False
    while not done:
        _, reward, terminated, done, info = env.step(np.array([1.0, -1.0, 0.0], dtype=np.float32))
        assert not terminated and not info["fallback"]
        total += reward
    assert info["ended"] == "the load is over"
    episode = env.unwrapped._episode
    good = 0
    for handle in episode._runner.handles:
        moments = handle.latencies
        if env.unwrapped.scenario.bounds.holds(moments):
            good += moments.tokens
    assert total == pytest.approx(good / env.unwrapped.baseline.tokens)
    assert 0.2 < total <= 1.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"scenario": "brust"},
        {"split": "tset"},
        {"action": "globl"},
        {"reward": "gooput"},
        {"groups": ["laod"]},
        {"fidelity": "exactly"},
        {"engine": {"device_kv_mibs": 3}},
    ],
)
def test_wrong_arguments_are_one_line(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="did you mean"):
        gymnasium.make(REPLAY, **{"scenario": "tiny-burst", **wrong}).reset()


def test_masks_only_where_the_space_is_multi_discrete() -> None:
    assert not hasattr(make().unwrapped, "action_masks")
    env = make(action="per_request_levels", requests=4)
    env.reset(seed=0)
    masks = env.unwrapped.action_masks().reshape(4, -1)
    running = len(env.unwrapped._outcome.observation.requests)
    assert masks[:running, -1].all() and not masks[running:, 1:].any() and masks[:, 0].all()


@pytest.mark.parametrize(
    "wrong",
    [{"scenario": 3}, {"requests": 0}, {"requests": "x"}, {"max_steps": -1}, {"engine": 3}],
)
def test_arguments_of_the_wrong_kind_are_one_line(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(UserError, match=f"{name} = "):
        gymnasium.make(kvpolicy.env.REPLAY, **wrong)
