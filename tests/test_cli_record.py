"""`kvpolicy record` and `kvpolicy oracle`, on a micro checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from micro import write_checkpoint
from typer.testing import CliRunner, Result

from kvpolicy.cli.main import app
from kvpolicy.recording import Recording

STEP = "synthetic:step?low=1&high=4&duration=15&prompt_bytes=30-60&output_tokens=6&text=heldout"


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("micro") / "model"))


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def record(model: str, path: Path, *arguments: str) -> Result:
    fixed = ("--model", model, "--device", "cpu", "--clock", "steps", "--workload", STEP)
    return invoke("record", *fixed, "--output", str(path), *arguments)


@pytest.fixture(scope="module")
def recording(micro: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "a.npz"
    result = record(micro, path, "--controller", "static:device_buffer_rows=20")
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    assert "bits per entry" in result.stdout
    return path


def oracle_json(path: Path, *arguments: str) -> dict[str, Any]:
    result = invoke("oracle", str(path), "--json", *arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    document = json.loads(result.stdout)
    assert isinstance(document, dict)
    return document


def test_a_recording_has_the_whole_run(recording: Path) -> None:
    found = Recording(recording)
    assert found.record["workload"].startswith("synthetic:step?")
    assert found.record["config"]["controller"] == "static:device_buffer_rows=20"
    assert [phase["name"] for phase in found.record["phases"]][:3] == ["low", "high", "low again"]
    assert len(found.steps["step"]) <= found.record["metrics"]["steps"]
    tokens = sum(len(found.rows(request).at) for request in found.request_ids)
    assert tokens == found.record["metrics"]["generated_tokens"]


def test_json_and_prompts(micro: str, tmp_path: Path) -> None:
    path = tmp_path / "b.npz"
    fixed = ("--model", micro, "--device", "cpu", "--max-new-tokens", "5", "--output", str(path))
    result = invoke("record", *fixed, "--json", "a prompt of some length, long enough", "another")
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    document = json.loads(result.stdout)
    assert document["recording"] == str(path) and document["bytes"] == path.stat().st_size
    assert (document["requests"], document["query_rows"]) == (2, 10)
    assert document["entries"] == 10 * 16 * len(document["selectors"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--controller", "hisparse", "--controller", "static"), "record takes one --controller"),
        (("--tpot-bound-ms", "5"), "goes with 'kvpolicy compare'"),
        (("--logdir", "x"), "--logdir goes with"),
    ],
)
def test_what_record_does_not_take(
    micro: str, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    result = record(micro, tmp_path / "a.npz", *arguments)
    assert result.exit_code == 2 and says in result.stderr
    assert not list(tmp_path.iterdir())


def test_record_needs_a_place(micro: str, tmp_path: Path) -> None:
    result = invoke("record", "--model", micro, "text")
    assert result.exit_code == 2 and "--output FILE.npz is needed" in result.stderr
    result = record(micro, tmp_path / "no" / "a.npz")
    assert result.exit_code == 2 and "does not exist" in result.stderr


def test_the_oracle_table(recording: Path, tmp_path: Path) -> None:
    result = invoke("oracle", str(recording), "--output", str(tmp_path / "a.json"))
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    lines = result.stdout.splitlines()
    assert lines[1].split()[:3] == ["run", "(static:device_buffer_rows=20)", "clock"]
    assert [line.split()[:2] for line in lines[2:15]] == [
        *(
            [split, rule]
            for split in ("recorded", "equal", "best", "clairvoyant")
            for rule in RULES
        ),
        ["bound", "belady"],
    ]
    document = json.loads((tmp_path / "a.json").read_text())
    replayed = next(r for r in document["rows"] if (r["split"], r["eviction"]) == OWN)
    assert replayed["fetched_rows"] == document["recorded"]["fetched_rows"] > 0
    assert all(row["regret_rows"] >= 0 for row in document["rows"])


RULES, OWN = ("lru", "clock", "belady"), ("recorded", "clock")


def test_the_oracle_of_another_memory(recording: Path) -> None:
    usual = oracle_json(recording)
    size = usual["record"]["config"]["device_kv_mib"]
    less = oracle_json(recording, "--device-kv-mib", str(size - 63.5), "--evictions", "lru")
    assert [row["split"] for row in less["rows"]] == ["equal", "best", "clairvoyant", "any"]
    assert less["bound_rows"] >= usual["bound_rows"]
    assert less["wanted_rows"] == usual["wanted_rows"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--evictions", "lru,lfu"), "allowed, by commas: clock, lru, fifo, random, belady"),
        (("--splits", ""), "allowed, by commas: recorded, equal, best"),
        (("--device-kv-mib", "0"), "must be a number above 0"),
        (("--device-kv-mib", "0.001"), "the recorded load needs at least"),
        (("--device-kv-mib", "64", "--splits", "recorded"), "allowed, by commas: equal, best"),
    ],
)
def test_what_the_oracle_refuses(recording: Path, arguments: tuple[str, ...], says: str) -> None:
    result = invoke("oracle", str(recording), *arguments)
    assert result.exit_code == 2 and says in result.stderr, result.output


def test_files_that_are_no_recordings(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(b"no")
    result = invoke("oracle", str(path))
    assert result.exit_code == 2 and "recording" in result.stderr
    assert "Traceback" not in result.output
