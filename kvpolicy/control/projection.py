"""Projection: one pure function from any proposal to budgets that fit and protect what is required.

There is no illegal action. NaN becomes "keep", negative becomes the floor, too large becomes full
residency, and what does not fit together shrinks in proportion, above the floor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvpolicy.control.observation import Observation, RequestView, StoreView
from kvpolicy.control.plan import Plan, Target


@dataclass(frozen=True, slots=True)
class ProjectedPlan:
    """budgets: request id -> rows per store, feasible together. changed: the proposal was altered.

    reason: why, empty if it was not.
    """

    budgets: dict[int, tuple[int, ...]]
    changed: bool
    reason: str


def frames_of(store: StoreView, rows: int, max_rows: int) -> int:
    """Arena frames of one hot cache (a full one has no slot metadata)."""
    held = min(rows, max_rows)
    frames = -(-held // store.rows_per_frame)
    return frames if rows >= max_rows else frames + -(-held // store.meta_per_frame)


def project(plan: Plan, observation: Observation) -> ProjectedPlan:
    """Feasible budgets nearest to a plan, for exactly the requests of the observation.

    Deterministic, no side effects, never raises for a numeric proposal of any value.
    """
    reasons: list[str] = []
    wanted = {r.request_id: _wanted(plan, r, observation, reasons) for r in observation.requests}
    unknown = [i for i in plan.targets if i not in wanted]
    if unknown:
        reasons.append(f"unknown request {unknown[0]}")
    room = _room(plan, observation, reasons)
    if _cost(wanted, observation) > room:
        reasons.append("more than the memory there is")
        wanted = _shrink(wanted, observation, room)
    return ProjectedPlan(wanted, bool(reasons), "; ".join(dict.fromkeys(reasons)))


def _wanted(
    plan: Plan, request: RequestView, observation: Observation, reasons: list[str]
) -> tuple[int, ...]:
    target = plan.targets.get(request.request_id, plan.default)
    if target is None:
        return request.budget
    values = _per_store(target, len(request.max_rows), reasons)
    rows = []
    for value, most, now in zip(values, request.max_rows, request.budget, strict=True):
        if value is None or math.isnan(value):
            reasons.append("not a number")
            rows.append(now)
        elif value < observation.floor_rows:
            if value < 0:
                reasons.append("negative")
            rows.append(observation.floor_rows)
        else:
            rows.append(int(min(value, most)))
    return tuple(max(r, observation.floor_rows) for r in rows)


def _per_store(target: Target, stores: int, reasons: list[str]) -> list[float | None]:
    if isinstance(target, Sequence) and not isinstance(target, (str, bytes)):
        values = [_number(v) for v in target]
        if len(values) != stores:
            reasons.append(f"{len(values)} targets for {stores} stores")
            values = [None] * stores
        return values
    return [_number(target)] * stores


def _number(value: object) -> float | None:
    if isinstance(value, (str, bytes)):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    except OverflowError:  # a whole number beyond 1.8e308
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]


def _room(plan: Plan, observation: Observation, reasons: list[str]) -> int:
    """Frames that hot rows of all requests may take together, the reserve left out."""
    held = sum(
        frames_of(store, rows, most)
        for request in observation.requests
        for store, rows, most in zip(
            observation.stores, request.budget, request.max_rows, strict=True
        )
    )
    room = held + observation.free_bytes // observation.frame_bytes
    reserve = _number(plan.reserve_rows)
    if reserve is None or math.isnan(reserve) or reserve < 0:
        reasons.append("reserve is not a number of rows")
        return room
    if reserve == 0:
        return room
    kept = sum(-(-int(min(reserve, 1e12)) // store.rows_per_frame) for store in observation.stores)
    return max(0, room - kept)


def _cost(budgets: dict[int, tuple[int, ...]], observation: Observation) -> int:
    return sum(
        frames_of(store, rows, most)
        for request in observation.requests
        for store, rows, most in zip(
            observation.stores, budgets[request.request_id], request.max_rows, strict=True
        )
    )


def _shrink(
    wanted: dict[int, tuple[int, ...]], observation: Observation, room: int
) -> dict[int, tuple[int, ...]]:
    """Scale everything above the floor by one factor, the largest of 1/1024 steps that fits.

    A cache that would take no fewer frames than full residency (a short request: one frame of rows
    against one of rows and one of metadata) becomes full. So the floor always fits: admission
    reserved the cheaper of its two forms.
    """
    floor = observation.floor_rows

    def scale(store: StoreView, rows: int, most: int, part: int) -> int:
        rows = floor + (rows - floor) * part // 1024
        return most if frames_of(store, rows, most) > frames_of(store, most, most) else rows

    def scaled(part: int) -> dict[int, tuple[int, ...]]:
        return {
            r.request_id: tuple(
                scale(store, rows, most, part)
                for store, rows, most in zip(
                    observation.stores, wanted[r.request_id], r.max_rows, strict=True
                )
            )
            for r in observation.requests
        }

    low, high = 0, 1023
    while low < high:
        middle = (low + high + 1) // 2
        if _cost(scaled(middle), observation) <= room:
            low = middle
        else:
            high = middle - 1
    return scaled(low)
