"""Controllers that a spec names in a file or plug-in: in a process, where nothing they do holds up a step."""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from abuse import PARAMS, PROMPTS, Alone, Setting, config, run_alone
from hostile_file import SOURCE, ended
from hostile_run import DEADLINE_MS, PATIENT_MS, STEP_BOUND, Run
from micro import micro_model
from site_packages import install

from kvpolicy import Engine, UserError
from kvpolicy.controllers.process import MOST_RESTARTS, ProcessController
from kvpolicy.controllers.registry import make
from kvpolicy.kernels.eviction import RULES
from kvpolicy.models.loader import DecodeModel

REQUESTS = (0, 3)


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> DecodeModel:
    return micro_model(Path(tmp_path_factory.mktemp("micro")))


@pytest.fixture(scope="module")
def alone(micro: DecodeModel) -> dict[int, Alone]:
    return {which: run_alone(micro, which) for which in REQUESTS}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "mine.py"
    path.write_text(SOURCE)
    return path


# What each must be noted as, first and later, where the deadline is short.
STALLING = {
    "spins": ("late", {"busy"}),
    "holds": ("late", {"busy"}),
    "sleeps": ("late", {"busy"}),
    "stops": ("late", {"busy"}),
    "boasts": ("died", {"died", "starting", "late"}),
    "hangs_up": ("died", {"died", "starting", "late"}),
}
# And where it is long: the kind is the point.
FAILING = {
    "exits": ("died", {"died", "starting"}),
    "killed": ("died", {"died", "starting"}),
    "garbles": ("died", {"died", "starting"}),
    "raises": ("raised", {"raised"}),
    "leaves": ("raised", {"raised"}),
    "interrupts": ("raised", {"raised"}),
    "numberless": ("number", {"number"}),
    "planless": ("type", {"type"}),
    "tame": ("", {""}),
    "chatters": ("", {""}),
    "crowds": ("", {""}),
}


@pytest.mark.parametrize("name", [*STALLING, *FAILING])
def test_no_step_is_held_up_and_no_bit_changes(
    micro: DecodeModel, alone: dict[int, Alone], file: Path, name: str
) -> None:
    """Outputs, counts and log are checked by Run; here time, kinds, and that no process is left."""
    first, later = {**STALLING, **FAILING}[name]
    processes: list[subprocess.Popen[bytes]] = []

    def note(engine: Engine) -> None:
        assert isinstance(engine.control.controller, ProcessController)
        processes[:] = engine.control.controller.processes

    # One that hangs up or boasts, and does not answer, ends a wait long before it is over.
    deadline = DEADLINE_MS if name in STALLING and first == "late" else PATIENT_MS
    run = Run(micro, alone, f"{file}:{name}", note, decision_deadline_ms=deadline)
    kinds = [d.fallback for d in run.log]
    assert kinds[0] == first and set(kinds[1:]) <= later and len(kinds) > 10
    assert run.slowest < STEP_BOUND
    assert 1 <= len(processes) <= 1 + MOST_RESTARTS and ended(processes)


def test_a_swap_ends_a_busy_process(
    micro: DecodeModel, alone: dict[int, Alone], file: Path
) -> None:
    """Every step another one that computes without end: one process at a time, none when it is over."""
    processes: list[subprocess.Popen[bytes]] = []

    def swap(engine: Engine) -> None:
        assert isinstance(engine.control.controller, ProcessController)
        processes.extend(engine.control.controller.processes)
        if len(processes) < 6:
            engine.set_controller(f"{file}:spins")
            assert ended(processes)

    run = Run(micro, alone, f"{file}:spins", swap, decision_deadline_ms=DEADLINE_MS)
    assert run.slowest < STEP_BOUND and len({p.pid for p in processes}) == 6
    assert [d.fallback for d in run.log[:5]] == ["late"] * 5 and ended(processes)


def where(engine: Engine) -> Any:
    """The number of the process that the file's bystander runs in."""
    engine.generate([PROMPTS[0]], PARAMS[0])
    targets = [d.plan.targets for d in engine.control.log if d.plan.targets]
    return int(next(iter(targets[-1].values())))


def test_who_gets_a_process(micro: DecodeModel, file: Path) -> None:
    """Foreign code that a spec names, on the wall clock; not what Python code handed over, nor what is
    built in, nor with steps as the clock, without a deadline, or where the config says so."""
    spec, own = f"{file}:bystander", os.getpid()
    for values, isolated in (
        ({"clock": "wall"}, True),
        ({"clock": "wall", "controller_isolation": "thread"}, False),
        ({"clock": "wall", "decision_deadline_ms": 0}, False),
        ({"clock": "steps"}, False),
    ):
        if values["clock"] == "wall":
            values = {"decision_deadline_ms": PATIENT_MS, **values}
        with Engine(config(Setting(), 1, values), model=micro) as engine:
            engine.set_controller(spec)
            assert (where(engine) != own) == isolated, values
            engine.set_controller(make(spec))
            assert where(engine) == own
            engine.set_controller("hisparse")
            assert not isinstance(engine.control.controller, ProcessController)


def test_a_plug_in_gets_a_process(
    micro: DecodeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found in the child as in the engine: by the same search path."""
    points = "[kvpolicy.controllers]\nby = kv_by:bystander\n"
    install(tmp_path, "kv-by", {"kv_by": SOURCE}, points)
    monkeypatch.syspath_prepend(tmp_path)
    values = {"clock": "wall", "decision_deadline_ms": PATIENT_MS}
    with Engine(config(Setting(), 1, values), model=micro) as engine:
        engine.set_controller("by")
        assert where(engine) != os.getpid()


def test_its_other_attributes_count(micro: DecodeModel, file: Path) -> None:
    values = {"clock": "wall", "decision_deadline_ms": PATIENT_MS}
    with Engine(config(Setting(), 1, values), model=micro) as engine:
        engine.set_controller(f"{file}:Counts:rows=11")
        control = engine.control
        assert control.promised == (11.0,) * len(control.stores) and control._follower is not None
        assert (control.rule.eviction, control.rule.admit_newest, control.rule.seed) == (
            "lru",
            False,
            "first",
        )
        engine.generate([PROMPTS[0]], PARAMS[0])
        own = [d.plan.default for d in control.log if not d.fallback]
        assert own == [float(i + 1) for i in range(len(own))] and own, "its state stays with it"
        assert not engine.metrics()["controller_fallbacks"]


def test_an_eviction_rule_that_comes_with_the_file(
    micro: DecodeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules run in the engine, so there the file is imported for it."""
    monkeypatch.setitem(RULES, "mru-here", RULES["lru"])  # so that it is gone at the end
    monkeypatch.delitem(RULES, "mru-here")
    path = tmp_path / "mru.py"
    path.write_text(
        "from kvpolicy import CacheRule, Plan, evictions\n"
        "from kvpolicy.kernels.eviction import RULES, EvictionRule\n"
        "def newest(stamp, step, hand, draws):\n    return -stamp.long()\n"
        "if 'mru-here' not in RULES:\n"
        "    evictions.register(EvictionRule('mru-here', touch=True, key=newest))\n"
        "class Mine:\n    cache_rule = CacheRule(eviction='mru-here')\n"
        "    def decide(self, observation):\n        return Plan.even(9)\n"
    )
    with Engine(config(Setting(), 1, {"clock": "wall"}), model=micro) as engine:
        engine.set_controller(f"{path}:Mine")
        assert engine.control.rule.eviction == "mru-here"
        engine.generate([PROMPTS[0]], PARAMS[0])


def test_a_bad_spec_says_what_make_says(micro: DecodeModel, tmp_path: Path) -> None:
    """In a process or not: the same line, and the old controller stays."""
    broken = tmp_path / "broken.py"
    broken.write_text("import kvpolicy\n\nx = 1 / 0\n")
    path = tmp_path / "some.py"
    path.write_text(
        "from kvpolicy import Plan\n"
        "class Lazy:\n"
        "    def __init__(self, rows=3):\n"
        "        if rows < 0:\n            raise ValueError('rows are below 0')\n"
        "    def decide(self, observation):\n        return Plan()\n"
        "class Odd(Lazy):\n    def initial(self, stores):\n        return 'many'\n"
    )
    specs = [
        f"{broken}:x", f"{path}:Lazzy", f"{path}:Lazy:row=3", f"{path}:Lazy:rows=-3",
        f"{path}", f"{tmp_path}/none.py:Lazy", f"{path}:Odd",
    ]  # fmt: skip
    with Engine(config(Setting(), 1, {"clock": "wall"}), model=micro) as engine:
        old = engine.control.controller
        for spec in specs:
            with pytest.raises(UserError) as isolated:
                engine.set_controller(spec)
            engine.control._isolate = False
            with pytest.raises(UserError) as inside:
                engine.set_controller(spec)
            engine.control._isolate = True
            assert str(isolated.value) == str(inside.value) and "\n" not in str(inside.value)
            assert engine.control.controller is old


def test_a_death_is_warned_of(
    micro: DecodeModel, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = {"clock": "wall", "decision_deadline_ms": PATIENT_MS, "control_interval": 1}
    with (
        caplog.at_level(logging.WARNING, "kvpolicy"),
        Engine(config(Setting(), 1, values), model=micro) as engine,
    ):
        engine.set_controller(f"{file}:exits")
        engine.generate([PROMPTS[0]], PARAMS[0])
    lines = [r.getMessage() for r in caplog.records if "controller" in r.getMessage()]
    assert "the controller's process ended (exit code 3)" in lines[0] and "exits" in lines[0]
    assert len([line for line in lines if "is being started again" in line]) == 1
