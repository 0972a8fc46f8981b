"""`kvpolicy check`: who behaves passes, who does not is found out, and nobody holds it up."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hostile import FAILING, Acting
from quick_model import QuickModel
from typer.testing import CliRunner

from kvpolicy import Observation, Plan
from kvpolicy.cli.main import app
from kvpolicy.control.pool import Pool
from kvpolicy.errors import UserError
from kvpolicy.testing import Scorecard, check_controller
from kvpolicy.testing import controller as checking
from kvpolicy.testing.states import KINDS, ordinary, states

FILE = """
import os

def dies(observation):
    os._exit(3)

"""


def card(controller: Any, **settings: Any) -> Scorecard:
    values = {"count": 27, "deadline_ms": 1000.0, "model": QuickModel(), **settings}
    return check_controller(controller, **values)


def failed(found: Scorecard) -> list[str]:
    return [check.name for check in found.checks if check.passed is False]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads that take less time than those of the command."""
    monkeypatch.setattr(checking, "LOADS", (2,))
    monkeypatch.setattr(checking, "REPEATS", 1)
    monkeypatch.setattr(checking, "TIGHT_MIB", 0.11)
    monkeypatch.setattr(checking, "PROMPT_BYTES", (40, 25, 60, 30))
    monkeypatch.setattr(checking, "NEW_TOKENS", 10)
    monkeypatch.setattr(checking, "PATIENCE", 0.25)


@pytest.mark.parametrize("name", ["resident", "hybrid", "adaptive", "random"])
def test_who_behaves_passes(name: str) -> None:
    found = card(name)
    assert found.passed and not found.failures, found.line
    assert found.line.startswith(f"{name} passes 5 of 5 checks of kvpolicy ")
    assert "\n" not in found.line and found.decision_ms["p50"] <= found.decision_ms["p99"]
    json.dumps(found.to_dict())


def test_a_function() -> None:
    def mine(observation: Observation) -> Plan:
        return Plan.even(-1)

    found = card(mine)
    assert found.passed and found.controller == "mine" and found.projected_share == 1


@pytest.mark.parametrize("act", ["nan", "error", "nothing"])
def test_who_fails_is_found_out(act: str) -> None:
    found = card(Acting(FAILING[act][0]))
    assert failed(found)[0] == "hostile states" and "fallbacks" in failed(found)
    assert sum(found.failures.values()) == checking.MOST_FAILURES
    assert "exactness" not in failed(found)  # the fallback decides: the output is what it is


def test_a_state_that_few_think_of() -> None:
    """A controller that divides by the number of requests."""

    def mean(observation: Observation) -> Plan:
        return Plan.even(observation.free_bytes / len(observation.requests))

    found = card(mean)
    assert failed(found) == ["hostile states"]
    assert "no request: ZeroDivisionError" in found.checks[0].figure


def test_dice_are_not_deterministic() -> None:
    assert failed(card(lambda observation: Plan.even(random.random() * 1000))) == ["determinism"]


def test_slow_and_endless_ones() -> None:
    def slow(observation: Observation) -> Plan:
        time.sleep(0.002)
        return Plan.even(10)

    assert failed(card(slow, deadline_ms=1.0)) == ["decision time"]

    def endless(observation: Observation) -> Plan:
        time.sleep(600.0)
        return Plan.even(10)

    found = card(endless, count=9)  # waited for a second, though it would take minutes
    assert {"hostile states", "fallbacks"} <= set(failed(found)) and found.failures["late"] == 1


@pytest.mark.full
def test_a_file_runs_in_its_own_process(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    found = card(f"{path}:dies", count=9)
    assert "hostile states" in failed(found) and found.failures["died"] > 0


def test_a_name_that_is_none() -> None:
    with pytest.raises(UserError, match="did you mean 'adaptive'"):
        check_controller("adaptve")


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "Engine", _with_quick_model(checking.Engine))
    run = CliRunner()
    good = run.invoke(app, ["check", "static", "--states", "9", "--deadline-ms", "1e3", "--json"])
    assert good.exit_code == 0, good.output
    assert json.loads(good.stdout)["passed"] is True
    slow = run.invoke(app, ["check", "static", "--states", "9", "--deadline-ms", "0.001"])
    assert slow.exit_code == 1
    assert slow.stdout.splitlines()[-1].startswith("static FAILS (decision time), 4 of 5 checks")


def _with_quick_model(engine: Any) -> Any:
    return lambda config, model=None: engine(config, model or QuickModel())


def test_states_are_consistent_and_repeat() -> None:
    made = list(states(3 * len(KINDS), seed=1))
    assert made == list(states(3 * len(KINDS), seed=1)) != list(states(3 * len(KINDS), seed=2))
    assert [kind for kind, _ in made[: len(KINDS)]] == list(KINDS)
    for seen in [observation for _, observation in made] + list(ordinary(0, 5, 10)):
        pool = Pool(seen)
        assert seen.pool_bytes == seen.required_bytes + seen.optional_bytes + seen.free_bytes
        assert pool.cost(pool.held) * seen.frame_bytes == seen.optional_bytes
        assert (pool.held <= pool.most).all() and (pool.now <= pool.most).all()
