"""Projection: one pure function from any proposal to budgets that fit and protect what is required.

There is no illegal number. Negative becomes the floor, too large becomes full residency, and what does
not fit together shrinks in proportion, above the floor. What is no number is refused by
:mod:`kvpolicy.control.reading`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvpolicy.control.observation import Observation, RequestView
from kvpolicy.control.plan import Plan
from kvpolicy.control.pool import Pool, Rows
from kvpolicy.control.reading import read

MOST_DRAFT_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True)
class ProjectedPlan:
    """budgets: request id -> rows per store, feasible together. changed: the proposal was altered.

    reason: why, empty if it was not. draft_tokens: a request's verified tokens per step, at most; None
    without a cap.
    """

    budgets: dict[int, tuple[int, ...]]
    changed: bool
    reason: str
    draft_tokens: int | None = None


def project(plan: Plan, observation: Observation) -> ProjectedPlan:
    """Feasible budgets nearest to a plan, for exactly the requests of the observation.

    Deterministic, no side effects, takes numbers of any value. UnreadablePlan for what is none.
    """
    plan = read(plan, len(observation.stores))
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
    cap = _draft_cap(plan, reasons)
    return ProjectedPlan(budgets, bool(reasons), "; ".join(dict.fromkeys(reasons)), cap)


def _draft_cap(plan: Plan, reasons: list[str]) -> int | None:
    """Whole tokens from 0; none where the cap is above what any drafter proposes."""
    if plan.draft_tokens < 0:
        reasons.append("a negative number of draft tokens")
    return None if plan.draft_tokens >= MOST_DRAFT_TOKENS else int(max(plan.draft_tokens, 0))


def _wanted(plan: Plan, request: RequestView, floor: int, reasons: list[str]) -> tuple[int, ...]:
    target = plan.targets.get(request.request_id, plan.default)
    if target is None:
        return request.budget
    values = (
        (target,) * len(request.max_rows) if isinstance(target, (int, float)) else tuple(target)
    )
    if len(values) != len(request.max_rows):
        reasons.append(f"targets do not match {len(request.max_rows)} stores")
        return tuple(max(rows, floor) for rows in request.budget)
    if any(value < 0 for value in values):
        reasons.append("negative")
    each = zip(values, request.max_rows, strict=True)
    # The floor last: a short request may have fewer rows than the floor asks for.
    return tuple(max(int(min(max(value, floor), most)), floor) for value, most in each)


def _room(plan: Plan, pool: Pool, observation: Observation, reasons: list[str]) -> int:
    """Frames that hot rows of all requests may take together, the reserve left out."""
    room = pool.cost(pool.held) + observation.free_bytes // observation.frame_bytes
    for value, what in ((plan.reserve_rows, "rows"), (plan.reserve_bytes, "bytes")):
        if value < 0:
            reasons.append(f"reserve is a negative number of {what}")
    rows, size = (int(min(max(v, 0), 1e18)) for v in (plan.reserve_rows, plan.reserve_bytes))
    kept = int((-(-min(rows, 10**12) // pool.per_frame)).sum()) - (-size // observation.frame_bytes)
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
