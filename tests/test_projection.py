"""Projection: any proposal becomes budgets that fit, protect the floor, and can be applied."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from observations import frames_of

from kvpolicy.control.observation import Observation, RequestView, StoreView
from kvpolicy.control.plan import FULL, Plan
from kvpolicy.control.projection import ProjectedPlan, project
from kvpolicy.control.reading import UnreadablePlan, read
from kvpolicy.engine.loop import store_views
from kvpolicy.errors import CapacityError
from kvpolicy.geometry.presets import TOY
from kvpolicy.memory.accounting import Reserve
from kvpolicy.memory.hierarchy import Hierarchy
from kvpolicy.memory.layout import Layout
from kvpolicy.memory.rule import CacheRule

FRAME = 4096
LAYOUT = Layout(TOY, "float32")

# --- observations and proposals ------------------------------------------------------------------


def observed(
    stores: tuple[StoreView, ...], requests: tuple[RequestView, ...], free: int, floor: int
) -> Observation:
    """An observation in which only what projection reads varies."""
    return Observation(
        step=9, interval=1, frame_bytes=FRAME, pool_bytes=1 << 30, required_bytes=0,
        optional_bytes=0, free_bytes=free, floor_rows=floor, waiting=0, oldest_wait=0, arrivals=0,
        finished=0, step_seconds=0.0, host_to_device_bytes=0, stores=stores, requests=requests,
    )  # fmt: skip


def request(number: int, most: tuple[int, ...], budget: tuple[int, ...]) -> RequestView:
    return RequestView(number, 50, most, budget, True, 3, 1, 0, 0, 0)


@st.composite
def observations(draw: st.DrawFn) -> Observation:
    """One to three stores, up to five requests whose budgets the engine could have given."""
    count = draw(st.integers(1, 3))
    stores = tuple(
        StoreView(f"S{i}", 1, 4, 48, draw(st.integers(1, 30)), draw(st.integers(1, 60)))
        for i in range(count)
    )
    floor = draw(st.sampled_from([0, 0, 1, 7, 30]))
    requests = []
    for number in draw(st.lists(st.integers(0, 9), max_size=5, unique=True)):
        most = tuple(draw(st.integers(0, 120)) for _ in stores)
        budget = tuple(draw(st.integers(min(floor, m), m)) for m in most)
        requests.append(request(number, most, budget))
    return observed(stores, tuple(requests), draw(st.integers(0, 20)) * FRAME, floor)


NUMBERS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=True),
    st.integers(-(10**30), 10**30),
    st.integers(-3, 130),
    st.sampled_from([FULL, -math.inf, 1e308, -0.0, 0.5, True]),
)
NO_NUMBER = st.sampled_from(["", "7", "nan", math.nan, "many", b"12", object(), 1j, [[1]], {1: 2}])
TARGETS: st.SearchStrategy[Any] = st.one_of(
    st.none(), NUMBERS, st.lists(NUMBERS, max_size=4), st.lists(NUMBERS, max_size=4).map(tuple)
)
PLANS = st.builds(
    Plan,
    targets=st.dictionaries(st.integers(-1, 10), TARGETS, max_size=6),
    default=TARGETS,
    reserve_rows=NUMBERS,
    reserve_bytes=NUMBERS,
    draft_tokens=NUMBERS,
)


def cost(budgets: dict[int, tuple[int, ...]], observation: Observation) -> int:
    """Frames of all hot caches, by the definition: whole frames of rows, and of metadata."""
    total = 0
    for view in observation.requests:
        own = zip(observation.stores, budgets[view.request_id], view.max_rows, strict=True)
        for store, rows, most in own:
            total += math.ceil(min(rows, most) / store.rows_per_frame)
            if rows < most:
                total += math.ceil(rows / store.meta_per_frame)
    return total


def held_rows(
    budgets: dict[int, tuple[int, ...]], observation: Observation
) -> dict[int, tuple[int, ...]]:
    """Budgets as rows that a request can really have (a floor above everything is everything)."""
    return {
        r.request_id: tuple(map(min, budgets[r.request_id], r.max_rows))
        for r in observation.requests
    }


def room_of(observation: Observation) -> int:
    held = cost({r.request_id: r.budget for r in observation.requests}, observation)
    return held + observation.free_bytes // FRAME


# --- properties ----------------------------------------------------------------------------------


@given(plan=PLANS, observation=observations())
def test_any_plan_becomes_feasible(plan: Plan, observation: Observation) -> None:
    """Never raises; exactly the observed requests; whole rows, at the floor or above; fits."""
    before = copy.deepcopy(observation)
    projected = project(plan, observation)
    assert observation == before
    assert list(projected.budgets) == [r.request_id for r in observation.requests]
    for view in observation.requests:
        rows = projected.budgets[view.request_id]
        assert len(rows) == len(observation.stores)
        assert all(type(value) is int for value in rows)
        held = held_rows(projected.budgets, observation)[view.request_id]
        for value, most in zip(held, view.max_rows, strict=True):
            assert value >= min(observation.floor_rows, most)
    assert cost(projected.budgets, observation) <= room_of(observation)
    assert projected.changed == bool(projected.reason)
    assert project(plan, observation) == projected


@given(observation=observations(), data=st.data())
def test_a_feasible_plan_is_left_alone(observation: Observation, data: st.DataObject) -> None:
    """Whole numbers from the floor to the most, which fit together: the same budgets, no reason."""
    floor = observation.floor_rows
    targets = {
        r.request_id: tuple(data.draw(st.integers(min(floor, m), m)) for m in r.max_rows)
        for r in observation.requests
    }
    assume(cost(targets, observation) <= room_of(observation))
    projected = project(Plan(targets=targets), observation)
    assert not projected.changed and projected.reason == ""
    for view in observation.requests:
        wanted = [max(rows, floor) for rows in targets[view.request_id]]
        assert list(projected.budgets[view.request_id]) == wanted


@given(plan=PLANS, observation=observations(), odd=NO_NUMBER, data=st.data())
def test_what_is_no_number_is_refused(
    plan: Plan, observation: Observation, odd: Any, data: st.DataObject
) -> None:
    """Wherever it stands: NaN keeps nothing and is no zero."""
    value = data.draw(st.sampled_from([odd, [odd], (odd, 1)])) if observation.stores else odd
    for name in ("default", "reserve_rows", "reserve_bytes", "draft_tokens"):
        with pytest.raises(UnreadablePlan, match=f"{name} is not a number"):
            project(replace(plan, **{name: odd if name != "default" else value}), observation)
    with pytest.raises(UnreadablePlan, match=r"targets\[3\] is not a number"):
        project(replace(plan, targets={3: value}), observation)


@given(plan=PLANS, observation=observations())
def test_reading_twice_changes_nothing(plan: Plan, observation: Observation) -> None:
    """What was read is numbers, and means what the plan meant."""
    stores = len(observation.stores)
    plain = read(plan, stores)
    assert read(plain, stores) == plain
    assert project(plain, observation) == project(plan, observation)


@given(observation=observations())
def test_keeping_is_feasible(observation: Observation) -> None:
    """No proposal and the explicit one keep the budgets."""
    kept = {r.request_id: r.budget for r in observation.requests}
    for plan in (Plan(), Plan.keep(observation)):
        projected = project(plan, observation)
        assert held_rows(projected.budgets, observation) == kept
        assert not projected.changed and not projected.reason


@given(observation=observations(), reserve=st.floats(0, 400))
def test_the_reserve_stays_free(observation: Observation, reserve: float) -> None:
    """The rows asked for arrivals stay free, but the floor goes before them."""
    projected = project(Plan(default=FULL, reserve_rows=reserve), observation)
    kept = sum(math.ceil(int(reserve) / s.rows_per_frame) for s in observation.stores)
    floor = {
        r.request_id: (observation.floor_rows,) * len(r.max_rows) for r in observation.requests
    }
    if cost(floor, observation) <= room_of(observation) - kept:
        assert cost(projected.budgets, observation) <= room_of(observation) - kept
    elif projected.changed:
        # The floor in the cheaper of its forms: a short request may take less as a full cache.
        least = {
            r.request_id: tuple(
                most
                if frames_of(s, observation.floor_rows, most) > frames_of(s, most, most)
                else observation.floor_rows
                for s, most in zip(observation.stores, r.max_rows, strict=True)
            )
            for r in observation.requests
        }
        assert projected.budgets == least
        assert cost(projected.budgets, observation) <= cost(floor, observation)


@given(observation=observations(), more=st.integers(0, 40))
def test_more_memory_never_gives_less(observation: Observation, more: int) -> None:
    """One store whose slot metadata is negligible, where cost grows with rows: monotone in room."""
    stores = tuple(replace(s, meta_per_frame=10**9) for s in observation.stores[:1])
    requests = tuple(
        replace(r, max_rows=(500,), budget=(min(r.budget[0], 100),)) for r in observation.requests
    )
    small = replace(observation, stores=stores, requests=requests, floor_rows=0)
    large = replace(small, free_bytes=small.free_bytes + more * FRAME)
    first, second = project(Plan.even(400), small), project(Plan.even(400), large)
    for number, rows in first.budgets.items():
        assert rows[0] <= second.budgets[number][0]


# --- examples ------------------------------------------------------------------------------------

ONE = (StoreView("S", 1, 4, 48, 10, 100),)
TWO = (*ONE, StoreView("T", 1, 4, 48, 20, 100))


@pytest.mark.parametrize(
    ("target", "rows", "reason"),
    [
        (40, (40, 40), ""),
        (40.9, (40, 40), ""),
        (FULL, (100, 60), ""),
        (1, (5, 5), ""),
        (-1, (5, 5), "negative"),
        (-math.inf, (5, 5), "negative"),
        ((40,), (30, 20), "targets do not match 2 stores"),
        ((), (30, 20), "targets do not match 2 stores"),
        ((70, 65), (70, 60), ""),
        (None, (30, 20), ""),
    ],
)
def test_what_a_target_means(target: Any, rows: tuple[int, ...], reason: str) -> None:
    observation = observed(TWO, (request(3, (100, 60), (30, 20)),), 100 * FRAME, 5)
    for plan in (Plan(targets={3: target}), Plan(default=target)):
        projected = project(plan, observation)
        assert projected.budgets == {3: rows}
        assert projected.changed == bool(reason) and reason in projected.reason


@pytest.mark.parametrize("text", ["12", b"12"])
def test_text_is_no_sequence_of_targets(text: Any) -> None:
    """Two characters are not one target for each of two stores."""
    observation = observed(TWO, (request(3, (100, 60), (30, 20)),), 100 * FRAME, 0)
    with pytest.raises(UnreadablePlan, match="default is not a number"):
        project(Plan.even(text), observation)


@pytest.mark.parametrize("huge", [10**400, -(10**400)], ids=["positive", "negative"])
def test_integers_beyond_floats(huge: int) -> None:
    """A whole number of any size is still a proposal."""
    observation = observed(ONE, (request(3, (100,), (30,)),), 100 * FRAME, 0)
    for plan in (Plan(default=huge), Plan(targets={3: [huge]}), Plan(reserve_rows=huge)):
        assert 0 <= project(plan, observation).budgets[3][0] <= 100


def test_a_tensor_is_no_reason_to_raise() -> None:
    observation = observed(TWO, (request(3, (100, 60), (30, 20)),), 100 * FRAME, 0)
    for target in (torch.tensor([40.0, 30.0]), torch.tensor([1.0])):
        assert set(project(Plan(default=target), observation).budgets) == {3}  # type: ignore[arg-type]


def test_unknown_requests_and_names_of_reasons() -> None:
    observation = observed(ONE, (request(3, (100,), (30,)),), 0, 0)
    projected = project(Plan(targets={8: 5, 3: 30}), observation)
    assert projected == ProjectedPlan({3: (30,)}, True, "unknown request 8")
    projected = project(Plan(targets={3: 30}, reserve_rows=-1), observation)
    assert projected == ProjectedPlan({3: (30,)}, True, "reserve is a negative number of rows")
    projected = project(Plan.even(90), observation)
    assert projected.changed and projected.reason == "more than the memory there is"
    assert 20 <= projected.budgets[3][0] <= 30


@pytest.mark.parametrize(
    ("asked", "cap", "reason"),
    [
        (FULL, None, ""),
        (1e9, None, ""),
        (7, 7, ""),
        (2.9, 2, ""),
        (0, 0, ""),
        (-1, 0, "a negative number of draft tokens"),
        (-math.inf, 0, "a negative number of draft tokens"),
    ],
)
def test_a_cap_on_draft_tokens(asked: float, cap: int | None, reason: str) -> None:
    observation = observed(ONE, (request(3, (100,), (30,)),), 0, 0)
    projected = project(Plan(targets={3: 30}, draft_tokens=asked), observation)
    assert projected == ProjectedPlan({3: (30,)}, bool(reason), reason, cap)


def test_shrinking_is_in_proportion() -> None:
    """Two requests that want 100 and 50 rows above nothing get 2 : 1 of what there is."""
    requests = (request(1, (1000,), (0,)), request(2, (1000,), (0,)))
    observation = observed(ONE, requests, 9 * FRAME, 0)
    budgets = project(Plan(targets={1: 100, 2: 50}), observation).budgets
    assert cost(budgets, observation) <= 9
    assert budgets[1][0] > 40 and abs(budgets[1][0] - 2 * budgets[2][0]) <= 2


def test_shrinking_makes_no_cache_full_that_will_grow() -> None:
    """A prompt that has just begun would take less as a full cache, but not for long."""
    views = (
        replace(request(1, (1000,), (300,)), rows_now=(1,)),
        replace(request(2, (1000,), (300,)), rows_now=(900,)),
    )
    observation = observed(ONE, views, 0, 0)
    budgets = project(Plan.even(400), observation).budgets
    assert budgets[1] == budgets[2] and 200 <= budgets[1][0] <= 300
    full = replace(observation, requests=(replace(views[0], budget=(1000,)), views[1]))
    assert project(Plan.even(400), full).budgets[1] == (1000,)


@given(rows=st.integers(0, 130), most=st.integers(0, 120))
def test_frames_of_is_what_a_cache_takes(rows: int, most: int) -> None:
    """Projection's arithmetic is the accounting's."""
    view, store = store_views(LAYOUT)[1], LAYOUT.stores[1]
    assert frames_of(view, rows, most) == store.hot_frames(min(rows, most), rows >= most)


# --- applied to a real hierarchy -----------------------------------------------------------------


def hierarchy(device_bytes: int, floor: int) -> Hierarchy:
    reserve, cpu = Reserve(4, 4), torch.device("cpu")
    return Hierarchy(LAYOUT, device_bytes, 1 << 20, reserve, floor, CacheRule(), cpu)


def observation_of(memory: Hierarchy) -> Observation:
    requests = tuple(
        request(number, tuple(h.max_entries for h in r.hot), tuple(h.capacity for h in r.hot))
        for number, r in memory.requests.items()
    )
    free = memory.arena.frames.free * memory.arena.frame_bytes
    return observed(store_views(memory.layout), requests, free, memory.floor_rows)


@given(
    tokens=st.lists(st.integers(1, 512), min_size=1, max_size=4),
    spare=st.integers(0, 12),
    data=st.data(),
)
def test_projected_budgets_can_be_applied(
    tokens: list[int], spare: int, data: st.DataObject
) -> None:
    """Whatever follows whatever: set_budgets takes them, and every cache has the rows it was given."""
    memory = hierarchy(1 << 20, floor=0)
    for number, count in enumerate(tokens):
        memory.admit(number, count, (0, 0))
    memory.arena.frames.allocate(max(0, memory.arena.frames.free - spare), "others")
    rows = st.sampled_from([0, 5, 60, 84, 85, 86, 170, 171, 255, 400, 510, FULL])
    for _ in range(4):
        targets = {i: (data.draw(rows), data.draw(rows)) for i in memory.requests}
        observation = observation_of(memory)
        projected = project(Plan(targets=targets), observation)
        memory.set_budgets(projected.budgets)
        for number, wanted in projected.budgets.items():
            for hot, want in zip(memory.requests[number].hot, wanted, strict=True):
                assert hot.capacity == min(want, hot.max_entries)
        used = memory.arena.frames.used
        memory.arena.frames.check_integrity()
        memory.set_budgets(projected.budgets)
        assert memory.arena.frames.used == used


def test_infeasible_budgets_are_refused_and_leave_the_memory_whole() -> None:
    """Without projection: CapacityError, and everything is consistent and can be released."""
    memory = hierarchy(1 << 16, floor=0)
    memory.admit(1, 512, (0, 0))
    with pytest.raises(CapacityError, match="device memory"):
        memory.set_budgets({1: (512, 512)})
    memory.check_integrity()
    memory.release(1)
    memory.check_integrity()


def test_the_floor_fits_where_full_caches_fill_the_memory() -> None:
    """A full cache of one frame cannot become a mapped one of a frame of rows and one of slots."""
    memory = hierarchy(1 << 17, floor=4)
    for number in (1, 2):
        memory.admit(number, 16, (16, 16))
    memory.arena.frames.allocate(memory.arena.frames.free, "others")
    observation = observation_of(memory)
    projected = project(Plan.even(4), observation)
    assert cost(projected.budgets, observation) <= room_of(observation)
    memory.set_budgets(projected.budgets)
    assert all(hot.capacity >= 4 for r in memory.requests.values() for hot in r.hot)
