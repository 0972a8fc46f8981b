"""Other controllers' caches, kept as bookkeeping beside the live one: exact misses on the same traffic."""

from kvpolicy.shadows.watcher import Shadows

__all__ = ["Shadows"]
