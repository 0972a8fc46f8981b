"""What an agent sees of an observation: named features, each a number from 0 to 1, in named groups.

A feature is a *squash* of a physical value, so that no value is out of range and none needs statistics
of a training run. ``VERSION`` changes whenever a number's place or meaning does; a policy names the one it
was trained with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["GROUPS", "PER_REQUEST", "PER_STORE", "VERSION", "Feature"]

VERSION = "1"


@dataclass(frozen=True, slots=True)
class Feature:
    """One number. unit: of the value v that is squashed; squash: how it becomes a number of 0 to 1."""

    name: str
    unit: str
    squash: str


_SHARE = "v, at most 1"


def _half(value: float) -> str:
    return f"v / (v + {value:g})"


def _log(most: float) -> str:
    return f"log(1 + v) / log(1 + {most:g})"


GROUPS: dict[str, tuple[Feature, ...]] = {
    "load": (
        Feature("running", "share of the seats", _SHARE),
        Feature("waiting", "requests", _log(1024)),
        Feature("oldest_wait", "steps", _log(4096)),
        Feature("arrivals", "requests since the last decision", _half(4)),
        Feature("finished", "requests since the last decision", _half(4)),
        Feature("queue_head", "share of the pool that the first waiting request needs", _SHARE),
        Feature("queue", "share of the pool that waiting requests with a seat need", _SHARE),
        Feature("shortages", "times since the last decision", _half(1)),
        Feature("preemptions", "requests since the last decision", _half(1)),
    ),
    "memory": (
        Feature("required", "share of the pool", _SHARE),
        Feature("optional", "share of the pool", _SHARE),
        Feature("free", "share of the pool", _SHARE),
        Feature("resident", "share of all committed rows that have room on the device", _SHARE),
        Feature("full", "share of hot caches that are fully resident", _SHARE),
        Feature("demand", "what full residency of all who run takes, in pools", _half(1)),
    ),
    "retrieval": (
        Feature("miss_rate", "fetched rows per selected row", _SHARE),
        Feature("miss_rate_worst", "the same of the request that has most", _SHARE),
        Feature("fetched", "rows per generated token", _log(1 << 20)),
        Feature("link", "bytes per step", _log(1 << 34)),
    ),
    "latency": (
        Feature("step", "milliseconds per step", _log(1000)),
        Feature("tpot", "time per token in units of its bound, 0 without one", _half(1)),
        Feature("ttft", "the oldest wait in units of its bound, 0 without one", _half(1)),
    ),
    "acceptance": (Feature("accepted", "tokens per decoding request and step", _half(1)),),
    "context": (
        Feature("context", "tokens, mean of who runs", _log(1 << 20)),
        Feature("context_most", "tokens, longest", _log(1 << 20)),
        Feature("left", "share of their final length that is still to come", _SHARE),
        Feature("age", "steps on the device, mean", _log(4096)),
        Feature("generated", "tokens, mean", _log(4096)),
        Feature("reading", "share of who runs that still reads its prompt", _SHARE),
    ),
}
"""Groups that do not depend on the model, in their order."""

PER_STORE: tuple[Feature, ...] = (
    Feature("store.resident", "share of this store's committed rows that have room", _SHARE),
    Feature("store.budget", "mean budget in units of top-k", _half(4)),
    Feature("store.misses", "measured misses at the mean budget, share of top-k", _SHARE),
)
"""Group ``stores``: these for each store."""

PER_REQUEST: tuple[Feature, ...] = (
    Feature("request.here", "1 where this place is taken", _SHARE),
    Feature("request.context", "tokens", _log(1 << 20)),
    Feature("request.resident", "share of its rows that have room", _SHARE),
    Feature("request.miss_rate", "fetched rows per selected row", _SHARE),
    Feature("request.left", "share of its final length that is still to come", _SHARE),
    Feature("request.decoding", "1 past its prompt", _SHARE),
)
"""Group ``requests``: these for each of the first N running requests, 0 where there are fewer."""


def half(value: float, at: float) -> float:
    """0.5 where the value equals ``at``."""
    return value / (value + at)


_LOGS = {most: math.log1p(most) for most in (1000, 1024, 4096, 1 << 20, 1 << 34)}


def log(value: float, most: int) -> float:
    """1 where the value is ``most`` or more."""
    return min(1.0, math.log1p(value) / _LOGS[most])
