"""`kvpolicy compare` and `kvpolicy demo` on the embedded model."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvpolicy import controllers
from kvpolicy.cli import compare, demo
from kvpolicy.cli.main import app
from kvpolicy.cli.run import Decoded
from kvpolicy.workloads.texts import load_corpus

TIGHT = "static:device_buffer_rows=128"
SHORT = ("--max-new-tokens", "4")
TWO = ("--controller", "resident", "--controller", TIGHT)


def invoke(command: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, [command, *arguments])


@pytest.fixture(scope="module")
def long_prompt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More rows than the tight controller keeps, so that it must fetch."""
    path = tmp_path_factory.mktemp("prompts") / "long.txt"
    path.write_bytes(load_corpus("heldout").piece(0.5, 700))
    return path


def tampered(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Make every controller but `resident` change its first output."""
    decode = compare.decode

    def changed(config: Any, *rest: Any) -> Decoded:
        run = decode(config, *rest)
        if config.controller == "resident":
            return run
        first, *others = run.outputs
        values = {key: change(getattr(first, key)) for key, change in changes.items()}
        return replace(run, outputs=[replace(first, **values), *others])

    monkeypatch.setattr(compare, "decode", changed)


# --- compare --------------------------------------------------------------------------------------


def test_json(long_prompt: Path, tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    arguments = ("x", "--prompt-file", str(long_prompt), *SHORT, *TWO, "--fingerprint", "--json")
    result = invoke("compare", *arguments, "--output", str(target))
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    found = json.loads(result.stdout)
    assert found == json.loads(target.read_text())
    assert [r["controller"] for r in found["results"]] == ["resident", TIGHT]
    assert {r["drafter"] for r in found["results"]} == {"none"}
    resident, tight = found["results"]
    assert resident["requests"] == tight["requests"]
    assert [r["prompt_tokens"] for r in tight["requests"]] == [1, 700]
    assert all(len(r["logits_sha256"]) == 64 for r in tight["requests"])
    assert resident["metrics"]["miss_rate"] == 0 < tight["metrics"]["miss_rate"]
    assert found["outputs_equal"] and tight["outputs_equal"]
    assert found["record"]["controllers"] == ["resident", TIGHT]


def test_table_of_the_default_controllers() -> None:
    result = invoke("compare", "x", *SHORT)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    heading, *rows = result.stdout.splitlines()
    assert heading.split()[0] == "controller" and heading.endswith("outputs")
    assert [row.split()[0] for row in rows] == ["resident", "hisparse", "adaptive"]
    assert all(row.endswith("equal") for row in rows)


def test_a_controller_named_twice_is_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They can be told apart, also where only the second differs."""
    same = ("--controller", "resident", "--controller", "hisparse", "--controller", "hisparse")
    result = invoke("compare", "x", *SHORT, *same)
    rows = [line.split("  ")[0].strip() for line in result.stdout.splitlines()[1:]]
    assert rows == ["resident", "hisparse", "hisparse #2"] and not result.stderr
    calls = iter(range(9))
    decode = compare.decode

    def third(config: Any, *rest: Any) -> Decoded:
        run = decode(config, *rest)
        if next(calls) < 2:
            return run
        return replace(run, outputs=[replace(o, tokens=o.tokens[:1]) for o in run.outputs])

    monkeypatch.setattr(compare, "decode", third)
    result = invoke("compare", "x", *SHORT, *same)
    verdicts = [line.split()[-1] for line in result.stdout.splitlines()[1:4]]
    assert verdicts == ["equal", "equal", "DIFFERENT"] and result.exit_code == 1
    assert "OUTPUTS DIFFER under 'hisparse #2'" in result.stderr


def test_controller_of_a_config_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("controller: static\nmax_new_tokens: 2\n")
    result = invoke("compare", "x", "--config", str(path))
    assert [row.split()[0] for row in result.stdout.splitlines()[1:]] == ["static"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": lambda t: [*t[:-1], (t[-1] + 1) % 256]}, "tokens differ from generated token"),
        ({"tokens": lambda t: t[:-1]}, "tokens differ from generated token"),
        ({"logits_sha256": lambda d: "0" * 64}, "the tokens agree, their logits do not"),
        ({"finish_reason": lambda r: "error"}, "ended with error"),
    ],
)
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_difference_is_loud(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str, form: tuple[str, ...]
) -> None:
    tampered(monkeypatch, **changes)
    result = invoke("compare", "x", "y", *SHORT, *TWO, *form)
    assert result.exit_code == 1
    line, *rest = result.stderr.splitlines()
    assert not rest
    assert line.startswith(f"kvpolicy: OUTPUTS DIFFER under '{TIGHT}' (against 'resident'): ")
    assert "request 0: " in line and words in line
    if form:
        found = json.loads(result.stdout)
        assert not found["outputs_equal"]
        assert [r["outputs_equal"] for r in found["results"]] == [True, False]
    else:
        assert [row.split()[-1] for row in result.stdout.splitlines()[1:]] == ["equal", "DIFFERENT"]


def test_every_controller_is_checked_before_the_first_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unexpected(*_: Any) -> Decoded:
        raise AssertionError("ran")

    monkeypatch.setattr(compare, "decode", unexpected)
    result = invoke("compare", "x", "--controller", "resident", "--controller", "hispase")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "unknown controller 'hispase' (did you mean 'hisparse'?)" in result.stderr


def test_memory_that_never_suffices_names_the_controller() -> None:
    result = invoke("compare", "x", "--controller", "resident", "--device-kv-mib", "0.001")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("kvpolicy: error: controller 'resident': device memory")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["--controller"], ["x", "--output", "no/folder/x"]])
def test_bad_input(arguments: list[str]) -> None:
    result = invoke("compare", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("kvpolicy: error: ") and result.stderr.count("\n") == 1


# --- demo -----------------------------------------------------------------------------------------

CONTROLLERS = demo.demo_controllers()


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The same demo with fewer and shorter requests. Returns its log folder."""
    small = demo.Load(1, 3, 8, "150-250", 4, 6.0, 128, 6)
    monkeypatch.setitem(demo.LOADS, "cpu", small)
    return tmp_path / "runs"


@pytest.fixture
def two_controllers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "CONTROLLERS", ("resident", "hisparse"))


def demo_arguments(logdir: Path) -> list[str]:
    return ["--device", "cpu", "--logdir", str(logdir)]


def test_the_demo_knows_the_baselines_and_only_what_is_registered() -> None:
    assert CONTROLLERS[:2] == ["resident", "hisparse"]
    assert set(CONTROLLERS) <= set(controllers.names())


def test_demo_text(small_demo: Path) -> None:
    result = invoke("demo", *demo_arguments(small_demo))
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    lines = result.stdout.splitlines()
    total = len(CONTROLLERS)
    for number, name in enumerate(CONTROLLERS, 1):
        assert f"[{number}/{total}] {name} ..." in lines
        assert sum(line.split()[:1] == [name] for line in lines) == 3  # one row per phase
    assert any(line.startswith("-- end of the first prompt --") for line in lines)
    for phase in ("low: 1 requests", "high: 3 requests", "low again: 1 requests"):
        assert any(line.startswith(phase) for line in lines)
    start = lines.index("Missed by adaptive (by hisparse), and the longest wait:") + 1
    numbers = r"[\d.]+% \([\d.]+%\), (\d+|-) steps \((\d+|-)\)"
    for line, phase in zip(lines[start:], ("low", "high", "low again"), strict=False):
        assert re.fullmatch(rf"  {phase}: {numbers}", line)
    verdict = (
        rf"outputs bit-identical: yes \(\d+ requests x {total} controllers, "
        r"[\d,]+ logit rows, sha256 \w{16}\)"
    )
    assert any(re.fullmatch(verdict, line) for line in lines)
    assert lines[-1] == f"picture: {small_demo / 'timeline.png'}"
    assert max(len(line) for line in lines if "tmp" not in line) <= 100
    assert (small_demo / "timeline.png").stat().st_size > 10_000


@pytest.mark.usefixtures("two_controllers")
def test_demo_json(small_demo: Path, tmp_path: Path) -> None:
    arguments = [*demo_arguments(small_demo), "--max-new-tokens", "5"]
    result = invoke("demo", *arguments, "--json", "--output", str(tmp_path / "d"))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found == json.loads((tmp_path / "d").read_text())
    assert found["bit_identical"] is True
    assert [r["controller"] for r in found["results"]] == ["resident", "hisparse"]
    resident = found["results"][0]
    assert resident["metrics"]["fetched_rows"] == 0
    assert {len(r["tokens"]) for r in resident["requests"]} == {5}
    assert [p["name"] for p in resident["phases"]] == ["low", "high", "low again", "drain"]
    assert "[1/2] resident" in result.stderr  # progress stays out of the JSON


@pytest.mark.usefixtures("two_controllers")
def test_demo_that_fails_says_so(small_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = compare.decode

    def changed(config: Any, *rest: Any) -> Decoded:
        run = decode(config, *rest)
        if config.controller != "hisparse":
            return run
        return replace(run, outputs=[replace(o, logits_sha256="0" * 64) for o in run.outputs])

    monkeypatch.setattr(compare, "decode", changed)
    result = invoke("demo", *demo_arguments(small_demo))
    assert result.exit_code == 1
    assert "outputs bit-identical: NO" in result.stdout
    assert "OUTPUTS DIFFER under 'hisparse'" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--device", "tpu"], "device = 'tpu'"),
        (["--max-new-tokens", "0"], "--max-new-tokens"),
        (["--output", "no/folder/x"], "does not exist"),
        (["--logdir", "/dev/null/x"], "Not a directory"),
    ],
)
def test_demo_bad_input(arguments: list[str], part: str) -> None:
    result = invoke("demo", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert part in result.stderr and result.stderr.count("\n") == 1
