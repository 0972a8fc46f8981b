"""From an observation to the vector that an agent sees, in training and in serving alike."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpolicy.control.features import (
    GROUPS,
    PER_REQUEST,
    PER_STORE,
    VERSION,
    Feature,
    half,
    log,
)
from kvpolicy.control.observation import MissCurve, Observation
from kvpolicy.errors import UserError, unknown_name

__all__ = ["DEFAULT_GROUPS", "Encoder"]

Vector = NDArray[np.float32]

DEFAULT_GROUPS = tuple(GROUPS)
STORES, REQUESTS = "stores", "requests"


class Encoder:
    """Observation -> float32 [size], every number from 0 to 1.

    groups: names of :data:`~kvpolicy.control.features.GROUPS`, ``stores`` or ``requests``, in the
    order wanted.
    stores: how many the model has (for the group ``stores``). requests: places of the group ``requests``,
    for the requests that run longest. UserError for an unknown group, or a group without its number.
    """

    version = VERSION

    def __init__(
        self, groups: Sequence[str] = DEFAULT_GROUPS, stores: int = 0, requests: int = 0
    ) -> None:
        self.groups, self.stores, self.requests = tuple(groups), stores, requests
        for name in self.groups:
            if name not in (*GROUPS, STORES, REQUESTS):
                raise unknown_name("observation group", name, (*GROUPS, STORES, REQUESTS))
        if not self.groups or len(set(self.groups)) != len(self.groups):
            raise UserError(f"groups = {list(groups)}: must name at least one group, each once")
        for name, count in ((STORES, stores), (REQUESTS, requests)):
            if (name in self.groups) != (count > 0):
                raise UserError(f"{name} = {count}: goes with the observation group {name!r}")
        self.features = self._features()
        self.size = len(self.features)
        self.wants_curves = STORES in self.groups

    def _features(self) -> tuple[Feature, ...]:
        found: list[Feature] = []
        for name in self.groups:
            many = {STORES: (PER_STORE, self.stores), REQUESTS: (PER_REQUEST, self.requests)}
            if name not in many:
                found += GROUPS[name]
                continue
            each, count = many[name]
            for number in range(count):
                found += [
                    Feature(f"{f.name.partition('.')[0]}{number}.{f.name.partition('.')[2]}", f.unit,
                    f.squash)
                    for f in each
                ]  # fmt: skip
        return tuple(found)

    def table(self) -> list[tuple[int, str, str, str]]:
        """(index, name, unit of v, number from v), the range of every number being 0 to 1."""
        return [(i, f.name, f.unit, f.squash) for i, f in enumerate(self.features)]

    def spec(self) -> dict[str, Any]:
        """Ready for JSON: what :meth:`from_spec` makes the same encoder of."""
        return {
            "version": self.version,
            "groups": list(self.groups),
            "stores": self.stores,
            "requests": self.requests,
        }

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> Encoder:
        """UserError for another version."""
        if spec.get("version") != VERSION:
            raise UserError(
                f"observations of version {spec.get('version')!r}: this kvpolicy encodes version {VERSION}"
            )
        return cls(tuple(spec["groups"]), int(spec["stores"]), int(spec["requests"]))

    def encode(self, observation: Observation) -> Vector:
        """A new vector, float32 [size]. 32 requests take some 30 us."""
        seen = _Seen(observation)
        out: list[float] = []
        for name in self.groups:
            if name == STORES:
                out += _stores(seen, self.stores)
            elif name == REQUESTS:
                out += _requests(seen, self.requests)
            else:
                out += _GROUP[name](seen)
        vector = np.array(out, dtype=np.float32)
        # A share of nothing, or of a pool that a foreign observation made up, is no number.
        if not 0.0 <= float(vector.min()) <= float(vector.max()) <= 1.0:
            vector = np.clip(np.nan_to_num(vector, nan=0.0), 0.0, 1.0)
        return vector


class _Seen:
    """Sums over the running requests that several features need, taken in one pass."""

    def __init__(self, observation: Observation) -> None:
        self.o = o = observation
        self.pool = float(max(o.pool_bytes, 1))
        requests = o.requests
        self.count = len(requests)
        self.contexts = [r.context for r in requests]
        self.decoding = sum([r.decoding for r in requests])
        self.fetched = sum([r.fetched_rows for r in requests])
        self.unique = sum([r.unique_rows for r in requests])
        shape = (self.count, len(o.stores))
        most = _table([r.max_rows for r in requests], shape)
        held = _table([r.budget for r in requests], shape)
        self.now = now = _table([r.rows_now or r.max_rows for r in requests], shape)
        full = held >= most
        self.full = int(np.count_nonzero(full))
        self.room = np.where(full, now, np.minimum(held, now))
        sizes = np.array([s.record_bytes for s in o.stores], dtype=np.float64)
        self.full_bytes = float((now @ sizes).sum())
        self.resident_bytes = float((self.room @ sizes).sum())
        longest = np.maximum(most[:, 0], 1) if shape[1] else np.ones(self.count)
        done = now[:, 0] / longest if shape[1] else longest
        self.left = np.maximum(0.0, 1.0 - done)

    def mean(self, total: float) -> float:
        return total / self.count if self.count else 0.0


def _table(rows: list[tuple[int, ...]], shape: tuple[int, int]) -> NDArray[np.int64]:
    flat = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=shape[0] * shape[1])
    return flat.reshape(shape)


def _share(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole > 0 else 0.0


def _load(seen: _Seen) -> list[float]:
    o = seen.o
    queue = o.queue_bytes
    return [
        _share(seen.count, seen.count + o.seats_free),
        log(o.waiting, 1024),
        log(o.oldest_wait, 4096),
        half(o.arrivals, 4),
        half(o.finished, 4),
        _share(queue[0] if queue else 0, seen.pool),
        _share(sum(queue), seen.pool),
        half(o.shortages, 1),
        half(o.preemptions, 1),
    ]


def _memory(seen: _Seen) -> list[float]:
    o = seen.o
    return [
        _share(o.required_bytes, seen.pool),
        _share(o.optional_bytes, seen.pool),
        _share(o.free_bytes, seen.pool),
        _share(seen.resident_bytes, seen.full_bytes),
        _share(seen.full, seen.count * len(o.stores)),
        half(seen.full_bytes / seen.pool, 1),
    ]


def _retrieval(seen: _Seen) -> list[float]:
    o = seen.o
    worst = max([r.miss_rate for r in o.requests], default=0.0)
    return [
        _share(seen.fetched, seen.unique),
        min(1.0, worst),
        log(seen.fetched / max(o.tokens, 1), 1 << 20),
        log(o.host_to_device_bytes / max(o.interval, 1), 1 << 34),
    ]


def _latency(seen: _Seen) -> list[float]:
    o = seen.o
    tpot = ttft = 0.0
    if o.slo_tpot and o.tokens:
        each = o.step_seconds * o.interval * seen.decoding / o.tokens
        tpot = half(each / o.slo_tpot, 1)
    if o.slo_ttft:
        ttft = half(o.oldest_wait * o.step_seconds / o.slo_ttft, 1)
    return [log(o.step_seconds * 1e3, 1000), tpot, ttft]


def _acceptance(seen: _Seen) -> list[float]:
    o = seen.o
    return [half(o.tokens / max(o.interval * seen.decoding, 1), 1)]


def _context(seen: _Seen) -> list[float]:
    requests = seen.o.requests
    left = float(seen.left.sum())
    return [
        log(seen.mean(sum(seen.contexts)), 1 << 20),
        log(max(seen.contexts, default=0), 1 << 20),
        seen.mean(left),
        log(seen.mean(sum([r.age for r in requests])), 4096),
        log(seen.mean(sum([r.generated for r in requests])), 4096),
        _share(seen.count - seen.decoding, seen.count),
    ]


_GROUP = {
    "load": _load,
    "memory": _memory,
    "retrieval": _retrieval,
    "latency": _latency,
    "acceptance": _acceptance,
    "context": _context,
}


def _stores(seen: _Seen, count: int) -> list[float]:
    o = seen.o
    if len(o.stores) != count:
        raise UserError(f"an observation of {len(o.stores)} stores: the encoder has {count}")
    out: list[float] = []
    for number, store in enumerate(o.stores):
        room, now = float(seen.room[:, number].sum()), float(seen.now[:, number].sum())
        budget = seen.mean(room)
        curve = o.curves[number] if number < len(o.curves) else MissCurve()
        misses = float(np.interp(budget, curve.rows, curve.misses)) if curve.rows else 0.0
        out += [
            _share(room, now),
            half(budget / max(store.topk, 1), 4),
            _share(misses, max(store.topk, 1)),
        ]
    return out


def _requests(seen: _Seen, count: int) -> list[float]:
    out: list[float] = []
    room, now = seen.room.sum(axis=1).tolist(), seen.now.sum(axis=1).tolist()
    for number, request in enumerate(seen.o.requests[:count]):
        out += [
            1.0,
            log(request.context, 1 << 20),
            _share(room[number], now[number]),
            min(1.0, request.miss_rate),
            float(seen.left[number]),
            float(request.decoding),
        ]
    return out + [0.0] * (len(PER_REQUEST) * (count - min(count, seen.count)))
