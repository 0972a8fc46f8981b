"""The process of one controller: makes it, says so, and answers until the engine hangs up.

Started by :mod:`kvpolicy.controllers.process`. Loads no torch by itself: ready after 0.2 s.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
from typing import Any

from kvpolicy.controllers.answer import answer
from kvpolicy.controllers.base import Controller, cache_rule, initial_rows, wants_curves
from kvpolicy.controllers.registry import make
from kvpolicy.controllers.wire import Channel, observation_of, reply_to, stores_of
from kvpolicy.errors import UserError, reason


def main(descriptor: int) -> None:
    """Serve over the socket of this number."""
    channel = Channel(socket.socket(fileno=descriptor), most_bytes=1 << 30)
    _settle()
    with contextlib.suppress(EOFError):  # the engine has closed, replaced or forgotten us
        start = channel.receive()
        logging.basicConfig(level=start["log_level"])
        controller = _begin(channel, start)
        if controller is not None:
            _serve(channel, controller, start["patience"])


def _settle() -> None:
    """What it prints goes to stderr, since stdout is the engine's output. An alarm ends the process
    even where C code holds the interpreter's lock for ever."""
    with contextlib.suppress(OSError):  # there may be no stderr
        os.dup2(2, 1)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])  # masks are inherited


def _begin(channel: Channel, start: dict[str, Any]) -> Controller | None:
    """Make the controller, and tell what the engine must know of it, or why there is none."""
    signal.setitimer(signal.ITIMER_REAL, start["start_seconds"])
    try:
        stores = stores_of(start["stores"])
        controller = make(start["spec"])
        rule = cache_rule(controller)
        ready = {
            "initial": initial_rows(controller, stores),
            "cache_rule": [
                *(str(rule.eviction), bool(rule.admit_newest), str(rule.seed), str(rule.admission))
            ],
            "wants_curves": wants_curves(controller),
        }
    except UserError as error:
        channel.send({"error": str(error)})
        return None
    except BaseException as error:  # KeyboardInterrupt and the like, of a file's own
        channel.send({"error": f"controller {start['spec']!r}: {reason(error)}"})
        return None
    signal.setitimer(signal.ITIMER_REAL, 0)
    channel.send(ready)
    return controller


def _serve(channel: Channel, controller: Controller, patience: float) -> None:
    while True:
        number, values = channel.receive()
        observation = observation_of(values)
        channel.send([number])  # begun: the deadline counts from here
        signal.setitimer(signal.ITIMER_REAL, patience)
        found = answer(controller, observation, interrupts=False)
        signal.setitimer(signal.ITIMER_REAL, 0)
        channel.send([number, reply_to(found, observation)])
