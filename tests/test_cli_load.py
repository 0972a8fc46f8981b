"""`run` and `compare` under a workload, on a micro checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from micro import write_checkpoint
from typer.testing import CliRunner, Result

from kvpolicy.cli import compare
from kvpolicy.cli.main import app
from kvpolicy.cli.run import Decoded

STEP = "synthetic:step?low=1&high=4&duration=15&prompt_bytes=30-60&output_tokens=6&text=heldout"
OPEN = "trace:azure-conv?rate=0.2&duration=30&prompt_bytes=30-60&output_tokens=6&text=heldout"
TWO = ("--controller", "resident", "--controller", "hisparse")


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("micro") / "model"))


def invoke(command: str, model: str, *arguments: str, uri: str = STEP) -> Result:
    fixed = ("--model", model, "--device", "cpu", "--clock", "steps", "--workload", uri)
    return CliRunner().invoke(app, [command, *fixed, *arguments])


def compare_json(model: str, *arguments: str, uri: str = STEP) -> dict[str, Any]:
    result = invoke("compare", model, *TWO, "--json", *arguments, uri=uri)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    document = json.loads(result.stdout)
    assert isinstance(document, dict)
    return document


def test_compare_json(micro: str) -> None:
    found = compare_json(micro, "--slo", "ttft_ms=3,tpot_ms=2", "--fingerprint")
    assert [r["controller"] for r in found["results"]] == ["resident", "hisparse"]
    assert found["outputs_equal"] and found["requests_compared"] >= 5
    assert found["record"]["workload"].startswith("synthetic:step?duration=15&")
    assert found["record"]["slo"] == {"tpot_ms": 2, "ttft_ms": 3}
    for result in found["results"]:
        requests, phases = result["requests"], result["phases"]
        assert [p["name"] for p in phases] == ["low", "high", "low again", "drain"]
        assert [p["level"] for p in phases] == [1, 4, 1, 0]
        assert len(result["latencies"]["arrived"]) == len(requests)
        assert len(result["timeline"]["columns"]["miss_rate"]) > 5
        assert result["metrics"]["goodput_tokens_per_s"] > 0
        assert all(p["goodput_tokens_per_s"] is not None for p in phases[:3])
        assert len(requests[0]["logits_sha256"]) == 64


def test_compare_json_is_the_same_twice(micro: str) -> None:
    first, second = (compare_json(micro, "--slo", "ttft_ms=3") for _ in range(2))
    for a, b in zip(first["results"], second["results"], strict=True):
        assert a["requests"] == b["requests"] and a["latencies"] == b["latencies"]
        for one, two in zip(a["phases"], b["phases"], strict=True):
            assert {**one, "step_ms": 0} == {**two, "step_ms": 0}
    assert "goodput_tokens_per_s" in first["results"][0]["metrics"]


def test_without_bounds_there_is_no_goodput(micro: str) -> None:
    found = compare_json(micro, uri=OPEN)
    assert {r["metrics"]["goodput_tokens_per_s"] for r in found["results"]} == {None}
    assert found["requests_compared"] == len(found["results"][0]["requests"]) == 6
    assert "slo" not in found["record"]


def test_compare_text(micro: str) -> None:
    result = invoke("compare", micro, *TWO, "--slo", "ttft_ms=3")
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    lines = result.stdout.splitlines()
    assert lines[0].split()[:3] == ["phase", "miss", "rate"] and lines[0].endswith("goodput")
    assert [line for line in lines if line.endswith("at a time")] == [
        "low: 1 requests at a time",
        "high: 4 requests at a time",
        "low again: 1 requests at a time",
    ]
    assert (
        "goodput: tokens of requests that were served within 3 steps to the first token." in lines
    )
    assert [line.split()[-1] for line in lines[-2:]] == ["equal", "equal"]
    assert max(map(len, lines)) <= 100


def test_the_wall_clock_shows_time_per_token(micro: str) -> None:
    uri = "synthetic:poisson?rate=40&duration=0.2&prompt_bytes=30&output_tokens=4&text=heldout"
    arguments = ["--model", micro, "--device", "cpu", "--workload", uri]
    result = CliRunner().invoke(app, ["run", *arguments])
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    heading, steady, row = result.stdout.splitlines()[:3]
    assert "TPOT p50/p99" in heading and "tokens/s" in heading
    assert (steady, row.split()[0]) == ("steady", "hisparse")
    assert "TTFT, TPOT: ms." in result.stdout


def test_goodput_of_plain_prompts(micro: str) -> None:
    """Of two steps (a chunk of prompt that gives the first token, and a second token)."""
    fixed = ["--model", micro, "--device", "cpu", "--clock", "steps", "--max-new-tokens", "2"]
    result = CliRunner().invoke(app, ["run", "x", *fixed, "--slo", "ttft_ms=1"])
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    last = result.stdout.splitlines()[-1]
    assert last == "goodput: 1.00 tokens/step within 1 steps to the first token"
    late = CliRunner().invoke(app, ["run", "x" * 200, *fixed, "--slo", "ttft_ms=1"])
    assert late.stdout.splitlines()[-1].startswith("goodput: 0.00 tokens/step")


def test_run_json(micro: str) -> None:
    result = invoke("run", micro, "--json", "--controller", "resident", uri=OPEN)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    found = json.loads(result.stdout)
    assert [p["name"] for p in found["phases"]] == ["trace", "drain"]
    assert len(found["requests"]) == 6
    assert found["metrics"]["fetched_rows"] == 0


def test_a_difference_under_load_is_loud(micro: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = compare.decode

    def changed(config: Any, *rest: Any) -> Decoded:
        run = decode(config, *rest)
        if config.controller == "resident":
            return run
        last = replace(run.outputs[3], logits_sha256="0" * 64)
        return replace(run, outputs=[*run.outputs[:3], last, *run.outputs[4:]])

    monkeypatch.setattr(compare, "decode", changed)
    result = invoke("compare", micro, *TWO)
    assert result.exit_code == 1
    assert "OUTPUTS DIFFER under 'hisparse' (against 'resident'): request 3" in result.stderr


def test_a_missing_request_does_not_pass(micro: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = compare.decode

    def changed(config: Any, *rest: Any) -> Decoded:
        run = decode(config, *rest)
        return run if config.controller == "resident" else replace(run, outputs=run.outputs[:-1])

    monkeypatch.setattr(compare, "decode", changed)
    with pytest.raises(ValueError, match="shorter"):
        raise_of(invoke("compare", micro, *TWO, uri=OPEN))


def raise_of(result: Result) -> None:
    assert result.exception is not None
    raise result.exception


def test_logdir(micro: str, tmp_path: Path) -> None:
    arguments = [*TWO, "--controller", "hisparse", "--logdir", str(tmp_path / "new" / "logs")]
    first = invoke("run", micro, *arguments[-2:], "--controller", "resident")
    assert first.exit_code == 0, first.output
    result = invoke("compare", micro, *arguments)  # replaces what the first left
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    folder = tmp_path / "new" / "logs"
    assert result.stdout.splitlines()[-2:] == [
        f"events: kvpolicy dashboard {folder}",
        f"picture: {folder / 'timeline.png'}",
    ]
    names = ["hisparse", "hisparse_2", "record.json", "resident", "timeline.png"]
    assert sorted(p.name for p in folder.iterdir()) == names
    assert all(len(list((folder / n).iterdir())) == 1 for n in ("resident", "hisparse"))
    found = json.loads((folder / "record.json").read_text())
    assert [r["controller"] for r in found["results"]] == ["resident", "hisparse", "hisparse #2"]
    assert found["record"]["workload"].startswith("synthetic:step?")
    assert found["results"][1]["phases"][1]["name"] == "high"


def test_logdir_of_plain_prompts(micro: str, tmp_path: Path) -> None:
    arguments = ["--model", micro, "--device", "cpu", "--max-new-tokens", "9", "--json"]
    result = CliRunner().invoke(app, ["run", "x", *arguments, "--logdir", str(tmp_path)])
    assert result.exit_code == 0 and set(json.loads(result.stdout)) == {
        *("requests", "metrics", "record")
    }
    assert "picture: " in result.stderr
    assert (tmp_path / "hisparse").is_dir() and (tmp_path / "timeline.png").is_file()


def test_without_matplotlib_the_rest_is_written(
    micro: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpolicy.telemetry.picture.available", lambda: False)
    result = invoke("run", micro, "--logdir", str(tmp_path), uri=OPEN)
    assert result.exit_code == 0
    assert result.stderr == (
        "no picture: matplotlib is not installed (pip install 'kvpolicy[plot]')\n"
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hisparse", "record.json"]


# --- the bound ------------------------------------------------------------------------------------


def test_bound(micro: str) -> None:
    """0.25 MiB hold a few of these requests in full: memory binds, not the time per token."""
    arguments = ["--tpot-bound-ms", "2", "--max-concurrency", "8", "--device-kv-mib", "0.25"]
    found = compare_json(micro, *arguments)
    resident, hisparse = (r["bound"] for r in found["results"])
    assert (resident["tpot_bound_ms"], resident["percentile"]) == (2, "p50")
    assert resident["limited_by"] == "memory" and 1 <= resident["concurrency"] < 8
    assert hisparse["concurrency"] >= resident["concurrency"]
    assert resident["tokens_per_s"] > 0 and resident["tpot_p50_ms"] == pytest.approx(1)
    held = found["results"][0]["requests"]
    assert len(held) == 3 * resident["concurrency"]
    assert found["outputs_equal"]


def test_bound_text(micro: str) -> None:
    arguments = ["--tpot-bound-ms", "2", "--max-concurrency", "3", "--controller", "hisparse"]
    result = invoke("compare", micro, *arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    heading, row = result.stdout.splitlines()
    assert heading.split()[0] == "controller" and "TPOT p50" in heading
    assert row.split()[:2] == ["hisparse", "3"] and "--max-concurrency" in row


def test_a_bound_that_nothing_holds(micro: str) -> None:
    arguments = ["--tpot-bound-ms", "0.5", "--max-concurrency", "2", "--json"]
    result = invoke("compare", micro, *arguments, "--controller", "resident")
    (found,) = json.loads(result.stdout)["results"]
    assert (found["bound"]["concurrency"], found["bound"]["limited_by"]) == (0, "tpot")
    assert found["bound"]["tokens_per_s"] is None and found["requests"]


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["prompt"], "give prompts or --workload, not both"),
        (["--prompt-file", "x"], "give prompts or --workload, not both"),
        (["--logdir", "/dev/null/x"], "Not a directory"),
        (["--controller", "residant"], "(did you mean 'resident'?)"),
        (["--controller", "residant", "--tpot-bound-ms", "3"], "(did you mean 'resident'?)"),
        (["--controller", "resident", "--device-kv-mib", "0.11"], "controller 'resident': device"),
        (["--max-new-tokens", "0"], "max_new_tokens = 0"),
    ],
)
def test_mistakes(micro: str, arguments: list[str], part: str) -> None:
    result = invoke("compare", micro, *arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert part in result.stderr and result.stderr.count("\n") == 1
