"""Searching on the training split: resumed from its file, refused where it would mix two searches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvpolicy.agents import tuning
from kvpolicy.agents.judging import Played
from kvpolicy.agents.settings import settings_of
from kvpolicy.agents.tuning import SPACES, default_space, space_of, tune_controller, tune_training
from kvpolicy.cli.main import app
from kvpolicy.controllers import make
from kvpolicy.errors import UserError

SPACE = {"device_buffer_rows": {"low": 0, "high": 64}}


@pytest.fixture()
def known_best(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """Episodes are replaced by a formula whose best is 40 rows; returns what was asked for."""
    asked: list[tuple[str, str, int]] = []

    def play(scenario: Any, controller: str, split: str, seed: int) -> Played:
        asked.append((controller, split, seed))
        score = -abs(make(controller).rows - 40.0)  # type: ignore[attr-defined]
        return Played(seed, score, 0, 0, 0, 0, None, None, (0, 0), 0, 0)

    monkeypatch.setattr(tuning, "play", play)
    return asked


def test_it_finds_the_best_and_goes_on_in_its_file(
    known_best: list[tuple[str, str, int]], tmp_path: Path
) -> None:
    path = tmp_path / "s.db"
    space = space_of(SPACE, "static")
    first = tune_controller("static", space, ["tiny"], [0, 1], 8, path)
    then = tune_controller("static", space, ["tiny"], [0, 1], 16, path)
    assert (first.trials, then.trials) == (8, 24)
    assert then.score >= first.score and abs(then.values["device_buffer_rows"] - 40) <= 8
    assert {split for _, split, _ in known_best} == {"train"}
    assert {seed for _, _, seed in known_best} == {0, 1}
    with pytest.raises(UserError, match="holds another search"):
        tune_controller("hisparse", space, ["tiny"], [0, 1], 1, path)


def test_processes_with_one_storage_draw_other_values(
    known_best: list[tuple[str, str, int]], tmp_path: Path
) -> None:
    space = space_of({"device_buffer_rows": {"low": 0, "high": 1 << 20}}, "static")
    for _ in range(4):  # as four processes that begin, one trial each
        tune_controller("static", space, ["tiny"], [0], 1, tmp_path / "s.db")
    assert len({controller for controller, _, _ in known_best}) == 4
    tune_controller("static", space, ["tiny"], [0], 4, None)
    assert known_best[:4] == known_best[4:]  # and the same ones in one go


def test_a_real_search_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text("reserve: [0.05]\n")
    arguments = ["tune", "--controller", "adaptive", "--space", str(tmp_path / "space.yaml")]
    arguments += ["--scenario", "tiny", "--episodes", "1", "--trials", "1", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["values"] == {"reserve": 0.05} and found["score"] > 0 and found["trials"] == 1


def test_training_settings_are_searched(tmp_path: Path) -> None:
    settings = settings_of(
        {
            "n_envs": 2,
            "n_timesteps": 64,
            "n_steps": 32,
            "batch_size": 64,
            "eval_every": 64,
            "eval_episodes": 2,
            "env_kwargs": {"scenario": "load-step", "fidelity": "curves", "max_steps": 8},
        },
        "ppo",
        "kvpolicy/ResidencyReplay-v0",
    )
    space = space_of({"learning_rate": [0.001, 0.01]}, "space")
    done = tune_training(settings, space, tmp_path / "runs", 2, None)
    assert done.trials == 2 and done.values["learning_rate"] in (0.001, 0.01)
    assert (tmp_path / "runs" / "trial-1" / "best.zip").is_file()
    with pytest.raises(UserError, match="trial-0': File exists"):
        tune_training(settings, space, tmp_path / "runs", 1, None)
    with pytest.raises(UserError, match="did you mean 'learning_rate'"):
        tune_training(settings, space_of({"learnin_rate": [1]}, "s"), tmp_path, 1, None)


@pytest.mark.parametrize("name", SPACES)
def test_shipped_spaces_are_of_their_controllers(name: str) -> None:
    for choice in default_space(name):
        for value in choice.values or (choice.low, choice.high):
            make(f"{name}:{choice.name}={value}")


@pytest.mark.parametrize(
    "values",
    [{}, {"a": []}, {"a": 3}, {"a": {"low": 1}}, {"a": {"low": 2, "high": 1}},
     {"a": {"low": 0, "high": 1, "log": True}}, {"a": {"low": 0, "high": 1, "step": 1}}],
)  # fmt: skip
def test_wrong_spaces_are_refused(values: Mapping[str, Any]) -> None:
    with pytest.raises(UserError, match="space"):
        space_of(values, "space")


def test_the_command_says_what_is_missing() -> None:
    for arguments, message in (
        ([], "give --controller"),
        (["--controller", "random"], "no search space"),
        (["--config", "x.yaml"], "goes with --space"),
        (["--config", "x.yaml", "--scenario", "tiny"], "--scenario goes with --controller"),
        (["--config", "x.yaml", "--episodes", "3"], "--episodes goes with --controller"),
        (["--controller", "static", "--algo", "ppo"], "--algo goes with --config"),
        (["--controller", "static", "--output", "x"], "--output goes with --config"),
    ):
        result = CliRunner().invoke(app, ["tune", *arguments])
        assert result.exit_code == 2 and message in result.stderr
