"""Controllers that a spec names in a file or plug-in: in a process, where nothing they do holds up a step."""

from __future__ import annotations

import gc
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from abuse import PARAMS, PROMPTS, Alone, Setting, config, run_alone
from hostile_run import DEADLINE_MS, PATIENT_MS, STEP_BOUND, Run
from hypothesis import given
from hypothesis import strategies as st
from micro import micro_model
from observations import observations, observe, request
from site_packages import install

from kvpolicy import Engine, Observation, Plan, UserError
from kvpolicy.control.observation import StoreView
from kvpolicy.control.projection import project
from kvpolicy.controllers.answer import Failure
from kvpolicy.controllers.process import MOST_RESTARTS, ProcessController
from kvpolicy.controllers.registry import make
from kvpolicy.controllers.wire import Channel, Garbled, answer_of, observation_of, reply_to
from kvpolicy.models.loader import DecodeModel

REQUESTS = (0, 3)
STORES = (StoreView("A", 1, 8, 100, 10, 100), StoreView("B", 2, 8, 200, 5, 100))
SEEN = observe(STORES, tuple(request(i, (200, 200), (40, 40)) for i in (3, 5)), free=20)
PATIENCE = 0.3

SOURCE = '''
"""Says where it runs, and does what no controller should."""
import os, signal, sys, time
from kvpolicy import CacheRule, Plan

def tame(observation):
    return Plan.even(observation.requests[0].budget)

def spins(observation):
    while True:
        pass

def holds(observation):  # C code that never lets go of the interpreter's lock
    return sum(range(10**13))

def sleeps(observation):
    time.sleep(10)

def stops(observation):
    os.kill(os.getpid(), signal.SIGSTOP)

def exits(observation):
    os._exit(3)

def killed(observation):
    os.kill(os.getpid(), signal.SIGKILL)

def raises(observation):
    raise ValueError("no\\nidea")

def leaves(observation):
    raise SystemExit(4)

def interrupts(observation):
    raise KeyboardInterrupt

def numberless(observation):
    return Plan.even(float("nan"))

def planless(observation):
    return 3

def chatters(observation):
    print("[1, 2]" * 1000, flush=True)
    return Plan.even(7)

def garbles(observation):  # all that it finds open
    for number in range(3, 512):
        try:
            os.write(number, b"\\x00\\x00\\x00\\x02{}" * 1000)
        except OSError:
            pass
    return Plan.even(7)

def boasts(observation):  # a length beyond all bounds
    for number in range(3, 512):
        try:
            os.write(number, b"\\xff" * 64)
        except OSError:
            pass
    time.sleep(10)

def hangs_up(observation):
    os.closerange(3, 512)
    time.sleep(10)

def crowds(observation):
    return Plan(targets={number: 1.0 for number in range(60_000)})

def bystander(observation):
    return Plan(targets={r.request_id: os.getpid() for r in observation.requests})

class Counts:
    cache_rule = CacheRule(eviction="lru", admit_newest=False, seed="first")
    wants_curves = True

    def __init__(self, rows=9):
        self.rows, self.calls = rows, 0

    def initial(self, stores):
        return [self.rows] * len(stores)

    def decide(self, observation):
        self.calls += 1
        return Plan.even(self.calls)
'''


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


@pytest.fixture
def ask(file: Path) -> Iterator[Callable[..., ProcessController]]:
    """Starts controllers of the file, and ends them."""
    made: list[ProcessController] = []

    def new(name: str, **values: Any) -> ProcessController:
        made.append(ProcessController(f"{file}:{name}", STORES, **values))
        return made[-1]

    yield new
    for controller in made:
        controller.close()
        assert ended(controller.processes)


def ended(processes: list[subprocess.Popen[bytes]]) -> bool:
    """Whether none is left, not even as a zombie."""
    return all(p.returncode is not None and not Path(f"/proc/{p.pid}").exists() for p in processes)


def until(done: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.perf_counter() + seconds
    while not (found := done()) and time.perf_counter() < end:
        time.sleep(0.005)
    return found


# --- on an engine ---------------------------------------------------------------------------------

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


def test_an_eviction_rule_that_comes_with_the_file(micro: DecodeModel, tmp_path: Path) -> None:
    """Rules run in the engine, so there the file is imported for it."""
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


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("while True: pass", "not made after 1 s"),
        ("import os; os._exit(7)", r"its process ended: exit code 7"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ],
)
def test_a_file_that_never_gets_there(tmp_path: Path, body: str, message: str) -> None:
    path = tmp_path / "never.py"
    path.write_text(body + "\n")
    with pytest.raises(UserError, match=message) as caught:
        ProcessController(f"{path}:Lazy", STORES, start_seconds=1.0)
    assert "\n" not in str(caught.value)


# --- one process ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["spins", "holds", "stops", "exits"])
def test_it_is_started_again_and_given_up(ask: Callable[..., ProcessController], name: str) -> None:
    """What stays busy is ended, so that it eats no core; after a few times for good. Nobody waits."""
    controller = ask(name, patience=PATIENCE)
    kinds: list[str] = []
    slowest = 0.0

    def gave_up() -> bool:
        nonlocal slowest
        start = time.perf_counter()
        found = controller.ask(SEEN, DEADLINE_MS / 1e3)
        slowest = max(slowest, time.perf_counter() - start)
        assert isinstance(found, Failure)
        if not kinds or kinds[-1] != found.kind:
            kinds.append(found.kind)
        return "not started again" in found.text

    assert until(gave_up, 60)
    assert kinds.count("died") == MOST_RESTARTS + 1 and kinds.count("starting") == MOST_RESTARTS
    assert len(controller.processes) == MOST_RESTARTS + 1
    assert until(lambda: all(p.poll() is not None for p in controller.processes))
    assert slowest < STEP_BOUND
    assert controller.ask(SEEN, 5.0) == Failure("died", "it ended 4 times and is not started again")


def test_a_late_answer_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "late.py"
    path.write_text(
        "import time\nfrom kvpolicy import Plan\n"
        "def slow(observation):\n"
        "    time.sleep(0.3 if observation.step == 1 else 0)\n"
        "    return Plan.even(observation.step)\n"
    )
    controller = ProcessController(f"{path}:slow", STORES)
    try:
        first, then = observe(STORES, SEEN.requests, 20, step=1), observe(STORES, SEEN.requests, 20)
        assert kind(controller.ask(first, 0.02)) == "late"
        assert kind(controller.ask(then, 0.02)) == "busy"
        assert until(lambda: kind(controller.ask(then, 5.0)) != "busy")
        assert controller.ask(then, 5.0) == Plan.even(640.0)
    finally:
        controller.close()


def kind(found: Plan | Failure) -> str:
    return found.kind if isinstance(found, Failure) else ""


def test_a_forgotten_one_ends(file: Path) -> None:
    controller = ProcessController(f"{file}:tame", STORES)
    (process,) = controller.processes
    del controller
    gc.collect()
    assert ended([process])


@pytest.mark.parametrize("name", ["tame", "spins"])
def test_it_outlives_no_engine(file: Path, tmp_path: Path, name: str) -> None:
    """An engine's process that is killed cannot close anything: the idle see it, the busy have an alarm."""
    code = (
        "import os, signal\n"
        "from kvpolicy.controllers.process import ProcessController\n"
        "from test_isolation import SEEN, STORES\n"
        f"c = ProcessController({str(file) + ':' + name!r}, STORES, patience=0.5)\n"
        "c.ask(SEEN, 0.01)\n"
        "print(c.processes[0].pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here / "support")])
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    pid = int(done.stdout)

    def over() -> bool:
        status = Path(f"/proc/{pid}/stat")
        return not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"

    assert until(over), done.stderr


def test_it_loads_no_torch(tmp_path: Path) -> None:
    path = tmp_path / "light.py"
    path.write_text(
        "import sys\nfrom kvpolicy import Plan\n"
        "def light(observation):\n    return Plan.even('torch' in sys.modules)\n"
    )
    controller = ProcessController(f"{path}:light", STORES)
    assert controller.ask(SEEN, 5.0) == Plan.even(0.0)
    controller.close()


def test_what_it_prints_is_not_output(
    ask: Callable[..., ProcessController], capfd: pytest.CaptureFixture[str]
) -> None:
    assert ask("chatters").ask(SEEN, 5.0) == Plan.even(7.0)
    out, err = capfd.readouterr()
    assert not out and "[1, 2]" in err


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


# --- what goes over -------------------------------------------------------------------------------


@given(observation=observations())
def test_observations_arrive_as_they_were(observation: Observation) -> None:
    assert observation_of(sent(observation)) == observation


def test_numbers_of_numpy_arrive_as_numbers() -> None:
    odd = observe(STORES, SEEN.requests, 20, step=np.int64(7))  # type: ignore[arg-type]
    assert type(observation_of(sent(odd)).step) is int


NUMBERS = st.one_of(st.floats(allow_nan=False), st.integers(-(10**30), 10**30))
PLANS = st.builds(
    Plan,
    targets=st.dictionaries(st.integers(-1, 10), st.one_of(NUMBERS, st.lists(NUMBERS)), max_size=6),
    default=st.one_of(st.none(), NUMBERS),
    reserve_rows=NUMBERS,
    reserve_bytes=NUMBERS,
)


@given(plan=PLANS, observation=observations())
def test_plans_mean_the_same_on_the_other_side(plan: Plan, observation: Observation) -> None:
    """But for requests that do not run, of which one is kept."""
    stores = len(observation.stores)
    arrived = answer_of(sent(reply_to(plan, observation)), stores)
    assert isinstance(arrived, Plan)
    assert project(arrived, observation) == project(plan, observation)


@given(
    reply=st.recursive(
        st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), st.text()),
        lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    )
)
def test_any_reply_is_an_answer_or_garbled(reply: Any) -> None:
    try:
        found = answer_of(reply, 2)
    except Garbled:
        return
    assert isinstance(found, Plan | Failure)


def sent(message: Any) -> Any:
    """What comes out at the other end of a connection."""
    one, two = socket.socketpair()
    with one, two:
        sender, receiver = Channel(one, 1 << 20), Channel(two, 1 << 20)
        assert sender.send([message], time.perf_counter() + 5)
        return receiver.receive(time.perf_counter() + 5)[0]


def test_a_connection_waits_for_nobody() -> None:
    """More than fits between the two ends: what is left goes later, and nothing is lost."""
    one, two = socket.socketpair()
    with one, two:
        sender, receiver = Channel(one, 1 << 24), Channel(two, 1 << 24)
        message = ["x" * 1000] * 4000
        start = time.perf_counter()
        assert not sender.send(message, start + 0.02) and receiver.receive(start + 0.02) is None
        assert time.perf_counter() - start < STEP_BOUND
        while not sender.flush(time.perf_counter()):
            assert receiver.receive(time.perf_counter()) is None
        assert receiver.receive(time.perf_counter() + 5) == message
