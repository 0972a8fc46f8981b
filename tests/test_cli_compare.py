"""`kvpolicy compare` and `kvpolicy demo` on the embedded model."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvpolicy.cli import compare, demo
from kvpolicy.cli.main import app
from kvpolicy.cli.run import Decoded

TIGHT = "static:device_buffer_rows=128"
SHORT = ("--max-new-tokens", "4")
TWO = ("--controller", "resident", "--controller", TIGHT)


def invoke(command: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, [command, *arguments])


@pytest.fixture(scope="module")
def long_prompt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More rows than the tight controller keeps, so that it must fetch."""
    path = tmp_path_factory.mktemp("prompts") / "long.txt"
    path.write_bytes(demo.demo_prompts()[0].content[:700])
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
    assert [row.split()[0] for row in rows] == ["resident", "hisparse"]
    assert all(row.endswith("equal") for row in rows)


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


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same demo on shorter pieces of the same texts."""
    monkeypatch.setattr(demo, "_SMALLEST", 300)
    monkeypatch.setattr(demo, "_LARGEST", 450)


def test_demo_prompts_are_whole_lines_of_different_texts() -> None:
    prompts = demo.demo_prompts()
    assert len({prompt.source for prompt in prompts}) == 4
    for prompt in prompts:
        assert 1500 < len(prompt.content) <= 3072
        assert prompt.content.endswith(b"\n")
        prompt.content.decode()


@pytest.mark.usefixtures("small_demo")
def test_demo_text() -> None:
    result = invoke("demo", *SHORT)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    lines = result.stdout.splitlines()
    for number, name in enumerate(demo.CONTROLLERS, 1):
        assert f"[{number}/3] {name} ..." in lines
        assert any(line.split()[:1] == [name] and line.endswith("equal") for line in lines)
    assert any(line.startswith("-- continuation --") for line in lines)
    verdict = r"outputs bit-identical: yes \(\d+ tokens, \d+ logit rows of 3 runs, sha256 \w{16}\)"
    assert re.fullmatch(verdict, lines[-1])


@pytest.mark.usefixtures("small_demo")
def test_demo_json(tmp_path: Path) -> None:
    result = invoke("demo", *SHORT, "--device", "cpu", "--json", "--output", str(tmp_path / "d"))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found == json.loads((tmp_path / "d").read_text())
    assert found["bit_identical"] is True
    assert [r["controller"] for r in found["results"]] == list(demo.CONTROLLERS)
    assert len(found["prompts"]) == 4
    assert found["results"][0]["metrics"]["fetched_rows"] == 0
    assert found["results"][2]["metrics"]["fetched_rows"] > 0
    assert "[1/3] resident" in result.stderr  # progress does not mix with the JSON


@pytest.mark.usefixtures("small_demo")
def test_demo_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = compare.decode
    calls = iter(range(3))

    def changed(*arguments: Any) -> Decoded:
        run = decode(*arguments)
        if next(calls) < 2:
            return run
        return replace(run, outputs=[replace(o, logits_sha256="0" * 64) for o in run.outputs])

    monkeypatch.setattr(compare, "decode", changed)
    result = invoke("demo", *SHORT)
    assert result.exit_code == 1
    assert "outputs bit-identical: NO" in result.stdout
    assert "OUTPUTS DIFFER" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--device", "tpu"], "device = 'tpu'"),
        (["--max-new-tokens", "0"], "max_new_tokens = 0"),
        (["--output", "no/folder/x"], "does not exist"),
    ],
)
def test_demo_bad_input(arguments: list[str], part: str) -> None:
    result = invoke("demo", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert part in result.stderr and result.stderr.count("\n") == 1
