"""Who watches the engine step by step."""

from __future__ import annotations

from typing import Protocol

from kvpolicy.engine.scheduler import Batch


class StepObserver(Protocol):
    """Called once per step, when its work has been launched and committed and no token of it has been
    emitted: its requests are all on the device still. Their last selections are in the device's
    tables (``StoreTables.recent``) until the next step. It should wait for nothing.

    step: engine step. batch: what was computed; positions have moved on already.
    """

    def __call__(self, step: int, batch: Batch, /) -> None: ...
