"""The live environment on a CPU: checkers, and every way in which an episode can break, within a
bounded time."""

from __future__ import annotations

import threading
import time
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as sb3_check_env

import kvpolicy.env
from kvpolicy.control.actions import ACTIONS
from kvpolicy.episodes.live import LiveEpisode
from kvpolicy.workloads.runner import Runner

ONE_STEP = {"control_interval": 1}
MIDDLE = np.zeros(3, dtype=np.float32)


def make(**extra: Any) -> gymnasium.Env[Any, Any]:
    return gymnasium.make(kvpolicy.env.LIVE, scenario="tiny", **extra)


@pytest.mark.parametrize(
    "action",
    [a if a == "global" else pytest.param(a, marks=pytest.mark.full) for a in ACTIONS],
)
def test_both_checkers_are_content(action: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for check in (check_env, sb3_check_env):
            env = make(action=action, engine=ONE_STEP, requests=3).unwrapped
            check(env)
            env.close()


@pytest.fixture
def env() -> Any:
    own = make(engine=ONE_STEP).unwrapped  # patient: a step may take seconds on a busy machine
    own.reset(seed=0)
    own.step(MIDDLE)
    yield own
    own.close()


def episode_of(env: Any) -> LiveEpisode:
    assert isinstance(env._episode, LiveEpisode)
    return env._episode


def test_a_killed_engine_ends_the_episode(env: Any) -> None:
    engine = episode_of(env).engine
    engine.memory.arena.buffer = None  # whatever it does next fails
    engine._broken = "killed by a test"
    start = time.monotonic()
    for _ in range(5):
        obs, _, terminated, truncated, info = env.step(MIDDLE)
        if terminated:
            break
    assert terminated and not truncated and "killed by a test" in info["ended"]
    assert time.monotonic() - start < 10 and obs.shape == env.observation_space.shape
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(MIDDLE)
    env.reset(seed=1)  # with a new engine
    assert episode_of(env).engine is not engine
    assert not env.step(MIDDLE)[2]


def test_a_stuck_worker_ends_the_episode(env: Any) -> None:
    episode, never = episode_of(env), threading.Event()
    engine, episode._patience = episode.engine, 2.0
    engine.residents.grow = lambda step: never.wait()
    start = time.monotonic()
    _, _, terminated, _, info = env.step(MIDDLE)
    assert terminated and info["ended"].startswith("stuck: nothing for")
    assert time.monotonic() - start < 15
    never.set()
    episode._thread.join(60)
    assert not episode._thread.is_alive()  # it was told to end
    env.reset(seed=1)
    assert episode_of(env).engine is not engine


def test_an_exhausted_pool_ends_the_episode(env: Any) -> None:
    """A request that could never fit, as a load for a larger machine would bring."""
    episode = episode_of(env)
    episode.engine.memory.arena.frames.num_frames = episode.engine.memory._shared
    terminated = False
    start = time.monotonic()
    while not terminated and time.monotonic() - start < 20:
        _, _, terminated, truncated, info = env.step(MIDDLE)
        assert not truncated
    assert terminated and "the engine failed" in info["ended"]


def test_reset_in_the_middle_keeps_the_engine(env: Any) -> None:
    engine, threads = episode_of(env).engine, serving_threads()
    for seed in (1, 2):
        env.reset(seed=seed)
        assert episode_of(env).engine is engine
        env.step(MIDDLE)
        # However many came meanwhile, all are of this episode.
        assert set(engine.requests) <= {handle.id for handle in episode_of(env)._runner.handles}
    engine.check_integrity()
    assert serving_threads() <= threads


def serving_threads() -> int:
    return sum(thread.name == "kvpolicy-live" for thread in threading.enumerate())


def test_an_episode_that_cannot_begin_leaves_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(runner: Any) -> None:
        raise RuntimeError("broken by a test")

    own = make(engine=ONE_STEP).unwrapped
    monkeypatch.setattr(Runner, "start", broken)
    with pytest.raises(RuntimeError, match="broken by a test"):
        own.reset(seed=0)
    assert own._holder._engine is not None
    own.close()
    assert own._holder._engine is None
