"""The decider: whatever a controller does, a decision comes back, in time, and says whose it is."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import observations, observe, request

from kvpolicy.control.decision import DecisionWriter
from kvpolicy.control.observation import Observation, StoreView
from kvpolicy.control.plan import FULL, Plan
from kvpolicy.control.projection import project
from kvpolicy.controllers.decider import MOST_STUCK, Decider
from kvpolicy.controllers.registry import make
from kvpolicy.errors import UserError

STORES = (StoreView("A", 1, 8, 100, 10, 100), StoreView("B", 2, 8, 200, 5, 100))
SEEN = observe(STORES, tuple(request(i, (200, 200), (40, 40)) for i in (3, 5)), free=20)
DEADLINE = 0.02
# What a busy machine may add to a deadline before a test calls it a stall.
NOISE = 0.5


class Says:
    """A controller that does what it is told."""

    def __init__(self, act: Callable[[Observation], Any]) -> None:
        self.act = act

    def decide(self, observation: Observation) -> Plan:
        return self.act(observation)  # type: ignore[no-any-return]


def fail(error: BaseException) -> Callable[[Observation], Plan]:
    def act(observation: Observation) -> Plan:
        raise error

    return act


@pytest.fixture
def deciders() -> Iterator[Callable[..., Decider]]:
    """Makes deciders and closes them."""
    made: list[Decider] = []

    def new(act: Callable[[Observation], Any] | object, deadline: float = DEADLINE) -> Decider:
        made.append(Decider(Says(act) if callable(act) else act, deadline))  # type: ignore[arg-type]
        return made[-1]

    yield new
    for decider in made:
        decider.close()


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Group(BaseException):
    pass


class Quitter(Mapping[int, float]):
    def __getitem__(self, key: int) -> float:
        return 1.0

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Any:
        raise SystemExit(3)


def vandal(observation: Observation) -> Plan:
    for request_view in observation.requests:
        object.__setattr__(request_view, "budget", ("x",))
    object.__setattr__(observation, "requests", ())
    object.__setattr__(observation, "free_bytes", -(10**30))
    return Plan.even(45)


HOSTILE: dict[str, tuple[Callable[[Observation], Any], str]] = {
    "nan": (lambda o: Plan.even(float("nan")), "number"),
    "nan in one store": (lambda o: Plan(targets={3: (5, float("nan"))}), "number"),
    "text": (lambda o: Plan.even("many"), "number"),  # type: ignore[arg-type]
    "digits": (lambda o: Plan.even("12"), "number"),  # type: ignore[arg-type]
    "none in one store": (lambda o: Plan(targets={3: (5, None)}), "number"),  # type: ignore[dict-item]
    "complex": (lambda o: Plan.even(1j), "number"),  # type: ignore[arg-type]
    "reserve": (lambda o: Plan(reserve_bytes=float("nan")), "number"),
    "key": (lambda o: Plan(targets={"a": 3}), "number"),  # type: ignore[dict-item]
    "no plan": (lambda o: 3, "type"),
    "nothing": (lambda o: None, "type"),
    "a list of targets": (lambda o: Plan(targets=[1, 2]), "raised"),  # type: ignore[arg-type]
    "a mapping that exits": (lambda o: Plan(targets=Quitter()), "raised"),
    "error": (fail(RuntimeError("no idea")), "raised"),
    "exit": (fail(SystemExit(1)), "raised"),
    "base": (fail(Group("odd")), "raised"),
    "generator exit": (fail(GeneratorExit()), "raised"),
    "stop": (fail(StopIteration()), "raised"),
    "unspeakable": (fail(Unspeakable()), "raised"),
    "recursion": (lambda o: HOSTILE["recursion"][0](o), "raised"),
    "memory": (fail(MemoryError()), "raised"),
}
ODD_BUT_FINE: dict[str, Callable[[Observation], Any]] = {
    "negative": lambda o: Plan.even(-3),
    "huge": lambda o: Plan.even(1e300),
    "huger": lambda o: Plan.even(10**400),
    "numpy": lambda o: Plan(targets={np.int64(3): np.array([5.0, 6.0]), 5: np.float32(7)}),  # type: ignore[dict-item]
    "wrong length": lambda o: Plan(targets={3: (1, 2, 3)}),
    "unknown request": lambda o: Plan(targets={8: 3}),
    "keep": lambda o: Plan(targets={3: None}),  # type: ignore[dict-item]
    "vandal": vandal,
}


@pytest.mark.parametrize("deadline", [0.0, DEADLINE], ids=["inline", "thread"])
@pytest.mark.parametrize("name", HOSTILE)
def test_the_fallback_decides_for_a_hostile_controller(
    name: str, deadline: float, deciders: Callable[..., Decider]
) -> None:
    act, kind = HOSTILE[name]
    decider = deciders(act, deadline and 5.0)
    decision = decider.decide(SEEN)
    assert decision.fallback == kind and decision.reason
    assert decision.projected == project(make("adaptive").decide(SEEN), SEEN)
    assert (decider.decisions, decider.fallbacks, decider.projections) == (1, 1, 0)
    json.dumps(decision.to_dict(), allow_nan=False)


@pytest.mark.parametrize("deadline", [0.0, DEADLINE], ids=["inline", "thread"])
@pytest.mark.parametrize("name", ODD_BUT_FINE)
def test_numbers_of_any_value_are_the_controllers_own(
    name: str, deadline: float, deciders: Callable[..., Decider]
) -> None:
    before = replace(SEEN, requests=tuple(replace(r) for r in SEEN.requests))
    decider = deciders(ODD_BUT_FINE[name], deadline and 5.0)
    decision = decider.decide(SEEN)
    assert before == SEEN, "only a copy is shown"
    assert (decision.fallback, decider.fallbacks) == ("", 0)
    assert set(decision.projected.budgets) == {3, 5}
    json.dumps(decision.to_dict(), allow_nan=False)


@given(observation=observations(), name=st.sampled_from([*HOSTILE, *ODD_BUT_FINE]))
def test_no_observation_makes_it_raise(observation: Observation, name: str) -> None:
    act = HOSTILE[name][0] if name in HOSTILE else ODD_BUT_FINE[name]
    decision = Decider(Says(act)).decide(observation)
    assert set(decision.projected.budgets) == {r.request_id for r in observation.requests}


@pytest.mark.parametrize("deadline", [0.0, DEADLINE], ids=["inline", "thread"])
@given(observation=observations())
def test_deciding_is_asking_and_projecting(deadline: float, observation: Observation) -> None:
    """For a controller that behaves the decider adds nothing."""
    decider = Decider(make("adaptive"), deadline and 30.0)
    decision = decider.decide(observation)
    plan = make("adaptive").decide(observation)
    assert decision.projected == project(plan, observation)
    assert decision.plan == plan and not decision.reason and not decider.fallbacks
    decider.close()


def test_the_users_interrupt_passes(deciders: Callable[..., Decider]) -> None:
    """Inline it is the main thread's; in the controller's thread it can only be a controller's."""
    with pytest.raises(KeyboardInterrupt):
        deciders(fail(KeyboardInterrupt()), 0.0).decide(SEEN)
    assert deciders(fail(KeyboardInterrupt()), 5.0).decide(SEEN).fallback == "raised"


def test_a_sleeper_is_late_then_left_alone_then_asked_again(
    deciders: Callable[..., Decider],
) -> None:
    wake, calls = threading.Event(), []

    def sleep(observation: Observation) -> Plan:
        calls.append(observation.step)
        wake.wait(30)
        return Plan.even(11)

    decider = deciders(sleep)
    start = time.perf_counter()
    assert decider.decide(replace(SEEN, step=1)).fallback == "late"
    assert time.perf_counter() - start < DEADLINE + NOISE
    start = time.perf_counter()
    kinds = [decider.decide(replace(SEEN, step=s)).fallback for s in range(2, 10)]
    assert kinds == ["busy"] * 8
    assert time.perf_counter() - start < NOISE, "nobody waits for a busy one"
    wake.set()
    decider.deadline = 5.0
    for _ in range(100):
        decision = decider.decide(replace(SEEN, step=77))
        if decision.fallback != "busy":
            break
        time.sleep(0.01)
    assert decision.fallback == "" and calls == [1, 77], "what came late was dropped"
    assert decision.projected.budgets == {3: (11, 11), 5: (11, 11)}
    assert decider.fallbacks >= 9


def test_a_busy_controller_can_be_replaced(deciders: Callable[..., Decider]) -> None:
    decider = deciders(lambda o: time.sleep(1))
    assert decider.decide(SEEN).fallback == "late"
    decider.deadline = 5.0
    decider.set_controller(Says(lambda o: Plan.even(FULL)))
    decision = decider.decide(SEEN)
    assert decision.fallback == "" and decision.plan == Plan.even(FULL)
    start = time.perf_counter()
    decider.close()
    assert time.perf_counter() - start < NOISE


def controller_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name == "kvpolicy-controller"}


def test_threads_are_bounded(deciders: Callable[..., Decider]) -> None:
    """However often sleepers are swapped in; when they return, controllers are asked again."""
    wake, before = threading.Event(), controller_threads()

    def sleep(observation: Observation) -> Plan:
        wake.wait(30)
        return Plan()

    decider = deciders(sleep, 0.001)
    kinds = []
    for _ in range(3 * MOST_STUCK):
        kinds.append(decider.decide(SEEN).fallback)
        decider.set_controller(Says(sleep))
    assert kinds[:MOST_STUCK] == ["late"] * MOST_STUCK and set(kinds[MOST_STUCK:]) == {"stuck"}
    assert len(controller_threads() - before) == MOST_STUCK
    wake.set()
    decider.deadline = 5.0
    decider.set_controller(Says(lambda o: Plan.even(3)))
    for _ in range(200):
        if not (kind := decider.decide(SEEN).fallback):
            break
        time.sleep(0.01)
    assert kind == ""


def test_threads_end_with_their_owner() -> None:
    """Closed, replaced or just forgotten: no thread stays."""
    before = controller_threads()
    for way in ("close", "replace", "forget"):
        decider = Decider(make("hisparse"), 5.0)
        decider.decide(SEEN)
        assert len(controller_threads() - before) == 1
        if way == "close":
            decider.close()
        elif way == "replace":
            decider.set_controller(make("static"))
        del decider
        for _ in range(200):
            if not controller_threads() - before:
                break
            time.sleep(0.01)
        assert not controller_threads() - before, way


def test_one_warning_per_kind(
    caplog: pytest.LogCaptureFixture, deciders: Callable[..., Decider]
) -> None:
    acts = iter([fail(ValueError("first\nline")), fail(ValueError("second")), lambda o: 3] * 2)
    decider = deciders(lambda o: next(acts)(o), 0.0)
    with caplog.at_level(logging.WARNING, "kvpolicy"):
        for _ in range(6):
            decider.decide(SEEN)
    assert [r.getMessage().split(": ", 1)[1] for r in caplog.records] == [
        "ValueError: first line",
        "decide() returned int, not a Plan",
    ]
    assert decider.fallbacks == 6 and len(decider.log) == 6


def test_a_failing_fallback_keeps_budgets() -> None:
    broken = Says(fail(RuntimeError("me too")))
    decision = Decider(Says(fail(ValueError())), fallback=broken).decide(SEEN)
    assert decision.projected.budgets == {3: (40, 40), 5: (40, 40)}


def test_the_log_is_written_as_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    decider = Decider(make("resident"), writer=DecisionWriter(path))
    decider.decide(SEEN)
    decider.set_controller(Says(fail(ValueError("no"))))
    decider.decide(replace(SEEN, step=700))
    decider.close()
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first["plan"]["default"] == "full" and first["fallback"] == ""
    assert first["projected"]["changed"] and first["reason"] == "more than the memory there is"
    assert first["observation"]["stores"][1]["name"] == "B"
    assert (second["step"], second["fallback"], second["reason"]) == (
        700,
        "raised",
        "ValueError: no",
    )
    assert set(second["plan"]["targets"]) == {"3", "5"}
    decider.decide(SEEN)
    assert len(path.read_text().splitlines()) == 2, "closed"


def test_a_log_that_cannot_be_opened_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"decision_log = .*: Is a directory"):
        DecisionWriter(tmp_path)


SLEEPER = """
import sys, time
from kvpolicy import Engine, EngineConfig, Plan, SamplingParams
class Sleeper:
    def decide(self, observation):
        time.sleep(60)
engine = Engine(EngineConfig(device="cpu", decision_deadline_ms=2))
engine.set_controller(Sleeper())
engine.generate([b"def main():"], SamplingParams(max_new_tokens=2))
assert engine.metrics()["controller_fallbacks"] > 0
if sys.argv[1] == "close":
    engine.close()
print("done", flush=True)
"""


@pytest.mark.parametrize("way", ["close", "leave"])
def test_a_sleeper_does_not_keep_the_process(way: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", SLEEPER, way],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr


def test_controllers_and_the_decider_load_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, kvpolicy.controllers, kvpolicy.controllers.decider, kvpolicy.control.curves\n"
        "kvpolicy.controllers.make('adaptive')\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "False", done.stderr
