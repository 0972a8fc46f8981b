"""The controller interface."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from kvpolicy.control.observation import Observation, StoreView
from kvpolicy.control.plan import Plan
from kvpolicy.control.reading import per_store
from kvpolicy.errors import UserError, reason
from kvpolicy.memory.rule import CacheRule


@runtime_checkable
class Controller(Protocol):
    """Decides how many hot rows each running request keeps.

    Only ``decide`` is needed. Three more may be given: ``cache_rule``, how hot caches evict and
    admit; ``initial(stores)``, the rows a request must get before it may start (default: none,
    a request starts with its required memory and gets optional rows at the next decision); and
    ``wants_curves = True``, to find measured miss curves in the observation.
    """

    def decide(self, observation: Observation) -> Plan:
        """A proposal for the next control interval. Called every ``control_interval`` steps and
        when a request came or went; must not block, keep references or change its argument.
        Without a deadline it runs inline; with one in a thread of its own, or in a process if a spec
        names it in a file or a plug-in."""
        ...


def initial_rows(controller: Controller, stores: tuple[StoreView, ...]) -> tuple[float, ...]:
    """Hot rows per store that admission must reserve for a new request, inf for all of them.

    UserError if its ``initial`` fails or gives anything else.
    """
    initial = _attribute(controller, "initial", None)
    try:
        target = 0 if initial is None else initial(stores)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(
            f"controller {type(controller).__name__}: initial() failed: {reason(error)}"
        ) from None
    try:
        rows = per_store(target, len(stores), "initial()")
    except Exception:  # whatever it gave may raise anything
        rows = None
    if rows is None or min(rows) < 0:
        raise UserError(
            f"controller {type(controller).__name__}: initial() gave {target!r}, must be a number of "
            f"rows, at least 0, or one for each of {len(stores)} stores"
        )
    return rows


def cache_rule(controller: Controller) -> CacheRule:
    """The controller's cache rule, or the default one. UserError for anything but a CacheRule."""
    rule = _attribute(controller, "cache_rule", CacheRule())
    if not isinstance(rule, CacheRule):
        raise UserError(f"controller {type(controller).__name__}: cache_rule must be a CacheRule")
    return rule


def wants_curves(controller: Controller) -> bool:
    """Whether miss curves are to be measured for a controller (default: no, nobody pays for them)."""
    return _attribute(controller, "wants_curves", False) is True


def _attribute(controller: Controller, name: str, default: object) -> Any:
    """An optional attribute. UserError where reading it fails: it may be anybody's property."""
    try:
        return getattr(controller, name, default)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"controller {type(controller).__name__}: {name} failed: {reason(error)}"
        ) from None
