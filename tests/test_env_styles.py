"""Both driving styles: the agent steps the environment, or the engine asks the policy. The same decisions."""

from __future__ import annotations

import threading
from typing import Any

import gymnasium
import numpy as np
import pytest
from numpy.typing import NDArray
from quick_model import QuickModel

import kvpolicy.env
from kvpolicy.config import EngineConfig
from kvpolicy.control.actions import make_actions
from kvpolicy.control.decision import Decision
from kvpolicy.control.encoder import Encoder
from kvpolicy.control.observation import Observation
from kvpolicy.engine.engine import Engine
from kvpolicy.episodes.agent import Agent, PolicyController
from kvpolicy.episodes.live import Gate
from kvpolicy.episodes.twin import TwinEpisode, make_twin
from kvpolicy.workloads import registry
from kvpolicy.workloads.runner import Runner
from kvpolicy.workloads.workload import Workload


def policy(observation: NDArray[np.float32]) -> NDArray[np.float32]:
    """Some function of all that is seen."""
    weights = np.sin(np.arange(3 * observation.size, dtype=np.float32)).reshape(3, -1)
    found: NDArray[np.float32] = np.tanh(2 * weights @ observation)
    return found


def driven_by_the_agent(env: Any) -> list[Decision]:
    observation, _ = env.reset(seed=4)
    decisions, done = [], False
    while not done:
        observation, _, terminated, truncated, info = env.step(policy(observation))
        assert info["fallback"] == ""
        decisions.append(env._outcome.decision)
        done = terminated or truncated
    return decisions


@pytest.mark.parametrize(
    "scenario", ["tiny-burst", pytest.param("pressure", marks=pytest.mark.full)]
)
def test_the_same_decisions_in_the_twin(scenario: str) -> None:
    """Observation by observation, plan by plan, budget by budget, up to the end of the load."""
    env = gymnasium.make(kvpolicy.env.REPLAY, scenario=scenario).unwrapped
    theirs = driven_by_the_agent(env)
    env.np_random, _ = gymnasium.utils.seeding.np_random(4)
    own = env.scenario
    controller = PolicyController(policy, Encoder(), env.actions)
    episode = TwinEpisode(make_twin(own, controller), own, own.load("train", env.np_random))
    outcome, mine = episode.begin(), []
    while not outcome.ended:
        outcome = episode.advance()
        mine.append(outcome.decision)
    assert len(mine) == len(theirs) > 50
    assert mine == theirs


def test_the_same_decisions_live() -> None:
    """On the engine, counted in steps: waiting for the agent changes nothing of what is decided."""
    uri = "synthetic:burst?rate=0.1&high=2&duration=60&text=heldout&prompt_bytes=60-200&output_tokens=12"
    config = EngineConfig(
        device="cpu", clock="steps", device_kv_mib=0.6, max_concurrency=4, prefill_chunk=16
    )
    actions, encoder = make_actions("global"), Encoder()
    found = []
    for style in ("engine", "agent"):
        with Engine(config, QuickModel()) as engine:
            load = registry.make(uri, "steps")
            if style == "engine":
                engine.set_controller(PolicyController(policy, encoder, actions))
                Runner(engine, load).run()
            else:
                agent = Agent(wants_curves=True)
                gate = Gate(agent)
                engine.set_controller(gate)
                agent_serves(engine, gate, agent, load)
            found.append(list(engine.control.log))
    first, second = found
    assert len(first) == len(second) > 20 and any(d.observation.requests[1:] for d in first)
    assert first == second and not any(d.fallback for d in first)


def agent_serves(engine: Engine, gate: Gate, agent: Agent, load: Workload) -> None:
    """The engine in a thread, decisions made here."""
    actions, encoder = make_actions("global"), Encoder()

    def run() -> None:
        Runner(engine, load).run()
        gate.told.put("over")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while isinstance(message := gate.told.get(timeout=60), Observation):
        agent.plan = actions.decode(policy(encoder.encode(message)), message)
        gate.open.put(True)
    thread.join(10)
