"""Names to controllers, and the specs that choose one: ``NAME`` or ``NAME:key=value,key=value``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from kvpolicy.controllers.adaptive import Adaptive
from kvpolicy.controllers.base import Controller
from kvpolicy.controllers.hisparse import HiSparse
from kvpolicy.controllers.hybrid import Hybrid
from kvpolicy.controllers.random import Random
from kvpolicy.controllers.resident import Resident
from kvpolicy.controllers.static import Static
from kvpolicy.errors import UserError, unknown_name
from kvpolicy.yaml_values import read_yaml

Factory = Callable[..., Controller]

_FACTORIES: dict[str, Factory] = {
    "resident": Resident,
    "hisparse": HiSparse,
    "static": Static,
    "adaptive": Adaptive,
    "hybrid": Hybrid,
    "random": Random,
}


def names() -> list[str]:
    """Registered controllers, in the order they were added."""
    return list(_FACTORIES)


def describe() -> list[tuple[str, str]]:
    """(name, one line on what it does) of every registered controller."""
    lines = []
    for name, factory in _FACTORIES.items():
        text = inspect.getdoc(factory) or ""
        lines.append((name, text.splitlines()[0] if text else ""))
    return lines


def register(name: str, factory: Factory) -> Factory:
    """Add a controller. factory: called with the spec's parameters, returns an object with ``decide``.

    UserError if the name is taken or cannot stand in a spec.
    """
    if not name or any(c in name for c in ":=, /\\"):
        raise UserError(
            f"controller name {name!r}: must be non-empty, without ':', '=', ',', '/' or spaces"
        )
    if name in _FACTORIES:
        raise UserError(f"controller name {name!r} is taken")
    _FACTORIES[name] = factory
    return factory


def make(spec: str, **params: Any) -> Controller:
    """A controller from its spec; keyword parameters go over those of the spec."""
    name, _, rest = spec.partition(":")
    factory = _FACTORIES.get(name)
    if factory is None:
        raise unknown_name("controller", name, names())
    values = {**_parameters(spec, rest), **params}
    allowed = list(inspect.signature(factory).parameters)
    for key in values:
        if key not in allowed:
            raise unknown_name(f"parameter of controller {name!r}", key, allowed or ["(none)"])
    try:
        return factory(**values)
    except (TypeError, ValueError) as error:
        raise UserError(f"controller {spec!r}: {error}") from None


def _parameters(spec: str, text: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, separator, value = item.partition("=")
        key = key.strip().replace("-", "_")
        if not separator or not key:
            raise UserError(f"controller {spec!r}: {item!r} must be key=value")
        if key in values:
            raise UserError(f"controller {spec!r}: {key} is given twice")
        values[key] = read_yaml(value, f"controller {spec!r}: {key}")
    return values
