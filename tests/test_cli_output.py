"""JSON, tables, files and terminals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvpolicy.cli import output
from kvpolicy.errors import UserError


class Terminal:
    """Stands for a stdout that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_json_says_null_for_what_json_cannot_say() -> None:
    value = {"a": float("nan"), "b": [float("inf"), 1.5], "c": ("x", None, True)}
    assert json.loads(output.json_text(value)) == {"a": None, "b": [None, 1.5], "c": ["x", None, 1]}


def test_json_is_ascii() -> None:
    text = output.json_text({"text": "é\ufffd\x1b"})
    assert text.isascii() and text.endswith("\n")
    assert json.loads(text) == {"text": "é\ufffd\x1b"}


def test_write_replaces_a_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    target.write_text("old")
    output.write_atomic(target, b"new")
    assert target.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [target]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "result.json"
    target.write_text("old")

    def refuse(self: Path, to: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(UserError, match="No space left on device"):
        output.write_atomic(target, b"new")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_write_goes_through_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "real.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    output.write_atomic(link, b"new")
    assert link.is_symlink() and target.read_bytes() == b"new"


def test_new_files_get_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    target, other = tmp_path / "result.json", tmp_path / "other"
    output.write_atomic(target, b"{}")
    other.touch()
    assert target.stat().st_mode == other.stat().st_mode


def test_devices_are_written_in_place() -> None:
    output.check_output(Path(os.devnull))
    output.write_atomic(Path(os.devnull), b"{}")
    assert not Path(os.devnull).is_file()


@pytest.mark.parametrize("name", ["missing/result.json", "."])
def test_check_output_refuses(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="--output"):
        output.check_output(tmp_path / name)


def test_check_output_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    output.check_output(None)
    output.check_output(Path("result.json"))
    output.check_output(tmp_path / "result.json")


def test_full_disk_is_one_line() -> None:
    if not os.path.exists("/dev/full"):
        return  # only Linux has such a device
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "kvpolicy.cli.main", "list"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert result.returncode == 2
    assert result.stderr == "kvpolicy: error: standard output: No space left on device\n"


def test_control_codes_reach_pipes_but_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a\tb\n\x1b[2J\x07é\ufffd"
    assert output.printable(text) == text
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert output.printable(text) == "a\tb\n\\x1b[2J\\x07é\ufffd"


def test_table_is_aligned() -> None:
    assert output.table(["name", "n"], [["a", "1"], ["long", "1,000"]]) == (
        "name      n\na         1\nlong  1,000\n"
    )


def test_table_turns_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "16")
    text = output.table(["name", "rows", "steps", "rate"], [["a", "10", "20", "3"]])
    assert text == "name    a\nrows   10\nsteps  20\nrate    3\n"


def test_summary_shows_a_dash_for_what_is_missing() -> None:
    text = output.summary({"miss_rate": 0.1234, "tpot_ms": {"p50": 1.25, "p99": None}})
    lines = [line.split() for line in text.splitlines()]
    assert ["miss", "rate", "12.3%"] in lines
    assert ["TPOT", "p50", "/", "p99,", "ms", "1.2", "/", "-"] in lines
    assert ["steps", "-"] in lines
