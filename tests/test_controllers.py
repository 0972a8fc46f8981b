"""Controllers by name: registration, specs and their errors, and what the built-in ones propose."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.control.observation import Observation, RequestView, StoreView
from kvpolicy.control.plan import FULL, Plan, Target
from kvpolicy.control.projection import project
from kvpolicy.controllers import registry
from kvpolicy.controllers.base import Controller, cache_rule, initial_rows
from kvpolicy.controllers.hisparse import HiSparse
from kvpolicy.controllers.registry import describe, make, names, register
from kvpolicy.controllers.resident import Resident
from kvpolicy.controllers.static import Static
from kvpolicy.errors import UserError
from kvpolicy.kernels.eviction import RULES

STORES = (StoreView("A", 1, 4, 48, 85, 512), StoreView("B", 2, 6, 96, 42, 512))


class Plug:
    """Keeps two numbers.

    Second paragraph.
    """

    def __init__(self, rows: int = 3, spare: float = 0.0) -> None:
        self.rows, self.spare = rows, spare

    def decide(self, observation: Observation) -> Plan:
        return Plan(default=self.rows, reserve_rows=self.spare)


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registrations of a test end with it."""
    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))


def synthetic(budgets: list[tuple[int, int]], free_frames: int = 8) -> Observation:
    requests = tuple(
        RequestView(7 + i, 90, (45, 90), budget, i % 2 == 0, 5 + i, i, 40, 30, 9)
        for i, budget in enumerate(budgets)
    )
    return Observation(
        step=64, interval=8, frame_bytes=4096, pool_bytes=1 << 20, required_bytes=1 << 18,
        optional_bytes=1 << 16, free_bytes=free_frames * 4096, floor_rows=0, waiting=2,
        oldest_wait=11, arrivals=3, finished=1, step_seconds=0.01, host_to_device_bytes=4096,
        stores=STORES, requests=requests,
    )  # fmt: skip


OBSERVATIONS = st.builds(
    synthetic,
    st.lists(st.tuples(st.integers(0, 45), st.integers(0, 90)), max_size=5),
    st.integers(0, 20),
)


# --- the registry --------------------------------------------------------------------------------


def test_built_in_names_and_descriptions() -> None:
    assert names()[:6] == ["resident", "hisparse", "static", "adaptive", "hybrid", "random"]
    assert [name for name, _ in describe()] == names()
    for _, line in describe():
        assert line.endswith(".") and "\n" not in line
    assert isinstance(make("resident"), Resident)
    assert isinstance(make("hisparse"), HiSparse)
    assert isinstance(make("static"), Static)


def test_a_plug_in_is_made_by_its_name(own_registry: None) -> None:
    assert register("plug", Plug) is Plug
    assert names()[-1] == "plug" and describe()[-1] == ("plug", "Keeps two numbers.")
    made = make("plug:rows=12,spare=0.5")
    assert isinstance(made, Plug) and isinstance(made, Controller)
    assert (made.rows, made.spare) == (12, 0.5)
    assert isinstance(make("plug:rows=12", rows=4), Plug)
    assert make("plug:rows=12", rows=4).rows == 4  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["", "a:b", "a=b", "a,b", "a b", "a/b", "a\\b"])
def test_names_that_cannot_stand_in_a_spec(name: str, own_registry: None) -> None:
    before = names()
    with pytest.raises(UserError, match="controller name"):
        register(name, Plug)
    assert names() == before


@pytest.mark.parametrize("name", ["static", "plug"])
def test_a_taken_name_keeps_its_factory(name: str, own_registry: None) -> None:
    register("plug", Plug)
    before = dict(registry._FACTORIES)
    with pytest.raises(UserError, match=f"{name!r} is taken"):
        register(name, lambda: Plug(9))
    assert before == registry._FACTORIES


# --- specs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "rows"),
    [
        ("static", None),
        ("static:", None),
        ("static:device_buffer_rows=256", 256),
        ("static:device-buffer-rows=256", 256),
        ("static: device_buffer_rows=256", 256),
        ("static:device_buffer_rows= 256", 256),
        ("static:device_buffer_rows=256,", 256),
        ("static:device_buffer_rows=0", 0),
        ("static:device_buffer_rows=0x10", 16),
        ("static:device_buffer_rows=null", None),
        ("hisparse:device_buffer_rows=300", 300),
    ],
)
def test_specs(spec: str, rows: int | None) -> None:
    assert make(spec).rows == rows  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "unknown controller ''.*allowed: resident, hisparse, static"),
        ("statik", "did you mean 'static'"),
        ("Static", "unknown controller 'Static'"),
        (":device_buffer_rows=3", "unknown controller"),
        ("static:3", "'3' must be key=value"),
        ("static:=3", "must be key=value"),
        ("static:rows=3", "unknown parameter of controller 'static' 'rows'.*device_buffer_rows"),
        ("static:device_bufer_rows=3", "did you mean 'device_buffer_rows'"),
        ("resident:rows=3", r"unknown parameter of controller 'resident'.*\(none\)"),
        ("static:device_buffer_rows=1,device_buffer_rows=2", "given twice"),
        ("static:device_buffer_rows=1,device-buffer-rows=2", "given twice"),
        ("static:device_buffer_rows=[", "device_buffer_rows is not valid YAML"),
        ("static:device_buffer_rows=2020-13-45", "is not valid YAML: month must be"),
        ("static:device_buffer_rows=-1", "must be a whole number of rows, at least 0"),
        ("static:device_buffer_rows=1.5", "whole number"),
        ("static:device_buffer_rows=1e3", "whole number"),
        ("static:device_buffer_rows=true", "whole number"),
        ("static:device_buffer_rows=many", "device_buffer_rows = 'many'"),
    ],
)
def test_wrong_specs_are_one_clear_line(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        make(spec)
    assert "\n" not in str(caught.value)


@given(
    spec=st.text(st.sampled_from("static:devicbufrw_=,-[]{}&*!%1234567890 \t\n'\"é"), max_size=40)
)
def test_no_spec_raises_anything_else(spec: str) -> None:
    for text in (spec, f"static:device_buffer_rows={spec}", f"static:{spec}"):
        try:
            made = make(text)
        except UserError:
            continue
        assert isinstance(made, Controller)


def test_a_factory_that_refuses_is_the_users_error(own_registry: None) -> None:
    def refuse(rows: int) -> Controller:
        raise ValueError("rows must be even")

    register("even", refuse)
    with pytest.raises(UserError, match="controller 'even:rows=3': rows must be even"):
        make("even:rows=3")
    with pytest.raises(UserError, match=r"controller 'even': .*rows"):
        make("even")


# --- what they propose ---------------------------------------------------------------------------


@given(observation=OBSERVATIONS)
def test_every_controller_decides_without_changing_what_it_sees(observation: Observation) -> None:
    """A plan that projects to budgets for all requests, the same each time."""
    for name in names():
        controller = make(name)
        before = copy.deepcopy(observation)
        first, second = controller.decide(observation), controller.decide(observation)
        assert observation == before
        assert isinstance(first, Plan) and first == second
        budgets = project(first, observation).budgets
        assert list(budgets) == [r.request_id for r in observation.requests]


@pytest.mark.parametrize("name", names())
def test_rules_and_initial_rows(name: str) -> None:
    """Every built-in rule exists; initial rows are a number or one per store."""
    controller = make(name)
    rule = cache_rule(controller)
    assert rule.eviction in RULES and rule.seed in ("selection", "first")
    rows = initial_rows(controller, STORES)
    assert rows == FULL or (isinstance(rows, tuple) and len(rows) == len(STORES))
    assert inspect.getdoc(type(controller))


def test_what_the_built_in_ones_propose() -> None:
    observation = synthetic([(8, 8)], free_frames=1000)
    plenty = {
        "resident": (45, 90),
        "static": (8, 12),
        "static:device_buffer_rows=20": (20, 20),
        "static:device_buffer_rows=0": (0, 0),
        "hisparse": (8, 12),
        "hisparse:device_buffer_rows=6": (6, 6),
        "hisparse:device_buffer_rows=1000": (45, 90),
    }
    for spec, rows in plenty.items():
        assert project(make(spec).decide(observation), observation).budgets == {7: rows}
    assert initial_rows(make("resident"), STORES) == (FULL, FULL)
    assert initial_rows(make("hisparse:device_buffer_rows=6"), STORES) == (6, 6)
    assert initial_rows(make("static"), STORES) == (8, 12)
    assert initial_rows(Plug(), STORES) == (0, 0)
    assert cache_rule(Plug()) == cache_rule(make("static"))


def test_hisparse_is_lru_without_its_newest_row() -> None:
    rule = cache_rule(make("hisparse"))
    assert (rule.eviction, rule.admit_newest, rule.seed) == ("lru", False, "first")


@pytest.mark.parametrize("rows", [0, 4, 5])
def test_hisparse_needs_top_k_rows(rows: int) -> None:
    """Of every store; told at the start, where initial rows are asked."""
    controller = make(f"hisparse:device_buffer_rows={rows}")
    with pytest.raises(UserError, match=f"device_buffer_rows = {rows}: hisparse needs at least"):
        initial_rows(controller, STORES)


class CopyOfStatic:
    """Static again, written outside the package from its public parts."""

    def __init__(self, device_buffer_rows: int | None = None) -> None:
        self.rows = device_buffer_rows

    def initial(self, stores: tuple[StoreView, ...]) -> Target:
        return self._rows(stores)

    def decide(self, observation: Observation) -> Plan:
        return Plan.even(self._rows(observation.stores))

    def _rows(self, stores: tuple[StoreView, ...]) -> tuple[Any, ...]:
        return tuple(2 * s.topk if self.rows is None else self.rows for s in stores)


@given(observation=OBSERVATIONS, rows=st.none() | st.integers(0, 200))
def test_a_plug_in_is_projected_as_the_built_in_one(
    observation: Observation, rows: int | None
) -> None:
    """No path of its own for built-in controllers: same proposals, same budgets."""
    spec = "" if rows is None else f":device_buffer_rows={rows}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))
        register("copy-of-static", CopyOfStatic)
        ours, theirs = make(f"static{spec}"), make(f"copy-of-static{spec}")
    assert initial_rows(ours, STORES) == initial_rows(theirs, STORES)
    assert cache_rule(ours) == cache_rule(theirs)
    projected = [project(c.decide(observation), observation) for c in (ours, theirs)]
    assert projected[0] == projected[1]
