"""Eviction rules by name: built in, registered, or from a plug-in.

Names are checked without torch; it is loaded with the first rule that is needed. What a rule is:
:mod:`kvpolicy.kernels.eviction`. The entry-point group is ``kvpolicy.evictions``; its values are
``EvictionRule`` objects.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from kvpolicy.errors import UserError, unknown_name
from kvpolicy.plugins import Found, Plugin, check_name, find_plugins

if TYPE_CHECKING:
    from kvpolicy.kernels.eviction import EvictionRule

__all__ = ["BUILT_IN", "GROUP", "EvictionInfo", "catalogue", "check", "find", "names", "register"]

GROUP = "kvpolicy.evictions"

BUILT_IN: Mapping[str, str] = {
    "clock": "a sweep that spares recently used rows once (the default, unless a controller has its own)",
    "lru": "the row unused for longest",
    "fifo": "the row loaded first, used or not",
    "random": "any row, by a counter-based draw",
}
"""Name -> one line, for every rule of kvpolicy.kernels.eviction (a test holds the two together)."""


@dataclass(frozen=True, slots=True)
class EvictionInfo:
    """One rule as `kvpolicy list` shows it. distribution: of a plug-in; problem: why it is unusable."""

    name: str
    description: str
    distribution: str = ""
    problem: str = ""


def names() -> list[str]:
    """Every name that may be used: built in, registered, then plug-ins (found, not imported)."""
    return list(dict.fromkeys((*BUILT_IN, *_registered(), *_plugins().plugins)))


def check(name: object) -> None:
    """UserError unless ``name`` can be used. Loads nothing."""
    if not isinstance(name, str) or (
        name not in BUILT_IN and name not in _registered() and name not in _plugins().plugins
    ):
        raise unknown_name("eviction", str(name), names())


def find(name: str) -> EvictionRule:
    """The rule of that name; a plug-in's is imported and registered. UserError if there is none."""
    check(name)
    from kvpolicy.kernels.eviction import RULES

    if name not in RULES:
        _load(_plugins().plugins[name])
    return RULES[name]


def register(rule: EvictionRule) -> EvictionRule:
    """Add a rule under its own name. UserError if the name is taken or cannot be used."""
    from kvpolicy.kernels.eviction import RULES, EvictionRule

    if not isinstance(rule, EvictionRule):
        raise UserError(f"eviction rule {rule!r}: must be a kvpolicy.kernels.eviction.EvictionRule")
    check_name("eviction", rule.name)
    if rule.name in RULES:
        raise UserError(f"eviction name {rule.name!r} is taken")
    RULES[rule.name] = rule
    return rule


def catalogue() -> tuple[list[EvictionInfo], tuple[str, ...]]:
    """Every rule, and one line about each plug-in that is refused. Imports plug-ins, if there are any."""
    found = _plugins()
    rules = [EvictionInfo(name, text) for name, text in BUILT_IN.items()]
    for name, rule in _registered().items():
        if name not in BUILT_IN and name not in found.plugins:
            rules.append(EvictionInfo(name, _summary(rule)))
    for name, plugin in found.plugins.items():
        try:
            rule = find(name)
        except UserError as error:
            rules.append(EvictionInfo(name, str(error), plugin.distribution, str(error)))
        else:
            rules.append(EvictionInfo(name, _summary(rule), plugin.distribution))
    return rules, found.refused


def _plugins() -> Found:
    return find_plugins(GROUP, "eviction", BUILT_IN)


def _registered() -> Mapping[str, EvictionRule]:
    """Rules so far. Whoever registered one has loaded their module, so it need not be imported."""
    module = sys.modules.get("kvpolicy.kernels.eviction")
    return {} if module is None else module.RULES


def _load(plugin: Plugin) -> None:
    """Import a plug-in and register its rule, unless its module has done that itself."""
    from kvpolicy.kernels.eviction import RULES, EvictionRule

    rule = plugin.load()
    if not isinstance(rule, EvictionRule):
        raise UserError(f"{plugin.label} is {type(rule).__name__}: must be an EvictionRule")
    if rule.name != plugin.name:
        raise UserError(f"{plugin.label} calls itself {rule.name!r}: the two names must be one")
    if RULES.get(rule.name) is not rule:
        register(rule)


def _summary(rule: EvictionRule) -> str:
    """First line of the docstring of the rule's function."""
    functions = (getattr(rule, field.name) for field in fields(rule))
    texts = (inspect.getdoc(f) for f in functions if inspect.isroutine(f))
    return next((text.splitlines()[0] for text in texts if text), "(no docstring)")
