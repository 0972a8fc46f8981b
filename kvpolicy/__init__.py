"""kvpolicy: explore residency policies of a hierarchical sparse KV cache on a real decode loop."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpolicy import controllers as controllers
    from kvpolicy import evictions as evictions
    from kvpolicy.config import EngineConfig as EngineConfig
    from kvpolicy.config import SamplingParams as SamplingParams
    from kvpolicy.control.observation import Observation as Observation
    from kvpolicy.control.plan import Plan as Plan
    from kvpolicy.engine.engine import Engine as Engine
    from kvpolicy.engine.request import RequestOutput as RequestOutput
    from kvpolicy.errors import UserError as UserError
    from kvpolicy.memory.rule import CacheRule as CacheRule

__version__ = "0.1.0"

_LAZY = {
    "CacheRule": "kvpolicy.memory.rule",
    "Engine": "kvpolicy.engine.engine",
    "EngineConfig": "kvpolicy.config",
    "Observation": "kvpolicy.control.observation",
    "Plan": "kvpolicy.control.plan",
    "RequestOutput": "kvpolicy.engine.request",
    "SamplingParams": "kvpolicy.config",
    "UserError": "kvpolicy.errors",
}

_MODULES = ("controllers", "evictions")

__all__ = [*_LAZY, "__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    """Import on first use: ``import kvpolicy`` itself loads no torch."""
    if name in _MODULES:
        return import_module(f"kvpolicy.{name}")
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'kvpolicy' has no attribute {name!r}")
