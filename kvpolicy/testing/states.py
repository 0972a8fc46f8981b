"""Observations to try a controller with: ordinary ones, and ones that no tame test would make.

All of them are consistent: budgets lie within what requests can have, and the pool is as large as its
parts together. What is unusual about a state is its size, or that something is missing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from kvpolicy.control.observation import MissCurve, Observation, RequestView, StoreView
from kvpolicy.control.pool import Pool

__all__ = ["KINDS", "ordinary", "states"]

FRAME = 4096
# A model of four layer groups such as tiny-dsa's, and one of many.
FEW, MANY = 3, 24


def states(count: int, seed: int) -> Iterator[tuple[str, Observation]]:
    """``count`` states with the name of their kind, all kinds in turn; the same for the same seed."""
    draw = random.Random(seed)
    for i in range(count):
        kind = KINDS[i % len(KINDS)]
        yield kind, _KINDS[kind](draw)


def ordinary(seed: int, requests: int, steps: int) -> Iterator[Observation]:
    """A load as an engine would show it: the same requests from decision to decision, contexts that
    grow, requests that end and others that come."""
    draw = random.Random(seed)
    stores = _stores(draw, FEW, topk=128)
    views = [_request(draw, number, stores) for number in range(requests)]
    for step in range(steps):
        if step % 5 == 4:
            views = [*views[1:], _request(draw, requests + step, stores)]
        views = [_older(draw, view) for view in views]
        queue = tuple(draw.randint(1, 40) for _ in range(draw.choice([0, 0, 2])))
        yield _observation(draw, stores, views, draw.randint(0, 400), queue, step=8 * step + 8)


def _older(draw: random.Random, view: RequestView) -> RequestView:
    context = min(view.context + 8, view.max_rows[0])
    now = tuple(min(context + 64, most) for most in view.max_rows)
    unique = 8 * 128 * len(now)
    return replace(
        view,
        context=context,
        rows_now=now,
        age=view.age + 8,
        generated=view.generated + 8,
        selected_rows=unique,
        unique_rows=unique,
        fetched_rows=draw.randint(0, unique),
    )


def _stores(draw: random.Random, count: int, topk: int | None = None) -> tuple[StoreView, ...]:
    return tuple(
        StoreView(
            name=f"group-{i}",
            layers=draw.randint(1, 4),
            topk=topk or draw.randint(1, 64),
            record_bytes=draw.randint(16, 4000),
            rows_per_frame=draw.randint(1, 30),
            meta_per_frame=draw.randint(1, 500),
        )
        for i in range(count)
    )


def _request(
    draw: random.Random,
    number: int,
    stores: tuple[StoreView, ...],
    context: int | None = None,
    full: bool | None = None,
) -> RequestView:
    size = draw.randint(0, 4000) if context is None else context
    most = tuple(size + draw.randint(1, 600) for _ in stores)
    now = tuple(min(size + draw.randint(0, 64), each) for each in most)
    all_full = draw.random() < 0.3 if full is None else full
    budget = tuple(each if all_full else draw.randint(0, max(0, each - 1)) for each in most)
    unique = draw.randint(0, 4096)
    return RequestView(
        request_id=number,
        context=size,
        max_rows=most,
        budget=budget,
        decoding=draw.random() < 0.8,
        age=draw.randint(0, 5000),
        generated=draw.randint(0, 500),
        selected_rows=unique,
        unique_rows=unique,
        fetched_rows=draw.randint(0, unique),
        rows_now=now,
    )


def _curve(draw: random.Random, store: StoreView) -> MissCurve:
    points = draw.randint(0, 16)
    falls = sorted((draw.uniform(0, store.topk) for _ in range(points)), reverse=True)
    half = max(1, store.topk // 2)
    rows = tuple(half * i for i in range(points))
    return MissCurve(rows, tuple(falls), draw.choice([0.0, 20.0, 500.0]) if points else 0.0)


def _observation(
    draw: random.Random,
    stores: tuple[StoreView, ...],
    requests: list[RequestView],
    free: int,
    queue: tuple[int, ...] = (),
    step: int = 640,
    curves: bool = True,
) -> Observation:
    """free, queue: frames."""
    bare = Observation(
        step=step, interval=8, frame_bytes=FRAME, pool_bytes=0, required_bytes=0, optional_bytes=0,
        free_bytes=free * FRAME, floor_rows=0, waiting=len(queue), oldest_wait=3 * len(queue),
        arrivals=draw.randint(0, 3), finished=draw.randint(0, 3), step_seconds=draw.uniform(0, 0.1),
        host_to_device_bytes=draw.randint(0, 1 << 30), stores=stores, requests=tuple(requests),
        seats_free=draw.randint(0, 8), queue_bytes=tuple(frames * FRAME for frames in queue),
        shortages=draw.choice([0, 0, 3]), preemptions=draw.choice([0, 0, 1]),
        tokens=8 * len(requests),
        curves=tuple(_curve(draw, store) for store in stores) if curves else (),
        slo_tpot=draw.choice([None, 0.05]), slo_ttft=draw.choice([None, 2.0]),
    )  # fmt: skip
    pool = Pool(bare)
    hot = pool.cost(pool.held) * FRAME
    required = draw.randint(1, 3000) * FRAME
    return replace(
        bare, optional_bytes=hot, required_bytes=required,
        pool_bytes=hot + required + free * FRAME,
    )  # fmt: skip


def _some(draw: random.Random, free: int, most: int = 8) -> Observation:
    stores = _stores(draw, draw.randint(1, FEW))
    requests = [_request(draw, i, stores) for i in range(draw.randint(1, most))]
    queue = tuple(draw.randint(1, 60) for _ in range(draw.choice([0, 0, 3])))
    return _observation(draw, stores, requests, free, queue, curves=draw.random() < 0.5)


def _nobody(draw: random.Random) -> Observation:
    """No request on the device."""
    return _observation(draw, _stores(draw, FEW), [], draw.randint(0, 1000))


def _packed(draw: random.Random) -> Observation:
    """Not one frame is free, and a queue."""
    return replace(_some(draw, 0), waiting=5, oldest_wait=400)


def _new(draw: random.Random) -> Observation:
    """The first decision: nothing has been computed, nothing is known."""
    stores = _stores(draw, FEW)
    requests = [replace(_request(draw, 0, stores, 0, False), decoding=False, budget=(0,) * FEW)]
    found = _observation(draw, stores, requests, 500, step=0, curves=False)
    return replace(found, interval=0, step_seconds=0.0, tokens=0)


def _crowd(draw: random.Random) -> Observation:
    """128 requests over many layer groups."""
    stores = _stores(draw, MANY)
    requests = [_request(draw, i, stores) for i in range(128)]
    return _observation(draw, stores, requests, draw.randint(0, 5000))


def _huge(draw: random.Random) -> Observation:
    """Contexts of a billion tokens, ids beyond 2^40, a pool of exabytes."""
    stores = _stores(draw, FEW)
    requests = [_request(draw, (1 << 40) + 7 * i, stores, draw.randint(0, 10**9)) for i in range(4)]
    return _observation(draw, stores, requests, 10**12)


def _tiny(draw: random.Random) -> Observation:
    """Stores of one row per frame and a top-k of 1; contexts of a token or none."""
    stores = tuple(replace(s, topk=1, rows_per_frame=1, meta_per_frame=1) for s in _stores(draw, 2))
    requests = [_request(draw, i, stores, draw.randint(0, 1)) for i in range(3)]
    return _observation(draw, stores, requests, draw.randint(0, 3))


def _floored(draw: random.Random) -> Observation:
    """A floor above what some requests can have."""
    return replace(_some(draw, draw.randint(0, 300)), floor_rows=draw.randint(1, 2000))


def _full(draw: random.Random) -> Observation:
    """Everybody is fully resident, and memory is free."""
    stores = _stores(draw, FEW)
    requests = [_request(draw, i, stores, full=True) for i in range(5)]
    return _observation(draw, stores, requests, draw.randint(0, 4000))


_KINDS = {
    "some requests": lambda draw: _some(draw, draw.randint(0, 600)),
    "no request": _nobody,
    "full pool": _packed,
    "first decision": _new,
    "huge numbers": _huge,
    "tiny stores": _tiny,
    "high floor": _floored,
    "all resident": _full,
    "128 requests": _crowd,
}
KINDS = tuple(_KINDS)
"""Names of the kinds of states."""
