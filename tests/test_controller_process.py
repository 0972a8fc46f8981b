"""One controller in a process: started, ended, started again, given up; and what goes over the wire."""

from __future__ import annotations

import gc
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
from hostile_file import SOURCE, ended
from hostile_run import DEADLINE_MS, STEP_BOUND
from hypothesis import given
from hypothesis import strategies as st
from observations import observations, observe, request

from kvpolicy import Observation, Plan, UserError
from kvpolicy.control.observation import StoreView
from kvpolicy.control.projection import project
from kvpolicy.controllers.answer import Failure
from kvpolicy.controllers.process import MOST_RESTARTS, ProcessController
from kvpolicy.controllers.wire import Channel, Garbled, answer_of, observation_of, reply_to

STORES = (StoreView("A", 1, 8, 100, 10, 100), StoreView("B", 2, 8, 200, 5, 100))
SEEN = observe(STORES, tuple(request(i, (200, 200), (40, 40)) for i in (3, 5)), free=20)
PATIENCE = 0.3


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


def until(done: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.perf_counter() + seconds
    while not (found := done()) and time.perf_counter() < end:
        time.sleep(0.005)
    return found


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
        "from test_controller_process import SEEN, STORES\n"
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
    draft_tokens=NUMBERS,
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
