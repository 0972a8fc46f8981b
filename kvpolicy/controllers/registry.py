"""Specs to controllers. A spec is ``NAME`` or ``PATH.py:NAME``, with ``:key=value,key=value`` behind it.

A NAME is built in, registered, or an entry point of the group ``kvpolicy.controllers``, looked up in
this order; what any of them may be: :mod:`kvpolicy.controllers.targets`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from kvpolicy.controllers import files
from kvpolicy.controllers.adaptive import Adaptive
from kvpolicy.controllers.base import Controller
from kvpolicy.controllers.hisparse import HiSparse
from kvpolicy.controllers.hybrid import Hybrid
from kvpolicy.controllers.random import Random
from kvpolicy.controllers.resident import Resident
from kvpolicy.controllers.static import Static
from kvpolicy.controllers.targets import (
    MUST_BE,
    Parameters,
    PlainFunction,
    as_controller,
    build,
    kind_of,
    parameters_of,
    summary,
)
from kvpolicy.errors import UserError, unknown_name
from kvpolicy.learned.controller import Learned
from kvpolicy.plugins import Found, check_name, find_plugins
from kvpolicy.yaml_values import read_yaml

Factory = Controller | Callable[..., Any]
ControllerLike = str | Controller | PlainFunction
"""A spec, an object with ``decide``, or a plain function of an observation."""

GROUP = "kvpolicy.controllers"

_Target = TypeVar("_Target", bound=Factory)

_FACTORIES: dict[str, Factory] = {
    "resident": Resident,
    "hisparse": HiSparse,
    "static": Static,
    "adaptive": Adaptive,
    "hybrid": Hybrid,
    "random": Random,
    "learned": Learned,
}
_BUILT_IN = frozenset(_FACTORIES)


@dataclass(frozen=True, slots=True)
class ControllerInfo:
    """One controller as `kvpolicy list` shows it. distribution: of a plug-in; problem: why it is
    unusable."""

    name: str
    description: str
    parameters: Parameters
    distribution: str = ""
    problem: str = ""


def names() -> list[str]:
    """Every name a spec may use: registered ones in the order they were added, then plug-ins (found,
    not imported)."""
    return list(dict.fromkeys((*_FACTORIES, *_plugins().plugins)))


def describe() -> list[tuple[str, str]]:
    """(name, one line on what it does) of every controller."""
    return [(info.name, info.description) for info in catalogue()[0]]


def catalogue() -> tuple[list[ControllerInfo], tuple[str, ...]]:
    """Every controller, and one line about each plug-in that is refused. Imports the plug-ins."""
    found = _plugins()
    known = [_info(name, target) for name, target in _FACTORIES.items()]
    for name, plugin in found.plugins.items():
        if name in _FACTORIES:
            continue
        try:
            known.append(_info(name, _from_plugin(name, found), plugin.distribution))
        except UserError as error:
            nothing = Parameters({}, (), False)
            known.append(ControllerInfo(name, str(error), nothing, plugin.distribution, str(error)))
    return known, found.refused


def register(name: str, factory: _Target) -> _Target:
    """Add a controller by name. factory: a class with ``decide`` or a function that returns an object
    with ``decide``, called with the spec's parameters; or such an object; or a plain function of an
    observation. UserError if it is nothing of these, or if the name is taken or cannot stand in a spec.
    """
    check_name("controller", name)
    if name in _FACTORIES:
        raise UserError(f"controller name {name!r} is taken")
    if kind_of(factory) is None:
        raise UserError(f"controller {name!r}: {factory!r} {MUST_BE}")
    _FACTORIES[name] = factory
    return factory


def make(spec: ControllerLike, /, **params: Any) -> Controller:
    """A controller from its spec; keyword parameters go over those of the spec.

    An object with ``decide`` is returned as it is, a plain function is wrapped. UserError for
    anything that cannot be had, in one line.
    """
    if not isinstance(spec, str):
        if params:
            raise UserError(f"controller {spec!r}: exists already and takes no parameters")
        return as_controller(spec)
    file = files.parse(spec)
    name, _, rest = spec.partition(":") if file is None else (file.label, "", file.rest)
    return build(find(spec), spec, name, {**_parameters(spec, rest), **params})


def find(spec: str) -> object:
    """What the name in a spec stands for, imported. UserError, in one line, if there is no such thing."""
    file = files.parse(spec)
    return _named(spec.partition(":")[0]) if file is None else files.find(file)


def is_foreign(spec: ControllerLike) -> bool:
    """Whether a spec names code of a file or of another distribution. Imports nothing."""
    if not isinstance(spec, str):
        return False
    if files.parse(spec) is not None:
        return True
    name = spec.partition(":")[0]
    return name not in _FACTORIES and name in _plugins().plugins


def _named(name: str) -> object:
    target = _FACTORIES.get(name)
    if target is not None:
        return target
    found = _plugins()
    if name in found.plugins:
        return _from_plugin(name, found)
    about = [line for line in found.refused if f"controller {name!r} of " in line]
    if about:
        raise UserError("; ".join(about))
    error = unknown_name("controller", name, names())
    if "/" in name or "\\" in name:
        raise UserError(f"{error}; a file is given as PATH.py:NAME")
    raise error


def _plugins() -> Found:
    return find_plugins(GROUP, "controller", _BUILT_IN)


def _from_plugin(name: str, found: Found) -> object:
    plugin = found.plugins[name]
    target = plugin.load()
    if kind_of(target) is None:
        raise UserError(f"{plugin.label} is of type {type(target).__name__}: {MUST_BE}")
    return target


def _info(name: str, target: object, distribution: str = "") -> ControllerInfo:
    return ControllerInfo(
        name, summary(target) or "(no docstring)", parameters_of(target), distribution
    )


def _parameters(spec: str, text: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, separator, value = item.partition("=")
        key = key.strip().replace("-", "_")
        if not separator or not key:
            raise UserError(f"controller {spec!r}: {item!r} must be key=value")
        if key in values:
            raise UserError(f"controller {spec!r}: {key} is given twice")
        if not value.strip():
            raise UserError(f"controller {spec!r}: {key} has no value (null is none)")
        values[key] = read_yaml(value, f"controller {spec!r}: {key}")
    return values
