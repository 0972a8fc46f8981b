"""Every registered scenario, under every controller, in the twin; splits that share nothing."""

from __future__ import annotations

import numpy as np
import pytest

from kvpolicy.controllers import registry
from kvpolicy.episodes.agent import Agent
from kvpolicy.episodes.scenarios import SCENARIOS, SPLITS, find
from kvpolicy.episodes.twin import TwinEpisode, make_fluid, make_twin
from kvpolicy.errors import UserError
from kvpolicy.workloads.uri import parse_uri

BUILT_IN = ("resident", "hisparse", "hybrid", "static", "adaptive", "random")


def test_all_controllers_are_here() -> None:
    """Those that need no file: `learned` has tests of its own."""
    assert set(BUILT_IN) <= set(registry.names())


@pytest.mark.parametrize("controller", BUILT_IN)
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_under_every_controller(name: str, controller: str) -> None:
    """The first decisions of an episode, with all books checked at the end."""
    scenario = find(name)
    twin = make_twin(scenario, controller)
    episode = TwinEpisode(twin, scenario, scenario.load("train", np.random.default_rng(1)))
    outcome = episode.begin()
    for _ in range(8):
        assert not outcome.failed and (outcome.observation is not None) != bool(outcome.ended)
        if outcome.ended:
            break
        outcome = episode.advance()
        assert outcome.decision is not None and not outcome.decision.fallback
    twin.check_integrity()
    episode.close()


def test_no_twin_with_a_drafter() -> None:
    scenario = find(next(iter(SCENARIOS)))
    refused = pytest.raises(UserError, match="drafter = 'ngram': a twin has one row per request")
    with refused:
        make_twin(scenario, "resident", drafter="ngram")
    with refused:
        make_fluid(scenario, 1, lambda _: pytest.fail("no load is drawn"), drafter="ngram")


@pytest.mark.parametrize("name", SCENARIOS)
def test_splits_share_no_request(name: str) -> None:
    """Seeds of their own; of a trace windows that do not overlap in time."""
    seen: dict[str, set[int]] = {}
    windows: dict[str, list[float]] = {}
    for split in SPLITS:
        random = np.random.default_rng(0)
        for _ in range(40):
            uri = parse_uri(find(name).load(split, random).uri)
            seen.setdefault(split, set()).add(int(uri.query["seed"]))
            if uri.scheme == "trace":
                windows.setdefault(split, []).append(float(uri.query["begin"]))
    assert not set.intersection(*seen.values())
    for split, begins in windows.items():
        low, high = SPLITS[split]
        assert low <= min(begins) and max(begins) + 0.004 < high  # 48 of 19,366 requests


def test_wrong_names() -> None:
    with pytest.raises(UserError, match="did you mean 'burst'"):
        find("bursts")
    with pytest.raises(UserError, match="did you mean 'train'"):
        find("burst").load("trian", np.random.default_rng(0))


def test_the_agent_gives_the_plan_it_was_given() -> None:
    scenario = find("tiny-burst")
    agent = Agent(wants_curves=False)
    episode = TwinEpisode(
        make_twin(scenario, agent), scenario, scenario.load("test", np.random.default_rng(0))
    )
    assert episode.begin().observation is not None
    outcome = episode.advance()
    assert outcome.decision is not None and outcome.decision.plan == agent.plan
