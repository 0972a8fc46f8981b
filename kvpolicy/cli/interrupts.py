"""Ctrl-C: exit code 130 at any moment.

While modules and weights load, an exception raised by a signal can surface inside foreign code that
swallows it or turns it into another. Nothing is at stake then, so the process leaves at once; from
the moment there is work to clean up after, Ctrl-C is the usual KeyboardInterrupt.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_in_force = False


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"kvpolicy: interrupted\n")
    os._exit(130)


def take_over() -> None:
    """For the process of the command line: from now on Ctrl-C ends it on the spot."""
    global _in_force
    _in_force = True
    signal.signal(signal.SIGINT, _leave)


@contextmanager
def loading() -> Iterator[None]:
    """Ctrl-C ends the process inside, and raises KeyboardInterrupt after. No effect elsewhere than
    in a process that called :func:`take_over`."""
    if _in_force:
        signal.signal(signal.SIGINT, _leave)
    yield
    if _in_force:
        signal.signal(signal.SIGINT, signal.default_int_handler)
