"""docs/claims.md says what holds and which test shows it; it must not name what is not there."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEADER = ["id", "claim", "command", "test", "status"]
STATUS = {"holds", "in part", "not yet"}
NONE = "—"


class Row(NamedTuple):
    id: str
    claim: str
    command: str
    test: str
    status: str


def rows() -> list[Row]:
    """All table rows of docs/claims.md; every table there has the same five columns."""
    found, header_seen = [], False
    for line in (ROOT / "docs" / "claims.md").read_text().splitlines():
        if not line.startswith("|"):
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if cells == HEADER:
            header_seen = True
        elif not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
            assert header_seen, f"a row before the header: {line}"
            assert len(cells) == len(HEADER), f"not five cells: {line}"
            found.append(Row(*cells))
    return found


ROWS = rows()


def named_tests(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def has_test(name: str) -> bool:
    """Is there a function `file.py::name` or `file.py::Class::name`?"""
    path, *names = name.split("::")
    file = ROOT / path
    if not file.is_file() or not names:
        return False
    nodes: list[ast.stmt] = ast.parse(file.read_text()).body
    for part in names:
        part = part.partition("[")[0]
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        match = next((n for n in nodes if isinstance(n, kinds) and n.name == part), None)
        if match is None:
            return False
        nodes = match.body
    return True


def test_there_are_rows_and_each_id_is_used_once() -> None:
    ids = [row.id for row in ROWS]
    assert len(ids) >= 20
    assert sorted(ids) == sorted(set(ids))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_row_is_true_to_the_repository(row: Row) -> None:
    assert row.status in STATUS, f"{row.id}: status is one of {sorted(STATUS)}"
    names = named_tests(row.test)
    if not names:
        assert row.test == NONE, f"{row.id}: write `tests/file.py::name` or {NONE}"
        assert row.status == "not yet", f"{row.id}: without a test the status is 'not yet'"
    for name in names:
        assert has_test(name), f"{row.id}: there is no test {name}"
    if row.status == "not yet":
        assert row.command == NONE, f"{row.id}: not yet there, so there is no command to show it"
    else:
        assert re.fullmatch(r"`(kvpolicy|make|pytest) [^`]+`", row.command), f"{row.id}: command"
