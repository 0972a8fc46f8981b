"""`kvpolicy new controller`: the file it writes runs at once, and nothing is overwritten."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvpolicy.cli.main import app
from kvpolicy.controllers import files, make

FORTY = 40  # lines that one can read at a glance
STEPS = ("--clock", "steps")  # without a deadline, so that a busy machine changes no decision


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "_loaded", {})
    return tmp_path


def new(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["new", "controller", *arguments])


def commands(result: Result) -> list[list[str]]:
    """The two commands that were printed, as arguments."""
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [line.strip() for line in result.stdout.splitlines()]
    found = [shlex.split(line) for line in lines if line.startswith("kvpolicy ")]
    assert [command[1] for command in found] == ["run", "compare"]
    return [command[1:] for command in found]


@pytest.mark.parametrize(
    ("name", "file", "kind"),
    [
        ("lazy", "lazy.py", "Lazy"),
        ("lazy-rows", "lazy_rows.py", "LazyRows"),
        ("lazy_rows", "lazy_rows.py", "LazyRows"),
        ("LazyRows", "LazyRows.py", "LazyRows"),
        ("v2-lru-2q", "v2_lru_2q.py", "V2Lru2q"),
    ],
)
def test_names(folder: Path, name: str, file: str, kind: str) -> None:
    run, _ = commands(new(name))
    assert run[2] == f"./{file}:{kind}"
    assert [path.name for path in folder.iterdir()] == [file]
    controller = make(f"{run[2]}:share=0.25")
    assert type(controller).__name__ == kind
    assert controller.share == 0.25  # type: ignore[attr-defined]


def test_the_file_is_short_and_points_to_the_fields(folder: Path) -> None:
    new("lazy")
    text = (folder / "lazy.py").read_text()
    assert text.count("\n") < FORTY and max(map(len, text.splitlines())) <= 110
    assert not {"CLASS", "SPEC", "./lazy.py:lazy"} & set(text.split())
    shown = re.findall("python (-m pydoc .*)", text)
    for arguments, field in zip(shown, ("miss_rate", "reserve_bytes"), strict=True):
        command = [sys.executable, "-P", *arguments.split()]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0 and field in done.stdout


def test_the_printed_commands_run_and_it_adapts(folder: Path) -> None:
    run, compare = commands(new("lazy-rows", "--path", "my rules.py"))
    assert run[2] == compare[4] == "./my rules.py:LazyRows"
    result = CliRunner().invoke(app, [*run, *STEPS, "--max-new-tokens", "2", "--json"])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["metrics"]["controller_fallbacks"] == 0
    small = ["--controller", "./my rules.py:LazyRows:share=0.1"]
    result = CliRunner().invoke(app, [*compare, *small, *STEPS, "--max-new-tokens", "16", "--json"])
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["outputs_equal"] is True
    _, half, tenth = (entry["metrics"] for entry in document["results"])
    assert half["optional_bytes_mean"] > tenth["optional_bytes_mean"]
    assert half["fetched_rows"] < tenth["fetched_rows"]
    assert half["controller_fallbacks"] == tenth["controller_fallbacks"] == 0


def test_never_overwrites_without_force(folder: Path) -> None:
    (folder / "lazy.py").write_text("mine")
    result = new("lazy")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "kvpolicy: error: 'lazy.py' exists; --force overwrites it\n"
    assert (folder / "lazy.py").read_text() == "mine"
    commands(new("lazy", "--force"))
    assert "class Lazy" in (folder / "lazy.py").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing argument"),
        (("3x",), "must be letters and digits, a letter first"),
        (("",), "must be letters and digits"),
        (("a b",), "must be letters and digits"),
        (("a--b",), "must be letters and digits"),
        (("../a",), "must be letters and digits"),
        (("a.py",), "must be letters and digits"),
        (("é",), "must be letters and digits"),
        (("class",), "'class' is a word of Python's own"),
        (("none",), "'None' is a word of Python's own"),
        (("random",), "would hide the module 'random'"),
        (("kvpolicy",), "would hide the module 'kvpolicy'"),
        (("lazy", "--path", "lazy.txt"), "must end in .py"),
        (("lazy", "--path", "."), "must end in .py"),
        (("lazy", "--path", "a:b.py"), "must end in .py and hold no ':'"),
        (("lazy", "--path", "no/lazy.py"), "folder 'no' does not exist"),
        (("lazy", "--path", "folder.py", "--force"), "Is a directory"),
    ],
)
def test_mistakes_are_one_line(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    (folder / "folder.py").mkdir()
    result = new(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr and result.stderr.count("\n") == 1
    assert [path.name for path in folder.iterdir()] == ["folder.py"]


def test_other_kinds_are_refused() -> None:
    for arguments, message in (
        (
            ["controler", "lazy"],
            "unknown kind of file 'controler' (did you mean 'controller'?); allowed: controller",
        ),
        (["thing"], "unknown kind of file 'thing'; allowed: controller"),
        ([], "say what to write: kvpolicy new controller NAME"),
    ):
        result = CliRunner().invoke(app, ["new", *arguments])
        assert result.exit_code == 2 and result.stderr == f"kvpolicy: error: {message}\n"
