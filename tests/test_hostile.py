"""A hostile controller on a real engine and the wall clock: no bit, no byte, no stall, and all noted."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from abuse import PARAMS, Alone, Setting, config, run_alone
from hostile import FAILING, PROJECTED, Acting, Unspeakable, fail
from hostile_run import DEADLINE_MS, STEP_BOUND, Run
from micro import micro_model

from kvpolicy import Engine, Observation, Plan, UserError
from kvpolicy.controllers import ControllerLike
from kvpolicy.controllers.decider import MOST_STUCK
from kvpolicy.models.loader import DecodeModel

REQUESTS = (0, 3)


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> DecodeModel:
    return micro_model(Path(tmp_path_factory.mktemp("micro")))


@pytest.fixture(scope="module")
def alone(micro: DecodeModel) -> dict[int, Alone]:
    return {which: run_alone(micro, which) for which in REQUESTS}


def controller_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "kvpolicy-controller"]


def gone(threads: Callable[[], list[threading.Thread]], seconds: float = 10.0) -> bool:
    """Whether they end in time."""
    end = time.perf_counter() + seconds
    while threads() and time.perf_counter() < end:
        time.sleep(0.002)
    return not threads()


@pytest.mark.parametrize("name", FAILING)
def test_the_fallback_decides_in_its_place(
    micro: DecodeModel, alone: dict[int, Alone], name: str
) -> None:
    act, kind = FAILING[name]
    run = Run(micro, alone, Acting(act))
    assert run.log and {d.fallback for d in run.log} == {kind}
    assert gone(controller_threads)


@pytest.mark.parametrize("name", PROJECTED)
def test_odd_numbers_are_altered_until_they_fit(
    micro: DecodeModel, alone: dict[int, Alone], name: str
) -> None:
    act, reason = PROJECTED[name]
    run = Run(micro, alone, Acting(act))
    assert not run.metrics["controller_fallbacks"]
    assert any(reason in d.reason for d in run.log)
    assert all(d.reason for d in run.log if d.projected.changed)


def test_all_of_it_is_in_the_log_file(
    micro: DecodeModel, alone: dict[int, Alone], tmp_path: Path
) -> None:
    """One failure after the other: as many lines as decisions, each valid JSON with its reason."""
    acts = iter([act for act, _ in [*FAILING.values(), *PROJECTED.values()]] * 9)
    path = tmp_path / "log.jsonl"
    run = Run(micro, alone, Acting(lambda o: next(acts)(o)), decision_log=str(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["fallback"], line["reason"]) for line in lines] == [
        (d.fallback, d.reason) for d in run.log
    ]
    assert {"number", "type", "raised", ""} == {line["fallback"] for line in lines}


# --- time -----------------------------------------------------------------------------------------


def sleeper(micro: DecodeModel, alone: dict[int, Alone], seconds: float) -> Run:
    """Every decision sleeps so long, unless the run is over."""
    over = threading.Event()

    def sleep(observation: Observation) -> Plan:
        over.wait(seconds)
        return Plan.even(7)

    try:
        return Run(micro, alone, Acting(sleep), decision_deadline_ms=DEADLINE_MS)
    finally:
        over.set()
        assert gone(controller_threads)


def test_a_sleeper_stalls_no_step(micro: DecodeModel, alone: dict[int, Alone]) -> None:
    """Late once, busy from then on: a step waits for the deadline at most, and for a busy one never."""
    run = sleeper(micro, alone, 30.0)
    assert run.slowest < STEP_BOUND
    kinds = [d.fallback for d in run.log]
    assert kinds == ["late"] + ["busy"] * (len(kinds) - 1) and len(kinds) > 10


def test_a_spinner_handed_over_in_python_changes_nothing_but_time(
    micro: DecodeModel, alone: dict[int, Alone]
) -> None:
    """An object of the user's own shares the interpreter's lock with the steps, which no deadline bounds:
    a step is held up as long as it computes, and the rest stays true. One that a spec names has a
    process: tests/test_isolation.py."""
    spin_seconds = 0.6
    end = time.perf_counter() + spin_seconds

    def spin(observation: Observation) -> Plan:
        while time.perf_counter() < end:
            pass
        return Plan.even(7)

    run = Run(micro, alone, Acting(spin), decision_deadline_ms=DEADLINE_MS)
    assert run.slowest < spin_seconds + STEP_BOUND
    assert run.log[0].fallback == "late"
    assert gone(controller_threads)


@pytest.mark.full
def test_ten_seconds_of_real_sleep(micro: DecodeModel, alone: dict[int, Alone]) -> None:
    """time.sleep, not an event: it ends long after the engine, which does not wait for it."""

    def sleep(observation: Observation) -> Plan:
        time.sleep(10)
        return Plan.even(7)

    start = time.perf_counter()
    run = Run(micro, alone, Acting(sleep), decision_deadline_ms=DEADLINE_MS)
    assert run.slowest < STEP_BOUND
    assert time.perf_counter() - start < 10 and len(controller_threads()) == 1
    assert gone(controller_threads, 15)


def test_short_naps_are_late_again_and_again(micro: DecodeModel, alone: dict[int, Alone]) -> None:
    """A controller that is always a little too slow is asked again once it is back."""
    run = sleeper(micro, alone, 4 * DEADLINE_MS / 1e3)
    kinds = [d.fallback for d in run.log]
    assert kinds.count("late") > 2 and run.slowest < STEP_BOUND


def test_sleepers_that_are_replaced_leave_few_threads(
    micro: DecodeModel, alone: dict[int, Alone]
) -> None:
    """A new sleeper every step: no more threads than the limit, and none when they wake."""
    over = threading.Event()
    most = 0

    def sleep(observation: Observation) -> Plan:
        over.wait(30)
        return Plan()

    def replace(engine: Engine) -> None:
        nonlocal most
        engine.set_controller(Acting(sleep))
        most = max(most, len(controller_threads()))

    run = Run(micro, alone, Acting(sleep), replace, decision_deadline_ms=1.0)
    over.set()
    assert most == MOST_STUCK
    assert {d.fallback for d in run.log} == {"late", "stuck"}
    assert run.slowest < STEP_BOUND and gone(controller_threads)


# --- the other attributes of a controller ---------------------------------------------------------


def attribute(name: str, act: Callable[[], Any]) -> ControllerLike:
    """A controller that does something when an attribute of it is read, and nothing else."""
    body = {name: property(lambda self: act()), "decide": lambda self, o: Plan()}
    return type("Odd", (), body)()  # type: ignore[no-any-return]


def leave() -> Any:
    raise SystemExit(4)


def fault() -> Any:
    raise RuntimeError("no attribute for you")


@pytest.mark.parametrize("name", ["initial", "cache_rule", "wants_curves"])
@pytest.mark.parametrize("act", [leave, fault])
def test_attributes_that_fail_refuse_the_swap(
    micro: DecodeModel, name: str, act: Callable[[], Any]
) -> None:
    """One line that names the controller, and the old one stays, whole."""
    setting = Setting("static:device_buffer_rows=20")
    with Engine(config(setting, 1, {}), model=micro) as engine:
        control = engine.control
        before = control.controller, control.rule, control.promised, control._follower
        for swap in (
            engine.set_controller,
            lambda c: engine.reload(engine.config.model_copy(update={"controller": c})),
        ):
            with pytest.raises(UserError, match=f"Odd: {name}"):
                swap(attribute(name, act))
            assert (control.controller, control.rule, control.promised, control._follower) == before
        assert engine.config.controller == setting.controller


@pytest.mark.parametrize(
    "rows",
    [
        lambda stores: iter(int, 1),
        lambda stores: "many",
        fail(SystemExit(3)),
        fail(Unspeakable()),
    ],
    ids=["endless", "text", "exit", "unspeakable"],
)
def test_initial_rows_that_are_none(micro: DecodeModel, rows: Callable[..., Any]) -> None:
    """Whatever it is, it is one line that names the controller."""
    odd = type("Odd", (), {"initial": lambda self, s: rows(s), "decide": lambda self, o: Plan()})()
    with Engine(config(Setting(), 1, {}), model=micro) as engine:
        with pytest.raises(UserError, match="Odd: initial"):
            engine.set_controller(odd)
        assert engine.generate([b"abc"], PARAMS[0])[0].finish_reason in ("length", "stop")
