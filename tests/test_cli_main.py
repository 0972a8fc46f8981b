"""Commands, exit codes and error lines of the `kvpolicy` command itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from kvpolicy import __version__
from kvpolicy.cli import main as cli
from kvpolicy.errors import CapacityError, IntegrityError, UserError


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def error_line(result: Result) -> str:
    """The one line of an error, with exit code 2 and nothing on stdout."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("kvpolicy: error: ")
    assert result.stderr.count("\n") == 1 and result.stderr.endswith("\n")
    return result.stderr.removeprefix("kvpolicy: error: ").rstrip("\n")


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120
    )


# --- plain use ------------------------------------------------------------------------------------


def test_version() -> None:
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"kvpolicy {__version__}\n")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(arguments: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 0
    for name in cli.COMMANDS:
        assert f" {name} " in result.stdout
    assert " leaderboard " in result.stdout  # of another package, by its entry point


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name: str) -> None:
    result = invoke(name, "--help")
    assert result.exit_code == 0
    assert f"kvpolicy {name}" in result.stdout


def test_start_needs_no_torch() -> None:
    code = (
        "import sys; from kvpolicy.cli.main import app\n"
        "assert app(sys.argv[1:], standalone_mode=False) == 0\n"
        "assert 'torch' not in sys.modules and 'rich.progress' not in sys.modules"
    )
    for arguments in (["--version"], ["--help"], ["run", "--help"], ["compare", "--help"]):
        result = python(code, *arguments)
        assert result.returncode == 0, result.stderr


def test_module_runs_as_a_script() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "kvpolicy.cli.main", "rnu"], capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("kvpolicy: error: unknown command 'rnu' (did you mean 'run'?)")
    assert result.stderr.count("\n") == 1


# --- one line for every mistake -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typo", "meant"), [("rnu", "run"), ("comapre", "compare"), ("lst", "list"), ("demmo", "demo")]
)
def test_unknown_command_suggests(typo: str, meant: str) -> None:
    assert f"unknown command {typo!r} (did you mean {meant!r}?)" in error_line(invoke(typo))


def test_unknown_command_lists_what_there_is() -> None:
    line = error_line(invoke("zzz"))
    assert f"allowed: {', '.join(cli.COMMANDS)}, " in line  # then those of agents/ and of plug-ins
    assert {"train", "export", "evaluate", "leaderboard", "tune"} <= set(
        line.split("allowed: ")[1].split(", ")
    )


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--nonsense"], "--nonsense"),
        (["run", "--nonsense", "x"], "--nonsense"),
        (["run", "x", "--max-new-tokens"], "--max-new-tokens"),
        (["run", "x", "--max-new-tokens", "many"], "--max-new-tokens"),
        (["run", "x", "--device-kv-mib", "much"], "--device-kv-mib"),
        (["list", "surplus"], "surplus"),
        (["demo", "--max-new-tokens", "1.5"], "--max-new-tokens"),
    ],
)
def test_usage_errors_are_one_line(arguments: list[str], part: str) -> None:
    assert part in error_line(invoke(*arguments))


# --- what a command may raise ---------------------------------------------------------------------


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> Result:
    def command() -> None:
        raise error

    monkeypatch.setattr(cli, "_plugins", lambda: (Point("boom", command),))
    return invoke("boom")


class Point:
    """An entry point that needs no installed distribution."""

    value = "somewhere:something"

    def __init__(self, name: str, target: Any) -> None:
        self.name = name
        self.target = target

    def load(self) -> Any:
        if isinstance(self.target, Exception):
            raise self.target
        return self.target


@pytest.mark.parametrize(
    "error", [UserError("two\nlines"), CapacityError("host", "needs 4 MiB, 2 MiB given")]
)
def test_user_errors(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    assert error_line(raising(monkeypatch, error)) == " ".join(str(error).split())


def test_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    result = raising(monkeypatch, KeyboardInterrupt())
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == "kvpolicy: interrupted\n"


@pytest.mark.parametrize("error", [IntegrityError("a bug"), ZeroDivisionError("another")])
def test_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    result = raising(monkeypatch, error)
    assert result.exit_code == 1
    assert result.exception is error


def test_closed_pipe_is_quiet() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvpolicy.cli.main", "info", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 1


# --- commands of other distributions --------------------------------------------------------------


def hello(name: str = "you") -> None:
    """Greet."""
    typer.echo(f"hello {name}")


def group() -> typer.Typer:
    plugin = typer.Typer(help="Two commands.")
    plugin.command("one")(hello)
    plugin.command("two")(hello)
    return plugin


def test_plugin_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_plugins", lambda: (Point("greet", hello),))
    assert invoke("greet", "--name", "me").stdout == "hello me\n"
    assert "Greet." in invoke("--help").stdout
    assert "(did you mean 'greet'?)" in error_line(invoke("gret"))


def test_plugin_app(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_plugins", lambda: (Point("more", group()),))
    assert invoke("more", "two").stdout == "hello you\n"
    assert "Two commands." in invoke("--help").stdout
    assert "No such command" in error_line(invoke("more", "three"))


def test_plugin_takes_a_name_kept_for_later_but_not_a_built_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cli, "_plugins", lambda: (Point("train", hello), Point("list", hello)))
    assert invoke("train").stdout == "hello you\n"
    assert "controllers" in invoke("list").stdout


def test_broken_plugin_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Point("broken", ImportError("no module named 'gym'"))
    monkeypatch.setattr(cli, "_plugins", lambda: (broken, Point("greet", hello)))
    listed = invoke("--help")
    assert listed.exit_code == 0
    assert "greet" in listed.stdout and "cannot be loaded" in listed.stdout
    line = error_line(invoke("broken", "--any", "thing"))
    assert line == (
        "command 'broken' (somewhere:something) cannot be loaded: "
        "ImportError: no module named 'gym'"
    )
    assert invoke("greet").exit_code == 0


def test_plugins_are_looked_up_only_when_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry_points(**_: str) -> tuple[EntryPoint, ...]:
        raise AssertionError("looked up")

    monkeypatch.setattr(cli, "entry_points", entry_points)
    assert invoke("--version").exit_code == 0
    assert invoke("list", "--json").exit_code == 0


def test_exit_code_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> Callable[[], None]:
        def command() -> None:
            raise typer.Exit(code)

        return command

    for code in (0, 1, 7):
        monkeypatch.setattr(cli, "_plugins", lambda code=code: (Point("leave", leave(code)),))
        assert invoke("leave").exit_code == code
