"""From what an agent says to a plan: action spaces by name, the same in training and in serving.

    global               how much spare memory holds history, how much waits for arrivals, how stores share
    discrete             levels of the first two, for agents that choose one of n
    per_request          a target for each of the first N running requests
    per_store            a target for each store, the same for every request
    per_request_levels   the last two in levels (MultiDiscrete), with masks
    per_store_levels

A plan may ask for anything: projection makes it fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvpolicy.control.observation import MissCurve, Observation
from kvpolicy.control.plan import FULL, Plan, Target
from kvpolicy.errors import UserError, unknown_name

__all__ = ["ACTIONS", "Actions", "Knob", "make_actions"]

Masks = NDArray[np.bool_]

# Most of the pool that `global` keeps free for arrivals.
MOST_RESERVE = 0.25
# `discrete`: shares of spare memory that hold history, each with nothing and with a tenth in reserve.
RETAINED = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
RESERVES = (0.0, 0.1)
# Levels of a target, in units of top-k; the last is everything.
LEVELS = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0, FULL)
# What a context may grow by while it still counts as fitting: one lot of room.
MARGIN = 64


@dataclass(frozen=True, slots=True)
class Knob:
    """One component of an action. low, high: its range; levels: how many values, 0 for any number."""

    name: str
    meaning: str
    low: float = -1.0
    high: float = 1.0
    levels: int = 0


class Actions(Protocol):
    """An action space. kind: ``box`` (float32 in [-1, 1]), ``discrete`` or ``multi_discrete``."""

    name: str
    kind: str
    knobs: tuple[Knob, ...]
    wants_curves: bool

    def decode(self, action: Any, observation: Observation) -> Plan:
        """The plan that an action means here. UserError for an action of another shape."""
        ...

    def masks(self, observation: Observation) -> Masks | None:
        """Of a multi-discrete space, which levels mean something now: bool, all knobs one after another."""
        ...

    def spec(self) -> dict[str, Any]:
        """Ready for JSON: the arguments of :func:`make_actions`."""
        ...


class _Box:
    kind = "box"
    knobs: tuple[Knob, ...] = ()
    wants_curves = False

    def _shares(self, action: Any) -> list[float]:
        """Each component from 0 to 1. What is no number counts as 0."""
        values = np.asarray(action, dtype=np.float64).ravel().tolist()
        if len(values) != len(self.knobs):
            raise UserError(f"action of {len(values)} numbers: must have {len(self.knobs)}")
        return [0.0 if v != v else min(max((v + 1) / 2, 0.0), 1.0) for v in values]

    def masks(self, observation: Observation) -> Masks | None:
        return None


class Global(_Box):
    """Three knobs for the whole engine."""

    name = "global"
    wants_curves = True
    knobs = (
        Knob("retained", "share of spare memory that holds history: -1 nothing, 1 all of it"),
        Knob("reserve", f"kept free for arrivals: -1 nothing, 1 {MOST_RESERVE:.0%} of the pool"),
        Knob(
            "skew",
            "split between stores: -1 the same multiple of top-k, 1 by measured misses "
            "(rows in proportion to the root of misses times rows)",
        ),
    )

    def decode(self, action: Any, observation: Observation) -> Plan:
        retained, reserve, skew = self._shares(action)
        return spread(observation, retained, reserve * MOST_RESERVE, skew)

    def spec(self) -> dict[str, Any]:
        return {"name": self.name}


class Discrete:
    """One of 18: a share of spare memory that holds history, with or without a reserve."""

    name, kind = "discrete", "discrete"
    wants_curves = False
    knobs = (
        Knob(
            "level",
            f"retained {', '.join(f'{r:g}' for r in RETAINED)} without a reserve, then the same with "
            f"{RESERVES[1]:.0%} of the pool kept free",
            0,
            len(RETAINED) * len(RESERVES) - 1,
            len(RETAINED) * len(RESERVES),
        ),
    )

    def decode(self, action: Any, observation: Observation) -> Plan:
        level = int(np.asarray(action).item())
        if not 0 <= level < len(RETAINED) * len(RESERVES):
            raise UserError(f"action {level}: must be 0 to {len(RETAINED) * len(RESERVES) - 1}")
        reserve, retained = divmod(level, len(RETAINED))
        return spread(observation, RETAINED[retained], RESERVES[reserve], 0.0)

    def masks(self, observation: Observation) -> Masks | None:
        return None

    def spec(self) -> dict[str, Any]:
        return {"name": self.name}


class PerRequest(_Box):
    """A target for each of the first N running requests, the oldest first; others keep their budget."""

    name = "per_request"

    def __init__(self, requests: int) -> None:
        self.requests = requests
        self.knobs = tuple(
            Knob(f"request{i}", "target: -1 nothing, 1 everything, between x^3 of all rows")
            for i in range(requests)
        )

    def decode(self, action: Any, observation: Observation) -> Plan:
        shares = self._shares(action)
        pairs = zip(observation.requests, shares, strict=False)
        return Plan(
            targets={
                r.request_id: tuple(_rows(share, n) for n in r.rows_now or r.max_rows)
                for r, share in pairs
            }
        )

    def spec(self) -> dict[str, Any]:
        return {"name": self.name, "requests": self.requests}


class PerStore(_Box):
    """A target for each store, the same for every request."""

    name = "per_store"

    def __init__(self, stores: int) -> None:
        self.stores = stores
        self.knobs = tuple(
            Knob(f"store{i}", "target: -1 nothing, 1 everything, between x^3 of all rows")
            for i in range(stores)
        )

    def decode(self, action: Any, observation: Observation) -> Plan:
        shares = self._shares(action)
        _check_stores(observation, self.stores)
        return Plan(
            targets={
                r.request_id: tuple(
                    _rows(share, n)
                    for share, n in zip(shares, r.rows_now or r.max_rows, strict=True)
                )
                for r in observation.requests
            }
        )

    def spec(self) -> dict[str, Any]:
        return {"name": self.name, "stores": self.stores}


class _Levels:
    kind = "multi_discrete"
    wants_curves = False
    knobs: tuple[Knob, ...] = ()

    def _levels(self, action: Any) -> list[int]:
        levels: list[int] = np.asarray(action).ravel().tolist()
        if len(levels) != len(self.knobs) or not all(0 <= v < len(LEVELS) for v in levels):
            raise UserError(
                f"action {levels}: must be {len(self.knobs)} levels of 0 to {len(LEVELS) - 1}"
            )
        return [int(level) for level in levels]


_LEVEL_TEXT = "target: " + ", ".join(f"{v:g}" for v in LEVELS[:-1]) + " x top-k, everything"


class PerRequestLevels(_Levels):
    """As per_request, in levels."""

    name = "per_request_levels"

    def __init__(self, requests: int) -> None:
        self.requests = requests
        self.knobs = tuple(
            Knob(f"request{i}", _LEVEL_TEXT, 0, len(LEVELS) - 1, len(LEVELS))
            for i in range(requests)
        )

    def decode(self, action: Any, observation: Observation) -> Plan:
        levels = self._levels(action)
        topk = [store.topk for store in observation.stores]
        pairs = zip(observation.requests, levels, strict=False)
        return Plan(
            targets={r.request_id: tuple(LEVELS[level] * k for k in topk) for r, level in pairs}
        )

    def masks(self, observation: Observation) -> Masks | None:
        """A place that nobody has means nothing: level 0 only. So does a level beyond everything."""
        out = np.zeros((self.requests, len(LEVELS)), dtype=bool)
        out[:, 0] = True
        most = np.array(LEVELS[:-1])
        for row, request in zip(out, observation.requests, strict=False):
            now = request.rows_now or request.max_rows
            each = zip(now, observation.stores, strict=True)
            useful = max((n / max(s.topk, 1) for n, s in each), default=0.0)
            row[:-1] |= most < useful
            row[-1] = True
        return out.ravel()

    def spec(self) -> dict[str, Any]:
        return {"name": self.name, "requests": self.requests}


class PerStoreLevels(_Levels):
    """As per_store, in levels."""

    name = "per_store_levels"

    def __init__(self, stores: int) -> None:
        self.stores = stores
        self.knobs = tuple(
            Knob(f"store{i}", _LEVEL_TEXT, 0, len(LEVELS) - 1, len(LEVELS)) for i in range(stores)
        )

    def decode(self, action: Any, observation: Observation) -> Plan:
        levels = self._levels(action)
        _check_stores(observation, self.stores)
        each = zip(levels, observation.stores, strict=True)
        return Plan(default=tuple(LEVELS[level] * store.topk for level, store in each))

    def masks(self, observation: Observation) -> Masks | None:
        """A level beyond everything that any request has means nothing."""
        _check_stores(observation, self.stores)
        out = np.zeros((self.stores, len(LEVELS)), dtype=bool)
        out[:, 0] = out[:, -1] = True
        most = np.array(LEVELS[:-1])
        for number, store in enumerate(observation.stores):
            now = max([(r.rows_now or r.max_rows)[number] for r in observation.requests], default=0)
            out[number, :-1] |= most < now / max(store.topk, 1)
        return out.ravel()

    def spec(self) -> dict[str, Any]:
        return {"name": self.name, "stores": self.stores}


def _check_stores(observation: Observation, stores: int) -> None:
    if len(observation.stores) != stores:
        raise UserError(
            f"an observation of {len(observation.stores)} stores: the action space has {stores}"
        )


def _rows(share: float, rows: int) -> float:
    """x^3 of all rows: a budget of a few per cent is where most is decided."""
    return FULL if share >= 0.9995 else math.floor(share**3 * rows)


def spread(observation: Observation, retained: float, reserve: float, skew: float) -> Plan:
    """Share out memory: ``retained`` of what hot rows could take, less a ``reserve`` (share of the pool),
    evenly among who runs; who needs less than an even share is fully resident, and leaves the rest.

    skew: 0 gives every store the same multiple of its top-k; 1 gives it rows in proportion to the root of
    (misses x rows) at the middle of its measured curve, times the bytes that they share: the optimum where
    misses fall as c / rows (Lagrange: the marginal miss per byte c / rows^2 is the same for all).
    """
    o = observation
    kept = reserve * o.pool_bytes
    room = max(0.0, retained * (o.optional_bytes + o.free_bytes - kept))
    plan_reserve = float(kept)
    if not o.requests or not o.stores:
        return Plan(reserve_bytes=plan_reserve)
    sizes = [store.record_bytes for store in o.stores]
    shape = (len(o.requests), len(sizes))
    count = shape[0] * shape[1]
    rows_now = chain.from_iterable([r.rows_now or r.max_rows for r in o.requests])
    now = np.fromiter(rows_now, dtype=np.int64, count=count).reshape(shape)
    most_rows = chain.from_iterable([r.max_rows for r in o.requests])
    most = np.fromiter(most_rows, dtype=np.int64, count=count).reshape(shape)
    needs: list[float] = (np.minimum(now + MARGIN, most) @ np.array(sizes)).tolist()
    level = _level(needs, room)
    weights = _weights(o, skew)
    unit = sum([w * size for w, size in zip(weights, sizes, strict=True)])
    full: Target = FULL
    # inf: everyone is full.
    each = 0.0 if math.isinf(level) or unit <= 0 else level / unit
    rows: Target = tuple(math.floor(each * w) for w in weights)
    pairs = zip(o.requests, needs, strict=True)
    targets = {r.request_id: full if need <= level else rows for r, need in pairs}
    return Plan(targets=targets, reserve_bytes=plan_reserve)


def _level(needs: Sequence[float], room: float) -> float:
    """The level such that everyone having the lesser of it and their need takes ``room`` together."""
    left, others = room, len(needs)
    for need in sorted(needs):
        if need * others > left:
            return left / others
        left -= need
        others -= 1
    return math.inf


def _weights(observation: Observation, skew: float) -> list[float]:
    """Rows of each store relative to the others'."""
    even = [float(store.topk) for store in observation.stores]
    if skew <= 0 or len(observation.curves) != len(even):
        return even
    hungers: list[float] = []
    for store, curve in zip(observation.stores, observation.curves, strict=True):
        hunger = _hunger(curve)
        if hunger is None:
            return even
        hungers.append(math.sqrt(hunger) / store.topk)
    mean = sum(hungers) / len(hungers)
    if mean <= 0:
        return even
    return [e * max(h / mean, 1 / 16) ** skew for e, h in zip(even, hungers, strict=True)]


def _hunger(curve: MissCurve) -> float | None:
    """misses x rows in the middle of a curve; None where nothing is measured."""
    points = [(r, m) for r, m in zip(curve.rows, curve.misses, strict=True) if r > 0]
    if not points:
        return None
    rows, misses = points[len(points) // 2]
    return rows * misses


ACTIONS: Mapping[str, type[Any]] = {
    kind.name: kind
    for kind in (Global, Discrete, PerRequest, PerStore, PerRequestLevels, PerStoreLevels)
}
"""Action spaces by name."""


def make_actions(name: str, requests: int = 0, stores: int = 0) -> Actions:
    """An action space. requests, stores: places of those that have one per request or store. UserError
    for an unknown name, or a missing number."""
    if name not in ACTIONS:
        raise unknown_name("action space", name, ACTIONS)
    if name.startswith("per_request"):
        if requests < 1:
            raise UserError(f"requests = {requests}: action space {name!r} needs at least 1")
        made: Actions = ACTIONS[name](requests)
    elif name.startswith("per_store"):
        if stores < 1:
            raise UserError(f"stores = {stores}: action space {name!r} needs at least 1")
        made = ACTIONS[name](stores)
    else:
        made = ACTIONS[name]()
    return made
