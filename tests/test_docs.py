"""Links of the documentation lead somewhere, and its commands have the options that they use."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer

from kvpolicy.cli.main import COMMANDS, app

ROOT = Path(__file__).resolve().parents[1]
# Commands of agents/, which come in as plug-ins do.
OURS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
    "kvpolicy.commands"
]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith(("http", "#")):
            assert (page.parent / target.partition("#")[0]).exists(), target


def commands(page: Path) -> list[list[str]]:
    """Arguments of every `kvpolicy ...` line of a page, continued lines joined, comments dropped."""
    text = page.read_text().replace("\\\n", " ")
    lines = re.findall(r"^(?:    )?kvpolicy +([^\n|`]+)$", text, re.MULTILINE)
    lines += re.findall(r"`kvpolicy +([^`]+)`", text)
    return [shlex.split(line, comments=True) for line in lines]


def flags(name: str) -> set[str]:
    """The options of a command, hidden ones left out."""
    group = typer.main.get_command(app)
    command = group.get_command(None, name)  # type: ignore[attr-defined]
    named = [p for p in command.params if not getattr(p, "hidden", False)]
    found = {flag for p in named for flag in (*p.opts, *p.secondary_opts)}
    for inner in getattr(command, "commands", {}).values():
        found |= {flag for p in inner.params for flag in p.opts}
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_have_the_options_that_they_use(page: Path) -> None:
    for name, *rest in commands(page):
        if name.startswith("-") or name not in (*COMMANDS, *OURS):
            continue
        used = {part.partition("=")[0] for part in rest if part.startswith("--")}
        assert used <= flags(name), f"{name}: {used - flags(name)}"


def test_the_readme_shows_the_commands() -> None:
    assert {"run", "compare", "info", "list", "new"} <= {c[0] for c in commands(PAGES[0])}
