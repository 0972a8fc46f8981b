"""The controller interface."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from kvpolicy.control.observation import Observation, StoreView
from kvpolicy.control.plan import Plan, Target
from kvpolicy.memory.rule import CacheRule


@runtime_checkable
class Controller(Protocol):
    """Decides how many hot rows each running request keeps.

    Only ``decide`` is needed. Two more may be given: ``cache_rule``, how hot caches evict and
    admit, and ``initial``, the rows a request must get before it may start (default: none, a
    request starts with its required memory and gets optional rows at the next decision).
    """

    def decide(self, observation: Observation) -> Plan:
        """A proposal for the next control interval. Called every ``control_interval`` steps and
        whenever a request was admitted; must not block, keep references or change its argument."""
        ...


def initial_rows(controller: Controller, stores: tuple[StoreView, ...]) -> Target:
    """Hot rows that admission must reserve for a new request: one number, or one per store."""
    initial = getattr(controller, "initial", None)
    return 0 if initial is None else initial(stores)


def cache_rule(controller: Controller) -> CacheRule:
    """The controller's cache rule, or the default one."""
    rule = getattr(controller, "cache_rule", None)
    return rule if isinstance(rule, CacheRule) else CacheRule()
