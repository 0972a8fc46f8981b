"""What a name may stand for, and how it becomes a controller.

Four things: a class with ``decide``; an object with ``decide``; a plain function of an observation;
a factory, any other function, called with the parameters of the spec, that returns one of the last two.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvpolicy.control.observation import Observation
from kvpolicy.control.plan import Plan
from kvpolicy.controllers.base import Controller
from kvpolicy.errors import UserError, reason, unknown_name

PlainFunction = Callable[[Observation], Plan]
Kind = Literal["class", "object", "function", "factory"]

log = logging.getLogger(__name__)

MUST_BE = "must be a class or an object with decide(), a function of an observation, or a factory"
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a spec may set. defaults: name -> default, in order; required: names without one;
    any: every other name is taken too (``**kwargs``)."""

    defaults: Mapping[str, Any]
    required: tuple[str, ...]
    any: bool

    @property
    def names(self) -> list[str]:
        return [*self.required, *self.defaults]


class FunctionController:
    """A plain function as a controller; ``values`` go to it as keyword arguments."""

    def __init__(self, function: Callable[..., Plan], values: Mapping[str, Any]) -> None:
        self.function, self.values = function, dict(values)

    def decide(self, observation: Observation) -> Plan:
        return self.function(observation, **self.values)

    def __repr__(self) -> str:
        return f"FunctionController({name_of(self.function)})"


def kind_of(target: object) -> Kind | None:
    """Which of the four things it is; None for anything else."""
    has_decide = callable(getattr(target, "decide", None))
    if isinstance(target, type):
        return "class" if has_decide else None
    if has_decide:
        return "object"
    if not callable(target):
        return None
    return "function" if _takes_observation(target) else "factory"


def _takes_observation(function: Callable[..., Any]) -> bool:
    """Is it a policy itself? By its first parameter (named ``observation`` or ``obs``, or annotated
    as one), or because it is annotated to return a Plan."""
    signature = _signature(function)
    first = next(iter(signature.parameters.values()), None)
    if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        return False
    return (
        first.name in ("observation", "obs")
        or _names(first.annotation, Observation)
        or _names(signature.return_annotation, Plan)
    )


def _names(annotation: object, kind: type) -> bool:
    """An annotation may be a type or, mostly, its text."""
    if isinstance(annotation, str):
        return annotation.strip("'\" ").rpartition(".")[2] == kind.__name__
    return annotation is kind


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C do not tell
        return inspect.Signature()


def parameters_of(target: object) -> Parameters:
    """What a spec may set of it; nothing of an object, which exists already."""
    kind = kind_of(target)
    if kind in (None, "object") or not callable(target):
        return Parameters({}, (), False)
    every = list(_signature(target).parameters.values())
    if kind == "function":
        every = every[1:]
    named = [p for p in every if p.kind in _BY_NAME]
    return Parameters(
        defaults={p.name: p.default for p in named if p.default is not _REQUIRED},
        required=tuple(p.name for p in named if p.default is _REQUIRED),
        any=any(p.kind is p.VAR_KEYWORD for p in every),
    )


def summary(target: object) -> str:
    """The first line of its docstring, or empty."""
    text = inspect.getdoc(target) or ""
    return text.splitlines()[0] if text else ""


def name_of(target: object) -> str:
    """Module and name of a class or function, of anything else those of its class."""
    named = target if hasattr(target, "__qualname__") else type(target)
    return f"{named.__module__}.{getattr(named, '__qualname__', '?')}"


def as_controller(target: object) -> Controller:
    """An object with ``decide``, or a plain function, as a controller. UserError for anything else."""
    if not isinstance(target, type):
        if isinstance(target, Controller) and callable(target.decide):
            return target
        if callable(target) and _takes_one(target):
            return FunctionController(target, {})
    hint = ", not a class" if isinstance(target, type) else ""
    raise UserError(
        f"controller {target!r}: must be an object with a method decide(){hint}, or a function of "
        "one observation"
    )


def _takes_one(function: Callable[..., Any]) -> bool:
    try:
        _signature(function).bind(None)
    except TypeError:
        return False
    return True


def build(target: object, spec: str, name: str, values: Mapping[str, Any]) -> Controller:
    """The controller that a target gives with these parameters.

    spec, name: what messages call it, with and without parameters. UserError for parameters it does
    not take or lacks, for a target that is none of the four things, and for whatever a class or
    factory raises.
    """
    kind = kind_of(target)
    if kind is None:
        raise UserError(f"controller {name!r} is {_article(target)}: {MUST_BE}")
    _check_parameters(target, kind, name, values)
    if kind == "object" or not callable(target):
        return as_controller(target)
    if kind == "function":
        return FunctionController(target, values)
    try:
        made = target(**values)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        log.debug("controller %r could not be made", spec, exc_info=True)
        plain = isinstance(error, (TypeError, ValueError)) and str(error)
        raise UserError(f"controller {spec!r}: {error if plain else reason(error)}") from None
    if kind_of(made) in (None, "class"):
        raise UserError(f"controller {spec!r}: the factory returned {_article(made)}")
    return as_controller(made)


def _check_parameters(target: object, kind: Kind, name: str, values: Mapping[str, Any]) -> None:
    accepted = parameters_of(target)
    for key in values:
        if not accepted.any and key not in accepted.names:
            allowed = accepted.names or ["(none)"]
            raise unknown_name(f"parameter of controller {name!r}", key, allowed)
    missing = [required for required in accepted.required if required not in values]
    if missing:
        hint = ""
        if kind == "factory" and len(missing) == 1 and not values:
            hint = " (a policy that is a plain function calls its first parameter 'observation')"
        wanted = ", ".join(f"{parameter}=..." for parameter in missing)
        raise UserError(f"controller {name!r}: needs {wanted}{hint}")


def _article(target: object) -> str:
    if isinstance(target, type):
        return f"the class {target.__name__}"
    return "None" if target is None else f"of type {type(target).__name__}"
