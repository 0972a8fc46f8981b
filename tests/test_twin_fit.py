"""Fitting the cost model, and the commands that do so, from live runs kept in a file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvpolicy.cli.main import app
from kvpolicy.episodes.runs import Runs, measure, read_runs
from kvpolicy.errors import UserError
from kvpolicy.twin.cost import TERMS, CostModel, Work, load_cost
from kvpolicy.twin.fit import error_of, fit, nnls
from kvpolicy.twin.records import Window

TRUE = CostModel(
    "true", {"decode_steps": 2e-3, "rows": 3e-5, "link_bytes": 2e-11, "prompt_rows": 4e-6}
)


def windows(count: int, seed: int = 0, noise: float = 0.0) -> list[Window]:
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        steps = 64.0
        rows = steps * random.integers(1, 32)
        values = dict.fromkeys(TERMS, 0.0) | {
            "decode_steps": steps,
            "rows": rows,
            "link_bytes": rows * random.uniform(0, 3e6),
            "resolved_rows": rows * random.uniform(0, 3e4),
            "prompt_rows": float(random.integers(0, 4000)),
        }
        work = Work(**values)
        found.append(Window(work, TRUE.time(work) * (1 + noise * random.standard_normal()), 64))
    return found


def test_terms_are_found_again() -> None:
    model = fit("x", windows(60), {})
    for term, value in TRUE.seconds.items():
        assert model.seconds[term] == pytest.approx(value, rel=1e-6)
    assert model.seconds.get("resolved_rows", 0.0) < 1e-12
    assert model.source["fit"]["mean"] < 1e-6


def test_noise_and_outliers_do_not_carry_it_away() -> None:
    seen = windows(200, noise=0.02)
    seen[3] = Window(seen[3].work, seen[3].seconds * 30, 64)
    model = fit("x", seen, {})
    assert abs(error_of(model, windows(50, seed=1)).total) < 0.02
    assert model.source["left_out"] >= 1


@given(st.integers(0, 10_000))
def test_nnls_is_a_minimum(seed: int) -> None:
    """No gradient leads down from it (Karush-Kuhn-Tucker)."""
    random = np.random.default_rng(seed)
    matrix, target = random.standard_normal((12, 5)), random.standard_normal(12)
    x = nnls(matrix, target)
    gradient = matrix.T @ (matrix @ x - target)
    assert (x >= 0).all() and (gradient > -1e-7).all()
    assert np.abs(gradient[x > 0]).max(initial=0.0) < 1e-7


def test_a_calibration_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    TRUE.write(path)
    assert load_cost(path).seconds == TRUE.seconds
    with pytest.raises(UserError, match="shipped: "):
        load_cost("h200-nowhere")
    path.write_text("{}")
    with pytest.raises(UserError, match="no calibration"):
        load_cost(path)
    with pytest.raises(UserError, match="at least 0"):
        CostModel("x", {"rows": -1.0})
    with pytest.raises(UserError, match="must be one of"):
        CostModel("x", {"rowz": 1.0})


def test_too_few_windows() -> None:
    with pytest.raises(UserError, match="are needed"):
        fit("x", windows(5), {})


def test_live_runs_and_both_commands(tmp_path: Path) -> None:
    """On a CPU: live runs are kept, read, fitted to, and compared with their twins."""
    path = tmp_path / "runs.json"
    settings = {"device": "cpu", "prefill_chunk": 128}
    runs = measure([("tiny", ["hisparse", "resident"])], 0, save=path, seconds=1.0, **settings)
    assert len(runs.runs) == 1  # the second would begin after a second
    run = read_runs([path]).runs[0]
    assert run.requests == runs.runs[0].requests and run.tokens_per_s > 0
    assert sum(w.work.rows for w in run.windows) <= run.counts["generated_tokens"]
    assert sum(w.steps for w in run.windows) == run.counts["steps"]
    made_up = [window.to_list() for window in windows(40)]
    values = run.to_dict() | {"windows": made_up, "scenario": "tiny-burst"}
    path.write_text(json.dumps({"record": runs.record, "runs": [values, run.to_dict()]}))
    output = tmp_path / "cost.json"
    arguments = ["calibrate", "--from", str(path), "--held-out", "tiny", "--output", str(output)]
    result = CliRunner().invoke(app, [*arguments, "--name", "cpu"])
    assert result.exit_code == 0, result.output
    assert "held out (tiny)" in result.output and load_cost(output).name == "cpu"
    Runs((run,), runs.record).write(path)
    result = CliRunner().invoke(
        app, ["twin-gap", "--from", str(path), "--cost", str(output), "--json"]
    )
    assert result.exit_code == 0, result.output
    (scenario,) = json.loads(result.output)["scenarios"]
    assert scenario["scenario"] == "tiny" and scenario["same_ranking_by_goodput"]
    assert scenario["controllers"][0]["twin_tokens_per_s"] > 0
    result = CliRunner().invoke(app, ["twin-gap", "--from", str(tmp_path / "no.json")])
    assert result.exit_code == 2 and "no.json" in result.output
