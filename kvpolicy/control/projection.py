"""Projection: one pure function from any proposal to budgets that fit and protect what is required.

There is no illegal action. NaN becomes "keep", negative becomes the floor, too large becomes full
residency, and what does not fit together shrinks in proportion, above the floor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np

from kvpolicy.control.observation import Observation, RequestView, StoreView
from kvpolicy.control.plan import Plan
from kvpolicy.control.pool import Pool, Rows


@dataclass(frozen=True, slots=True)
class ProjectedPlan:
    """budgets: request id -> rows per store, feasible together. changed: the proposal was altered.

    reason: why, empty if it was not.
    """

    budgets: dict[int, tuple[int, ...]]
    changed: bool
    reason: str


def frames_of(store: StoreView, rows: int, max_rows: int, rows_now: int | None = None) -> int:
    """Arena frames of one hot cache. A full one (rows at or above max_rows) has no slot metadata,
    and room for ``rows_now`` entries so far."""
    if rows >= max_rows:
        return -(-(max_rows if rows_now is None else rows_now) // store.rows_per_frame)
    return -(-rows // store.rows_per_frame) + -(-rows // store.meta_per_frame)


def project(plan: Plan, observation: Observation) -> ProjectedPlan:
    """Feasible budgets nearest to a plan, for exactly the requests of the observation.

    Deterministic, no side effects, never raises for a numeric proposal of any value.
    """
    reasons: list[str] = []
    running = {r.request_id for r in observation.requests}
    unknown = [i for i in plan.targets if i not in running]
    if unknown:
        reasons.append(f"unknown request {unknown[0]}")
    pool = Pool(observation)
    wanted = np.array(
        [_wanted(plan, r, observation.floor_rows, reasons) for r in observation.requests],
        dtype=np.int64,
    ).reshape(pool.most.shape)
    room = _room(plan, pool, observation, reasons)
    if pool.cost(wanted) > room:
        reasons.append("more than the memory there is")
        wanted = _shrink(wanted, pool, observation.floor_rows, room)
    budgets = {
        r.request_id: tuple(row)
        for r, row in zip(observation.requests, wanted.tolist(), strict=True)
    }
    return ProjectedPlan(budgets, bool(reasons), "; ".join(dict.fromkeys(reasons)))


def _wanted(plan: Plan, request: RequestView, floor: int, reasons: list[str]) -> tuple[int, ...]:
    target = plan.targets.get(request.request_id, plan.default)
    if target is None:
        return request.budget
    values = per_store(target, len(request.max_rows))
    if values is None:
        reasons.append(f"targets do not match {len(request.max_rows)} stores")
        values = [None] * len(request.max_rows)
    rows = []
    for value, most, now in zip(values, request.max_rows, request.budget, strict=True):
        if value is None or math.isnan(value):
            reasons.append("not a number")
            rows.append(now)
        else:
            if value < 0:
                reasons.append("negative")
            rows.append(int(min(max(value, floor), most)))
    return tuple(max(r, floor) for r in rows)


def per_store(target: object, stores: int) -> list[float | None] | None:
    """A target as one number per store; None for what is no number, or for a wrong length.

    Takes a number, or any sequence or array of them, which need not end; text is no number.
    """
    if isinstance(target, (str, bytes, Mapping)) or not isinstance(target, Iterable):
        return [_number(target)] * stores
    try:
        values = [_number(value) for value in islice(target, stores + 1)]
    except TypeError:  # an array without dimensions
        return [_number(target)] * stores
    return values if len(values) == stores else None


def _number(value: object) -> float | None:
    if isinstance(value, (str, bytes)):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:  # a whole number beyond 1.8e308
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]
    except Exception:
        return None


def _room(plan: Plan, pool: Pool, observation: Observation, reasons: list[str]) -> int:
    """Frames that hot rows of all requests may take together, the reserve left out."""
    room = pool.cost(pool.held) + observation.free_bytes // observation.frame_bytes
    reserve = _number(plan.reserve_rows)
    if reserve is None or math.isnan(reserve) or reserve < 0:
        reasons.append("reserve is not a number of rows")
        return room
    kept = int((-(-int(min(reserve, 1e12)) // pool.per_frame)).sum())
    size = _number(plan.reserve_bytes)
    if size is None or math.isnan(size) or size < 0:
        reasons.append("reserve is not a number of bytes")
        return max(0, room - kept)
    kept += -(-int(min(size, 1e18)) // observation.frame_bytes)
    return max(0, room - kept)


def _shrink(wanted: Rows, pool: Pool, floor: int, room: int) -> Rows:
    """Scale everything above the floor by one factor, the largest of 1/1024 steps that fits.

    A cache becomes full where that takes fewer frames for good (a short request: one frame of rows
    against one of rows and one of metadata), and one that is full stays so where it takes fewer as
    it is; so the floor fits wherever it did before.
    """
    full = np.where(pool.held >= pool.most, pool.whole(pool.now), pool.whole(pool.most))

    def scaled(part: int) -> Rows:
        rows = floor + (wanted - floor) * part // 1024
        return np.where(pool.frames(rows) > full, pool.most, rows)

    low, high = 0, 1023
    while low < high:
        middle = (low + high + 1) // 2
        if pool.cost(scaled(middle)) <= room:
            low = middle
        else:
            high = middle - 1
    return scaled(low)
