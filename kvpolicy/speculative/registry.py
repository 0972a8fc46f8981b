"""Drafters by name: built in, or from a plug-in (entry-point group ``kvpolicy.drafters``).

A trained one comes with the model that it drafts for (``dspark``), or from a checkpoint folder
(``dspark:path/to/folder``).

A plug-in's value is a drafter class or factory, called as ``factory(model, tokens)``: the loaded target
model, and how many tokens a proposal may have (None: the drafter's own number).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpolicy.errors import UserError, reason, unknown_name
from kvpolicy.plugins import Found, check_name, find_plugins

if TYPE_CHECKING:
    from kvpolicy.models.loader import DecodeModel
    from kvpolicy.speculative.drafter import Drafter

__all__ = ["GROUP", "NONE", "DrafterInfo", "catalogue", "check", "make", "names", "register"]

GROUP = "kvpolicy.drafters"
NONE = "none"
DEFAULT_TOKENS = 7

Factory = Callable[..., Any]
log = logging.getLogger(__name__)

BUILT_IN: Mapping[str, str] = {
    NONE: "one token per request and step",
    "ngram": "prompt look-up: copies what followed the last tokens before; no weights",
    "dflash": "a transformer over a block of masks, its rows independent: the baseline of the next two",
    "dflash2": "that with a dynamic convolution, and a selector that walks through candidates",
    "dspark": "that with a Markov head and a confidence head: as many tokens verified as pay off",
}
TRAINED = ("dflash", "dflash2", "dspark")
"""Those that have weights."""
_registered: dict[str, Factory] = {}


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """One drafter as `kvpolicy list` shows it. distribution: of a plug-in; problem: why it is unusable."""

    name: str
    description: str
    distribution: str = ""
    problem: str = ""


def names() -> list[str]:
    """Every name that may be used. Imports nothing."""
    return list(dict.fromkeys((*BUILT_IN, *_registered, *_plugins().plugins)))


def check(name: object) -> None:
    """UserError unless ``name`` can be used. Loads nothing."""
    if isinstance(name, str) and name.partition(":")[0] in TRAINED:
        return
    if not isinstance(name, str) or name not in names():
        raise unknown_name("drafter", str(name), names())


def register(name: str, factory: Factory) -> Factory:
    """Add a drafter by name. UserError if the name is taken or cannot be used."""
    check_name("drafter", name)
    if name in names():
        raise UserError(f"drafter name {name!r} is taken")
    if not callable(factory):
        raise UserError(f"drafter {name!r}: {factory!r} must be a class or factory")
    _registered[name] = factory
    return factory


def make(spec: str | Drafter, model: DecodeModel, tokens: int | None = None) -> Drafter | None:
    """The drafter of a name for a model, None for ``none``; an object is taken as it is.

    tokens: how many a proposal may have, None for the drafter's own number. UserError for anything that
    cannot be had.
    """
    if not isinstance(spec, str):
        return checked(spec, str(getattr(spec, "name", spec)))
    check(spec)
    if spec == NONE:
        return None
    try:
        made = _factory(spec)(model, tokens)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        log.debug("drafter %r could not be made", spec, exc_info=True)
        raise UserError(f"drafter {spec!r}: {reason(error)}") from None
    return checked(made, spec)


def checked(made: Any, name: str) -> Drafter:
    """A drafter whose numbers make sense. UserError for anything else."""
    from kvpolicy.speculative.drafter import Drafter

    if isinstance(made, type) or not isinstance(made, Drafter):
        raise UserError(
            f"drafter {name!r}: must have name, taps, window, ring_width, tokens, context() "
            "and propose()"
        )
    least = {"tokens": 1, "ring_width": 0, "window": 2 if made.ring_width else 0}
    for field, low in least.items():
        value = getattr(made, field)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise UserError(
                f"drafter {name!r}: {field} = {value!r}: must be a whole number from {low} on"
            )
    return made


def catalogue() -> tuple[list[DrafterInfo], tuple[str, ...]]:
    """Every drafter, and one line about each plug-in that is refused. Imports plug-ins, if there are any."""
    found = _plugins()
    known = [DrafterInfo(name, text) for name, text in BUILT_IN.items()]
    known += [DrafterInfo(name, _summary(factory)) for name, factory in _registered.items()]
    for name, plugin in found.plugins.items():
        try:
            known.append(DrafterInfo(name, _summary(plugin.load()), plugin.distribution))
        except UserError as error:
            known.append(DrafterInfo(name, str(error), plugin.distribution, str(error)))
    return known, found.refused


def _plugins() -> Found:
    return find_plugins(GROUP, "drafter", BUILT_IN)


def _factory(name: str) -> Factory:
    if name == "ngram":
        return _ngram
    if name.partition(":")[0] in TRAINED:
        from kvpolicy.speculative.drafters.checkpoint import for_model

        method, _, folder = name.partition(":")
        return lambda model, tokens: for_model(method, model, folder or None)
    if name in _registered:
        return _registered[name]
    plugin = _plugins().plugins[name]
    target = plugin.load()
    if not callable(target):
        raise UserError(f"{plugin.label} is {type(target).__name__}: must be a class or factory")
    return target


def _ngram(model: DecodeModel, tokens: int | None) -> Drafter:
    from kvpolicy.speculative.ngram import NGram

    return NGram(tokens or DEFAULT_TOKENS)


def _summary(target: object) -> str:
    lines = (getattr(target, "__doc__", None) or "").strip().splitlines()
    return lines[0] if lines else "(no docstring)"
