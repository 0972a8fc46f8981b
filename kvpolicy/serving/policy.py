"""The part of a config that can be swapped while a server runs, as a block and over HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from kvpolicy.config import EngineConfig, Settings
from kvpolicy.controllers.files import parse
from kvpolicy.errors import UserError
from kvpolicy.memory.rule import Admission, Eviction

__all__ = ["FIELDS", "PolicyBlock", "check_remote", "policy_of"]

FIELDS = ("controller", "eviction", "admission", "control_interval")
"""Settings of an engine that are its policy."""


class PolicyBlock(Settings):
    """What to change; a key that is not given stays.

    controller: a spec. parameters: instead of ``:key=value,...`` behind it; alone, for the controller
    in force.
    """

    controller: str | None = Field(default=None, min_length=1, max_length=4096)
    parameters: dict[str, bool | int | float | str] | None = None
    eviction: Eviction | None = None
    admission: Admission | None = None
    control_interval: int | None = Field(default=None, ge=1)

    def settings(self, current: str = "") -> dict[str, Any]:
        """The engine settings that are given. current: the controller spec in force."""
        given = self.model_fields_set
        found = {name: getattr(self, name) for name in FIELDS if name in given}
        for name in ("controller", "control_interval"):
            if name in found and found[name] is None:
                raise UserError(f"{name} = null: should have a value")
        if self.parameters is not None:
            found["controller"] = _spec(self.controller or _name(current), self.parameters)
        return found


def policy_of(config: EngineConfig) -> dict[str, Any]:
    """The policy of a config, ready for JSON."""
    values = config.model_dump()
    return {name: values[name] for name in FIELDS}


def check_remote(spec: str) -> None:
    """UserError for a controller that a client may not name: one in a file, or one that is given a
    path. Naming a file runs its code or reads it."""
    if ".py" in spec.lower() or parse(spec) is not None:
        raise UserError(
            f"controller = {spec!r}: files are not taken over HTTP (serve --allow-controller-files)"
        )
    for item in spec.partition(":")[2].split(","):
        key, _, value = item.partition("=")
        if "path" in key.lower() or "file" in key.lower() or any(c in value for c in "/\\~"):
            raise UserError(
                f"controller = {spec!r}: {item!r}: paths are not taken over HTTP "
                "(serve --allow-controller-files)"
            )


def _name(spec: str) -> str:
    file = parse(spec)
    return spec.partition(":")[0] if file is None else file.label


def _spec(name: str, parameters: Mapping[str, Any]) -> str:
    """NAME:key=value,..., the values as YAML reads them."""
    file = parse(name)
    if (":" in name) if file is None else file.rest:
        raise UserError(f"controller = {name!r}: has parameters, and so has 'parameters'")
    for key, value in parameters.items():
        if any(c in f"{key}{value}" for c in ",:=\n"):
            raise UserError(f"parameters: {key} = {value!r}: has one of , : = in it")
    items = ",".join(f"{key}={json.dumps(value)}" for key, value in parameters.items())
    return f"{name}:{items}" if items else name
