"""docs/write-a-controller.md: its tables are the dataclasses, its commands and code run as they stand."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvpolicy import Engine, EngineConfig, SamplingParams, evictions
from kvpolicy.cli.main import app
from kvpolicy.control.observation import MissCurve, Observation, RequestView, StoreView
from kvpolicy.control.plan import Plan
from kvpolicy.controllers import files, registry
from kvpolicy.kernels.eviction import RULES, EvictionRule

ROOT = Path(__file__).resolve().parents[1]
GUIDE = (ROOT / "docs" / "write-a-controller.md").read_text()
RECORDS = (Observation, RequestView, StoreView, MissCurve, Plan)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)


# Code that begins with "# NAME.py" is that file; the rest runs by itself.
FILES = {
    code.splitlines()[0].removeprefix("# "): code
    for code in blocks("python")
    if re.match(r"# \S+\.py\n", code)
}
SCRIPTS = [code for code in blocks("python") if code not in FILES.values()]
COMMANDS = [shlex.split(line) for block in blocks("sh") for line in block.splitlines()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The reader's working directory. What the guide registers ends with the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "_loaded", {})
    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    known = set(RULES)
    yield tmp_path
    for name in set(RULES) - known:
        del RULES[name]


def run(code: str, name: str) -> dict[str, Any]:
    values: dict[str, Any] = {"__name__": name}
    exec(compile(code, name, "exec", dont_inherit=True), values)
    return values


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_the_table_has_every_field_in_order(record: type) -> None:
    """Names and types; a field that is added, renamed or retyped must be described."""
    section = re.search(rf"^### {record.__name__}\n(.*?)(?=^#|\Z)", GUIDE, re.DOTALL | re.MULTILINE)
    assert section is not None
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \| (.+) \|$", section[1], re.MULTILINE)
    assert section[1].count("\n| `") == len(rows), "a row that is not | `name` | `type` | text |"
    shown = [(name, kind.replace("\\|", "|")) for name, kind, _ in rows]
    assert shown == [(field.name, str(field.type)) for field in fields(record)]


def test_there_is_something_to_run() -> None:
    assert len(COMMANDS) >= 4 and all(command[0] == "kvpolicy" for command in COMMANDS)
    assert set(FILES) == {"mine.py", "kv_mru.py", "test_mine.py"} and len(SCRIPTS) >= 3


def test_the_commands_run_in_order(folder: Path) -> None:
    for command in COMMANDS:
        tokens = ["--max-new-tokens", "4"] if command[1] == "compare" else []
        result = CliRunner().invoke(app, [*command[1:], *tokens])
        assert result.exit_code == 0, (command, result.output)
        assert command[1] != "compare" or result.stdout.count(" equal\n") == 2


@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_the_code_runs(folder: Path, number: int) -> None:
    run(SCRIPTS[number], f"script_{number}")


def test_the_tests_of_the_guide_pass(folder: Path) -> None:
    found = run(FILES["test_mine.py"], "test_mine")
    tests = [value for name, value in found.items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()


@pytest.mark.skipif("key" not in EvictionRule.__dataclass_fields__, reason="rules are no keys yet")
def test_the_eviction_rule_of_the_guide(folder: Path) -> None:
    rule = run(FILES["kv_mru.py"], "kv_mru")["mru"]
    assert evictions.find("mru") is rule and "mru" in evictions.names()
    config = EngineConfig(
        controller="static:device_buffer_rows=130", eviction="mru", device="cpu", clock="steps",
        validate=True,
    )  # fmt: skip
    with Engine(config) as engine:
        engine.generate([b"ab cd" * 40], SamplingParams(max_new_tokens=4))
        assert engine.memory.rule.eviction == "mru"
        assert engine.metrics()["fetched_rows"] > 0


def test_the_entry_points_are_the_ones_that_are_read(folder: Path) -> None:
    (text,) = blocks("toml")
    groups = tomllib.loads(text)["project"]["entry-points"]
    assert set(groups) == {registry.GROUP, evictions.GROUP}
    for points in groups.values():
        for value in points.values():
            module, _, name = value.partition(":")
            assert re.search(rf"^(def {name}\(|{name} = )", FILES[f"{module}.py"], re.MULTILINE)
