"""`kvpolicy list`: the names that other commands take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvpolicy.cli.output import check_output, emit_json, write_text
from kvpolicy.geometry.hf_config import EMBEDDED
from kvpolicy.memory.rule import EVICTIONS

__all__ = ["DESCRIPTIONS", "list_command", "listing"]

DESCRIPTIONS = {
    "clock": "a sweep that spares recently used rows once (the default, unless a controller has its own)",
    "lru": "the row unused for longest",
    "fifo": "the row loaded first, used or not",
    "random": "any row, by a counter-based draw",
}
Entry = dict[str, str]


def listing() -> dict[str, list[Entry]]:
    """Every kind of name with one line about each."""
    from kvpolicy import workloads
    from kvpolicy.controllers import describe
    from kvpolicy.geometry.presets import preset, preset_names

    models = [
        {
            "name": name,
            "description": preset(name).source,
            "weights": "embedded" if name in EMBEDDED else "none (geometry only)",
        }
        for name in preset_names()
    ]
    return {
        "controllers": _entries(describe()),
        "evictions": _entries([(name, DESCRIPTIONS[name]) for name in EVICTIONS]),
        "drafters": _entries([("none", "one token per request and step")]),
        "models": models,
        "workloads": _entries(workloads.describe()),
        "environments": [],
    }


def list_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Also write the JSON to a file.")
    ] = None,
) -> None:
    """List controllers, evictions, drafters, models, workloads and environments."""
    check_output(output)
    found = listing()
    emit_json(found, to_stdout=as_json, path=output)
    if not as_json:
        write_text("\n".join(_section(kind, entries) for kind, entries in found.items()))


def _entries(pairs: Sequence[tuple[str, str]]) -> list[Entry]:
    return [{"name": name, "description": text} for name, text in pairs]


def _section(kind: str, entries: Sequence[Entry]) -> str:
    if not entries:
        return f"{kind}\n  none yet\n"
    width = max(len(entry["name"]) for entry in entries)
    lines = (f"  {e['name'].ljust(width)}  {_about(e)}".rstrip() for e in entries)
    return "\n".join([kind, *lines]) + "\n"


def _about(entry: Entry) -> str:
    weights = f" [weights: {entry['weights']}]" if "weights" in entry else ""
    return entry["description"] + weights
