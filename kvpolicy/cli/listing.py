"""`kvpolicy list`: the names that other commands take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpolicy import evictions, workloads
from kvpolicy.cli.output import check_output, emit_json, warn, write_text
from kvpolicy.controllers.registry import ControllerInfo
from kvpolicy.controllers.registry import catalogue as controller_catalogue
from kvpolicy.episodes.environments import ENVIRONMENTS
from kvpolicy.evictions import EvictionInfo
from kvpolicy.geometry.hf_config import EMBEDDED
from kvpolicy.geometry.presets import preset, preset_names
from kvpolicy.speculative.registry import DrafterInfo
from kvpolicy.speculative.registry import catalogue as drafter_catalogue

__all__ = ["list_command", "listing"]

Entry = dict[str, Any]


def listing() -> tuple[dict[str, list[Entry]], tuple[str, ...]]:
    """Every kind of name with one line about each, and one line about each plug-in that is refused."""
    controllers, no_controllers = controller_catalogue()
    rules, no_rules = evictions.catalogue()
    drafters, no_drafters = drafter_catalogue()
    models = [
        {
            "name": name,
            "description": preset(name).source,
            "weights": "embedded" if name in EMBEDDED else "none (geometry only)",
        }
        for name in preset_names()
    ]
    found = {
        "controllers": [_controller(info) for info in controllers],
        "evictions": [_entry(info) for info in rules],
        "drafters": [_entry(info) for info in drafters],
        "models": models,
        "workloads": [{"name": name, "description": text} for name, text in workloads.describe()],
        "environments": [
            {"name": name, "description": text} for name, text in ENVIRONMENTS.items()
        ],
    }
    return found, tuple(dict.fromkeys((*no_controllers, *no_rules, *no_drafters)))


def list_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Also write the JSON to a file.")
    ] = None,
) -> None:
    """List controllers, evictions, drafters, models, workloads and environments.

    Under a controller stand the parameters of its spec with their defaults; plug-ins carry the name
    of their distribution.
    """
    check_output(output)
    found, refused = listing()
    emit_json(found, to_stdout=as_json, path=output)
    if not as_json:
        write_text("\n".join(_section(kind, entries) for kind, entries in found.items()))
    for line in refused:
        warn(f"warning: {line}")


def _entry(info: ControllerInfo | EvictionInfo | DrafterInfo) -> Entry:
    """Keys distribution and problem only where there is one."""
    entry = {"name": info.name, "description": info.description}
    extra = {"distribution": info.distribution, "problem": info.problem}
    return entry | {key: text for key, text in extra.items() if text}


def _controller(info: ControllerInfo) -> Entry:
    """parameters: name -> default, as JSON can say it; required: names without a default;
    any_parameters: takes others too."""
    entry = _entry(info)
    entry["parameters"] = {name: _plain(value) for name, value in info.parameters.defaults.items()}
    if info.parameters.required:
        entry["required"] = list(info.parameters.required)
    if info.parameters.any:
        entry["any_parameters"] = True
    return entry


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def _section(kind: str, entries: Sequence[Entry]) -> str:
    if not entries:
        return f"{kind}\n  none yet\n"
    width = max(len(entry["name"]) for entry in entries)
    lines = [kind]
    for entry in entries:
        lines.append(f"  {entry['name'].ljust(width)}  {_about(entry)}".rstrip())
        if parameters := _parameters(entry):
            lines.append(f"  {'':{width}}  :{','.join(parameters)}")
    return "\n".join(lines) + "\n"


def _parameters(entry: Entry) -> list[str]:
    """As a spec would set them, the defaults in YAML's spelling."""
    words = {None: "null", True: "true", False: "false"}
    named = [f"{name}=..." for name in entry.get("required", ())]
    for name, value in entry.get("parameters", {}).items():
        is_word = value is None or isinstance(value, bool)
        named.append(f"{name}={words[value] if is_word else value}")
    return named + ["..."] * entry.get("any_parameters", False)


def _about(entry: Entry) -> str:
    notes = ""
    if "weights" in entry:
        notes += f" [weights: {entry['weights']}]"
    if "distribution" in entry and "problem" not in entry:
        notes += f" [from {entry['distribution']}]"
    return f"{entry['description']}{notes}"
