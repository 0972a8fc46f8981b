"""`--shadow`, `kvpolicy regret` and `kvpolicy dashboard` from the command line, on a micro checkpoint."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from micro import write_checkpoint
from typer.testing import CliRunner

from kvpolicy.cli.main import app

LOAD = "synthetic:step?low=1&high=3&duration=20&prompt_bytes=40-90&output_tokens=12"
SETTINGS = ("--clock", "steps", "--device", "cpu", "--device-kv-mib", "1", "--workload", LOAD)
SMALL = "hisparse:device_buffer_rows=16"


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("micro") / "model"))


def invoke(command: str, micro: str, *arguments: str) -> Any:
    return CliRunner().invoke(app, [command, "--model", micro, *SETTINGS, *arguments])


def shadowed(text: str) -> list[str]:
    """The first words of the shadows' table."""
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("shadow  "))
    return [line.split()[0] for line in lines[at + 1 : at + 3]]


def test_compare_with_shadows(micro: str, tmp_path: Path) -> None:
    """A shadow beside each controller misses what a run of it misses, and is told in table and JSON."""
    result = invoke(
        "compare", micro, "--controller", "resident", "--controller", SMALL, "--shadow", SMALL,
        "--output", str(tmp_path / "a.json"), "--logdir", str(tmp_path / "logs"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert shadowed(result.stdout) == [SMALL, SMALL]
    document = json.loads((tmp_path / "a.json").read_text())
    live = document["results"][1]["metrics"]
    for run in document["results"]:
        (shadow,) = run["shadows"]
        assert shadow["controller"] == SMALL and shadow["exact"]
        assert shadow["fetched_rows"] == live["fetched_rows"] > 0
        assert shadow["miss_rate"] == pytest.approx(live["miss_rate"])
        assert [phase["name"] for phase in shadow["phases"]] == [
            phase["name"] for phase in run["phases"]
        ]
        assert sum(p["fetched_rows"] for p in shadow["phases"]) == shadow["fetched_rows"]
    found = {path.parent.name for path in (tmp_path / "logs").rglob("events.out.*")}
    assert found == {"resident", SMALL.replace(":", "_"), f"shadow={SMALL.replace(':', '_')}"}


def test_run_and_record_with_shadows(micro: str, tmp_path: Path) -> None:
    run = invoke("run", micro, "--controller", "resident", "--shadow", SMALL, "--json")
    assert run.exit_code == 0, run.output
    path = tmp_path / "a.npz"
    record = invoke(
        "record", micro, "--controller", "resident", "--shadow", SMALL, "--json", "--output", str(path)
    )  # fmt: skip
    assert record.exit_code == 0, record.output
    one, other = (json.loads(each.stdout)["shadows"][0] for each in (run, record))
    assert one | {"seconds": 0} == other | {"seconds": 0}
    assert one["fetched_rows"] > 0


def test_shadows_that_cannot_be(micro: str) -> None:
    result = invoke("run", micro, "--shadow", "hisparsee")
    assert result.exit_code == 2 and "did you mean 'hisparse'" in result.stderr
    result = invoke("compare", micro, "--shadow", "static", "--tpot-bound-ms", "5")
    assert result.exit_code == 2 and "--shadow does not go with --tpot-bound-ms" in result.stderr


def test_regret(micro: str) -> None:
    result = invoke("regret", micro, "--controller", "resident", "--controller", SMALL)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("synthetic:step?") and lines[2].split()[0] == "policy"
    assert [line.split()[0] for line in lines[3:8]] == [
        "resident", SMALL, "clairvoyant", "clairvoyant", "bound",
    ]  # fmt: skip
    assert invoke("regret", micro, "--shadow", "static").exit_code == 2


@pytest.mark.full
def test_the_dashboard_ends_with_an_interrupt(micro: str, tmp_path: Path) -> None:
    assert invoke("run", micro, "--logdir", str(tmp_path)).exit_code == 0
    command = [sys.executable, "-P", "-m", "kvpolicy.cli.main", "dashboard", str(tmp_path)]
    with subprocess.Popen(
        [*command, "--port", "0", "--no-open"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("1 runs at http://127.0.0.1:") and "#custom_scalars" in line
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 130
        finally:
            process.kill()
