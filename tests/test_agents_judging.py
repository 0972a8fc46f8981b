"""Judging on the twin: the reward's metric, repeatable, checked when it is shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kvpolicy.agents.judging import Played, Row, confidence, judge, play, win_rate
from kvpolicy.agents.leaderboard import add_rows, read_board, verify
from kvpolicy.cli.main import app
from kvpolicy.episodes.scenarios import find
from kvpolicy.episodes.twin import TwinEpisode, make_twin
from kvpolicy.errors import UserError
from kvpolicy.telemetry.reward import goodput

SCENARIO = "tiny"


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Two controllers on a short scenario: two loads, and one of them."""
    found = judge(["random"], [SCENARIO], "test", [0, 1])
    return found + judge(["learned"], [SCENARIO], "test", [0])


def same(first: Played, second: Played) -> bool:
    """Equal but for the time that decisions took on this machine."""
    return replace(first, decision_us=(0, 0)) == replace(second, decision_us=(0, 0))


def test_the_score_is_the_sum_of_an_episodes_rewards(rows: list[Row]) -> None:
    scenario = find(SCENARIO)
    load = scenario.load("test", np.random.default_rng(0))
    episode = TwinEpisode(make_twin(scenario, "learned"), scenario, load)
    baseline, outcome = scenario.baseline(load), episode.begin()
    total = goodput(outcome.terms, baseline)
    while outcome.observation is not None:
        outcome = episode.advance()
        total += goodput(outcome.terms, baseline)
    # The last step may end after the load does: its tokens count there, not here.
    assert rows[1].episodes[0].score == pytest.approx(total, rel=0.02)
    assert total > 0


def test_playing_again_gives_the_same(rows: list[Row]) -> None:
    row = rows[0]
    assert same(play(find(SCENARIO), row.controller, "test", 1), row.episodes[1])
    assert not same(row.episodes[0], row.episodes[1])
    assert row.episodes[0].decision_us[1] >= row.episodes[0].decision_us[0] > 0
    assert row.sha256 is None and rows[1].sha256 is not None and len(rows[1].sha256) == 64


def test_confidence_of_the_mean() -> None:
    values = np.random.default_rng(1).normal(5.0, 1.0, 100).tolist()
    low, high = confidence(values)
    mean, error = float(np.mean(values)), float(np.std(values)) / 10
    assert low == pytest.approx(mean - 1.96 * error, abs=0.05)
    assert high == pytest.approx(mean + 1.96 * error, abs=0.05)
    assert confidence([3.0]) == (3.0, 3.0) and confidence(values) == (low, high)


def test_wins_are_of_the_same_loads(rows: list[Row]) -> None:
    base = rows[0]
    up = replace(base, episodes=tuple(replace(e, score=e.score + 1) for e in base.episodes))
    assert win_rate(up, base) == 1.0 and win_rate(base, up) == 0.0 and win_rate(base, base) == 0.5
    mixed = replace(base, episodes=(up.episodes[0], base.episodes[1]))
    assert win_rate(mixed, base) == 0.75


def test_a_board_is_verified_and_a_wrong_one_found(rows: list[Row], tmp_path: Path) -> None:
    path = tmp_path / "board.json"
    add_rows(path, rows)
    add_rows(path, [rows[0]])
    assert sorted(row.controller for row in read_board(path)) == ["learned", "random"]
    document = json.loads(path.read_text())
    document["rows"] = [row for row in document["rows"] if row["controller"] == "learned"]
    path.write_text(json.dumps(document))
    result = invoke("leaderboard", str(path), "--verify")
    assert result.exit_code == 0 and "verified: 1 rows" in result.stdout, result.output
    document["rows"][0]["episodes"][0]["score"] += 0.01
    path.write_text(json.dumps(document))
    result = invoke("leaderboard", str(path), "--verify", "--json")
    assert result.exit_code == 1
    wrong = json.loads(result.stdout)["wrong"]
    assert len(wrong) == 2 and "in the file" in wrong[1] and "mean and interval" in wrong[0]
    assert invoke("leaderboard", str(path)).exit_code == 0  # only shown


def test_another_artifact_under_the_same_name_is_found(rows: list[Row]) -> None:
    other = replace(rows[1], sha256="0" * 64)
    assert any("artifact is another one" in line for line in verify(other, 0))
    assert verify(replace(rows[0], live=True), 1)[0].endswith("cannot be played again")


def test_what_cannot_be_judged(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'random'"):
        judge(["randm"], [SCENARIO], "test", [0])
    with pytest.raises(UserError, match="unknown scenario"):
        judge(["random"], ["tny"], "test", [0])
    with pytest.raises(UserError, match="unknown split"):
        judge(["random"], [SCENARIO], "tst", [0])
    path = tmp_path / "board.json"
    for text in ("[]", "{}", "no JSON", '{"format": 1, "rows": [{"a": 1}]}'):
        path.write_text(text)
        with pytest.raises(UserError, match="leaderboard"):
            read_board(path)
    result = invoke("evaluate", "--leaderboard", str(path), "--scenario", SCENARIO)
    assert result.exit_code == 2 and "leaderboard" in result.stderr
