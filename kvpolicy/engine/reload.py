"""Which settings of a running engine may change, and what a new config changes of them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from kvpolicy.config import EngineConfig, SamplingParams, load_yaml
from kvpolicy.controllers import ControllerLike
from kvpolicy.controllers.files import parse
from kvpolicy.errors import UserError
from kvpolicy.memory.rule import Admission, Eviction

log = logging.getLogger(__name__)

RUN_TIME = ("controller", "control_interval", "eviction", "admission")
"""Fields of EngineConfig that may change while the engine runs. Memory and model are laid out once."""


@dataclass(frozen=True, slots=True)
class RunTimeChanges:
    """What to apply: the new value of every field of RUN_TIME, and the names of those to act on."""

    names: tuple[str, ...]
    controller: ControllerLike
    control_interval: int
    eviction: Eviction | None
    admission: Admission | None


def changes(old: EngineConfig, new: EngineConfig) -> RunTimeChanges:
    """What differs between two configs. UserError naming a field that cannot change.

    A controller from a file is always among the names: the file may have been edited.
    """
    names = []
    for name, field in EngineConfig.model_fields.items():
        before, after = getattr(old, name), getattr(new, name)
        if before != after and name not in RUN_TIME:
            raise UserError(
                f"{field.alias or name} = {after!r}: cannot change while the engine runs (it is "
                f"{before!r}); what can: {', '.join(RUN_TIME)}"
            )
        edited = name == "controller" and isinstance(after, str) and parse(after) is not None
        if before != after or edited:
            names.append(name)
    return RunTimeChanges(
        tuple(names), new.controller, new.control_interval, new.eviction, new.admission
    )


def read(path: str | Path, old: EngineConfig) -> EngineConfig:
    """``old`` with the settings of a YAML file over it: what the file does not name stays. A file that
    names nothing is warned of: an editor may be in the middle of writing it.

    UserError as for any config file, and for settings of requests, which an engine does not have.
    """
    aliases = {name: field.alias or name for name, field in EngineConfig.model_fields.items()}
    values = {alias: getattr(old, name) for name, alias in aliases.items()}
    content = load_yaml(Path(path))
    if not content:
        log.warning("config %r names no settings: nothing changes", str(path))
    for key, value in content.items():
        name = key.replace("-", "_")
        if name in SamplingParams.model_fields:
            raise UserError(
                f"config {str(path)!r}: {name} belongs to each request, not to the engine"
            )
        values[name] = value
    return EngineConfig(**values)
