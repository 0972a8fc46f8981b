"""A controller in a process of its own, so that nothing it does can hold up the engine's.

Computing without end in Python, or in C code that keeps the interpreter's lock, would stop every thread
of the engine; here it costs a core until the process is ended. The engine never runs the controller's
code: it starts the process, waits until the controller is made, then sends observations and reads plans
as plain data (:mod:`kvpolicy.controllers.wire`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from typing import Any

from kvpolicy import evictions
from kvpolicy.control.observation import Observation, StoreView
from kvpolicy.control.plan import Plan
from kvpolicy.controllers.answer import Failure
from kvpolicy.controllers.registry import find
from kvpolicy.controllers.wire import Channel, Garbled, answer_of, most_bytes
from kvpolicy.errors import UserError
from kvpolicy.memory.rule import CacheRule

log = logging.getLogger(__name__)

SUPPORTED = os.name == "posix"
# Making a controller takes 0.3 s without torch, some 5 s where it imports torch on slow cores.
START_SECONDS = 20.0
# An answer that takes this long will not come: the process is ended, so that it does not eat a core.
PATIENCE = 10.0
# How often a process that ended is replaced. A controller that ends every time must not go on for ever.
MOST_RESTARTS = 3
# To finish files and the like after the engine has hung up.
EXIT_SECONDS = 1.0
# For the status of a process that has hung up; in a step, so a little only.
_STATUS_SECONDS = 0.005

# The child finds modules where the engine does. An interrupt from the keyboard is the engine's.
_BOOT = """\
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
import json
sys.path[:] = json.loads(sys.argv[2])
from kvpolicy.controllers.child import main
main(int(sys.argv[1]))
"""


class _Ended(Exception):
    """The process cannot be used any more, and why."""


class _Child:
    """One process. made: it has its controller. busy: asked, and no answer yet. since: when it was
    started, or asked last."""

    def __init__(self, start: dict[str, Any], patience: float) -> None:
        ours, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), json.dumps([str(folder) for folder in sys.path])]
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _BOOT, *arguments],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
        except BaseException:
            ours.close()
            raise
        self.stop = weakref.finalize(self, _stop, self.process, ours)
        self.made = self.busy = self._begun = False
        self.since = time.perf_counter()
        self._channel = Channel(ours, most_bytes=1 << 16)
        self._patience = patience
        self._number = 0
        self._stores = len(start["stores"])
        self._guarded(self._channel.send, start, self.since)

    def ready(self, until: float) -> dict[str, Any] | None:
        """What it says of its controller once that is made; None if it is not by then."""
        message = self._receive(until)
        if message is None:
            return None
        if not isinstance(message, dict):
            raise _Ended(self._end("it sent what it never sends"))
        self.made = "error" not in message
        return message

    def ask(self, observation: Observation, seconds: float) -> Plan | Failure | None:
        """The answer, or None if there is none in time.

        The time until the process gets to it is the machine's, not the controller's. So it is added, up
        to the same number of seconds.
        """
        self.since = time.perf_counter()
        self._number += 1
        self.busy, self._begun = True, False
        self._channel.most_bytes = most_bytes(observation)
        until = self.since + seconds
        self._guarded(self._channel.send, [self._number, observation], until)
        if not self._wait_begun(until):
            return None
        message = self._receive(time.perf_counter() + seconds)
        return None if message is None else self._answer(message)

    def answered(self) -> bool:
        """Whether it is free to be asked. An answer that comes late is dropped."""
        if not self.busy:
            return True
        now = time.perf_counter()
        if self._guarded(self._channel.flush, now) and self._wait_begun(now):
            message = self._receive(now)
            if message is not None:
                self._answer(message)
                return True
        if now - self.since > self._patience:
            raise _Ended(self._end(f"no answer for {self._patience:g} s"))
        return False

    def _wait_begun(self, until: float) -> bool:
        if not self._begun:
            message = self._receive(until)
            if message is not None and message != [self._number]:
                raise _Ended(self._end("it sent what it never sends"))
            self._begun = message is not None
        return self._begun

    def _answer(self, message: Any) -> Plan | Failure:
        match message:
            case [int(number), reply] if number == self._number:
                self.busy = False
                found: Plan | Failure = self._guarded(answer_of, reply, self._stores)
                return found
        raise _Ended(self._end("it sent what it never sends"))

    def _receive(self, until: float) -> Any:
        return self._guarded(self._channel.receive, until)

    def _guarded(self, act: Any, *arguments: Any) -> Any:
        try:
            return act(*arguments)
        except EOFError:
            raise _Ended(self._end("")) from None
        except Garbled as error:
            raise _Ended(self._end(f"it sent {error}")) from None

    def _end(self, why: str) -> str:
        """End it, if it has not ended itself, and say how."""
        if not why:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.process.wait(_STATUS_SECONDS)
                why = f"exit code {code}" if code >= 0 else _signal(-code)
                if -code == signal.SIGALRM:
                    why = f"no answer for {self._patience:g} s"
        self.process.kill()
        return why or "it hung up"

    def close(self) -> None:
        """End the process: at once if it is busy, else it may finish its files."""
        if self.busy or not self.made:
            self.process.kill()
        self.stop()


def _stop(process: subprocess.Popen[bytes], end: socket.socket) -> None:
    end.close()
    for seconds in (EXIT_SECONDS, EXIT_SECONDS):
        try:
            process.wait(seconds)
            return
        except subprocess.TimeoutExpired:
            process.kill()
    log.warning("controller process %d does not end", process.pid)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class ProcessController:
    """The controller of a spec, made and asked in a process. It has the attributes of a controller.

    Waits until the controller is made, at most ``start_seconds``. UserError, as by ``make``, where it
    cannot be had. When the process ends it is started again at most MOST_RESTARTS times, with a
    controller that remembers nothing. patience: seconds after which a busy process is ended.
    """

    def __init__(
        self,
        spec: str,
        stores: tuple[StoreView, ...],
        start_seconds: float = START_SECONDS,
        patience: float = PATIENCE,
    ) -> None:
        self.spec = spec
        self.restarts = 0
        self._start_seconds = start_seconds
        self._patience = patience
        self._order = {
            "spec": spec,
            "stores": stores,
            "log_level": logging.getLogger("kvpolicy").getEffectiveLevel(),
            "start_seconds": start_seconds,
            "patience": patience,
        }
        self._past: list[_Child] = []
        self._gone = ""
        try:
            self._child = _Child(self._order, patience)
        except (OSError, _Ended) as error:
            raise UserError(f"controller {spec!r}: its process does not start: {error}") from None
        try:
            self._take(self._wait_ready())
        except BaseException:
            self.close()
            raise

    def _wait_ready(self) -> dict[str, Any]:
        try:
            found = self._child.ready(time.perf_counter() + self._start_seconds)
        except _Ended as error:
            raise UserError(f"controller {self.spec!r}: its process ended: {error}") from None
        if found is None:
            raise UserError(f"controller {self.spec!r}: not made after {self._start_seconds:g} s")
        return found

    def _take(self, found: dict[str, Any]) -> None:
        """What the engine must know of a controller, as the process found it."""
        match found:
            case {"error": str(text)}:
                raise UserError(text)
            case {
                "initial": [*rows],
                "cache_rule": [
                    str(eviction),
                    bool(admit),
                    ("selection" | "first") as seed,
                    ("all" | "accepted") as admission,
                ],
                "wants_curves": bool(wants),
            }:
                self._rows = tuple(float(value) for value in rows)
                if eviction not in evictions.names():
                    find(self.spec)  # it brings a rule of its own, and rules run in the engine
                self.cache_rule = CacheRule(eviction, admit, seed, admission)
                self.wants_curves = wants
            case _:
                raise UserError(f"controller {self.spec!r}: its process sent what it never sends")

    def initial(self, stores: tuple[StoreView, ...]) -> tuple[float, ...]:
        """Rows that the controller's own ``initial`` gave for these stores."""
        return self._rows

    def decide(self, observation: Observation) -> Plan:
        """Ask with patience instead of a deadline. RuntimeError if there is no plan."""
        found = self.ask(observation, self._patience)
        if isinstance(found, Failure):
            raise RuntimeError(found.text)
        return found

    def ask(self, observation: Observation, seconds: float) -> Plan | Failure:
        """The plan or why there is none, after ``seconds`` at most, twice that where the machine is
        busy (and 1 ms more: waits are whole milliseconds)."""
        if self._gone:
            return Failure("died", self._gone)
        try:
            if not self._child.made and not self._made_again():
                return Failure("starting", "its process is being started again")
            if not self._child.answered():
                return Failure("busy", "the controller is still at an earlier decision")
            found = self._child.ask(observation, seconds)
        except _Ended as error:
            return self._replace(str(error))
        if found is None:
            return Failure("late", f"no decision within {seconds * 1e3:g} ms")
        return found

    def _made_again(self) -> bool:
        now = time.perf_counter()
        found = self._child.ready(now)
        if found is not None and "error" in found:
            raise _Ended(found["error"])
        if found is None and now - self._child.since > self._start_seconds:
            raise _Ended(f"not made after {self._start_seconds:g} s")
        return found is not None

    def _replace(self, why: str) -> Failure:
        """Another process for one that has ended, without waiting for either: a step is running."""
        self._child.process.kill()
        again = f"it is started again ({self.restarts + 1} of {MOST_RESTARTS})"
        if self.restarts == MOST_RESTARTS:
            again = self._gone = f"it ended {MOST_RESTARTS + 1} times and is not started again"
        else:
            self.restarts += 1
            try:
                child = _Child(self._order, self._patience)
            except (OSError, _Ended) as error:
                again = self._gone = f"it cannot be started again: {error}"
            else:
                self._past.append(self._child)
                self._child = child
        return Failure("died", f"the controller's process ended ({why}); {again}")

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        """All that were started, the present one last."""
        return [child.process for child in (*self._past, self._child)]

    def close(self) -> None:
        """End the process. A second call does nothing."""
        self._gone = self._gone or "it was closed"
        for child in (*self._past, self._child):
            child.close()
