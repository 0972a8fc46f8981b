"""The hybrid controller: resident until memory runs low, then one way; and the random one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import FRAME, observations, observe, request

from kvpolicy.control.observation import Observation, RequestView, StoreView
from kvpolicy.control.plan import FULL, Plan
from kvpolicy.control.pool import Pool
from kvpolicy.control.projection import project
from kvpolicy.controllers.base import initial_rows
from kvpolicy.controllers.hybrid import Hybrid
from kvpolicy.controllers.random import Random
from kvpolicy.controllers.registry import make
from kvpolicy.errors import UserError

K = 8
STORES = (StoreView("A", 1, K, 100, 10, 1000), StoreView("B", 2, K, 200, 5, 1000))
BUFFER = (2 * K, 2 * K)
BUFFER_FRAMES = 2 + 1 + 4 + 1


def full(number: int, rows: int, age: int) -> RequestView:
    """Fully resident: 3 frames for every 10 rows."""
    return request(number, (rows, rows), (rows + 100, rows + 100), age=age)


def with_free(observation: Observation, share: float) -> Observation:
    """The same with so much of the pool free (the rest of it is required)."""
    return replace(observation, free_bytes=int(share * observation.pool_bytes // FRAME) * FRAME)


THREE = observe(
    STORES, (full(1, 100, 90), full(2, 100, 60), full(3, 100, 30)), free=50, required=860
)


def test_everyone_stays_resident_above_the_watermark() -> None:
    """1,000 frames, 100 of them free: a tenth."""
    assert THREE.pool_bytes == 1000 * FRAME
    plan = Hybrid().decide(with_free(THREE, 0.1))
    assert plan.targets == {1: FULL, 2: FULL, 3: FULL}


def test_the_longest_running_gives_way_first() -> None:
    """Each gives 30 - 8 frames: under the mark by 5 one goes, by 30 two, by 60 all three."""
    for free, gone in ((95, [1]), (70, [1, 2]), (40, [1, 2, 3])):
        plan = Hybrid().decide(with_free(THREE, free / 1000))
        assert sorted(i for i, target in plan.targets.items() if target == BUFFER) == gone
        assert not project(plan, with_free(THREE, free / 1000)).changed


def test_who_was_in_the_buffer_never_returns() -> None:
    """Not even to an empty machine; another request of that number is another request."""
    hybrid = Hybrid()
    hybrid.decide(with_free(THREE, 0.095))
    after = replace(THREE.requests[0], budget=BUFFER)
    roomy = with_free(replace(THREE, requests=(after, *THREE.requests[1:])), 0.8)
    assert hybrid.decide(roomy).targets == {1: BUFFER, 2: FULL, 3: FULL}
    hybrid.decide(replace(roomy, requests=roomy.requests[1:]))
    assert hybrid.decide(roomy).targets == {1: FULL, 2: FULL, 3: FULL}


def test_a_newcomer_is_resident_if_that_leaves_the_watermark() -> None:
    """It starts in the buffer, so that any length can start, and is never tried a second time."""
    assert initial_rows(make("hybrid"), STORES) == BUFFER
    hybrid, views = Hybrid(), (*THREE.requests, request(4, (100, 100), BUFFER, age=1))
    grown = replace(THREE, requests=views)
    assert hybrid.decide(with_free(grown, 0.11)).targets[4] == BUFFER
    assert hybrid.decide(with_free(grown, 0.5)).targets[4] == BUFFER
    assert Hybrid().decide(with_free(grown, 0.5)).targets[4] == FULL
    short = replace(views[-1], rows_now=(10, 10), context=10)
    tight = with_free(replace(grown, requests=(*THREE.requests, short)), 0.1)
    assert Hybrid().decide(tight).targets[4] == FULL, "all of it is less than the buffer"


def test_the_first_that_waits_finds_room() -> None:
    waiting = replace(with_free(THREE, 0.1), queue_bytes=(130 * FRAME, 500 * FRAME))
    plan = Hybrid().decide(waiting)
    assert sorted(i for i, target in plan.targets.items() if target == BUFFER) == [1, 2]


@given(observation=observations())
def test_plans_fit_where_buffers_do(observation: Observation) -> None:
    hybrid = Hybrid()
    plan = hybrid.decide(observation)
    assert hybrid.decide(observation) == plan
    pool = Pool(observation)
    buffers = project(Plan.even(tuple(2 * s.topk for s in observation.stores)), observation)
    if not buffers.changed:
        assert not project(plan, observation).changed
    assert pool.held.shape[0] == len(plan.targets)


@pytest.mark.parametrize(
    "spec", ["hybrid:watermark=1", "hybrid:device_buffer_rows=x", "random:seed=-1"]
)
def test_wrong_parameters(spec: str) -> None:
    with pytest.raises(UserError, match="must be"):
        make(spec)


@given(observation=observations(), seed=st.integers(0, 99))
def test_random_is_a_function_of_seed_and_step(observation: Observation, seed: int) -> None:
    plan = Random(seed).decide(observation)
    assert Random(seed).decide(observation) == plan
    for r in observation.requests:
        target = plan.targets[r.request_id]
        assert all(0 <= t <= n for t, n in zip(target, r.rows_now or r.max_rows, strict=True))  # type: ignore[arg-type]


def test_random_draws_anew_and_leaves_room_for_the_queue() -> None:
    seen = replace(with_free(THREE, 0.1), queue_bytes=(40 * FRAME,))
    plans = [
        Random(seed).decide(replace(seen, step=step)).targets for seed in (0, 1) for step in (8, 16)
    ]
    assert len({str(plan) for plan in plans}) == 4
    budgets = project(Random().decide(seen), seen).budgets
    pool = Pool(
        replace(
            seen, requests=tuple(replace(r, budget=budgets[r.request_id]) for r in seen.requests)
        )
    )
    assert pool.cost(pool.held) <= 3 * 30 + 100 - 40
