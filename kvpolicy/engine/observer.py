"""Who watches the engine step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvpolicy.memory.step import StepMemory


class StepObserver(Protocol):
    """Called after every commit, before tokens are emitted: the requests of the step are all there
    still. It runs between two steps' work, so it should wait for nothing on the device.

    step: engine step. memory: the step's segments, requests and selections. accepted: rows of each
    segment that were committed.
    """

    def __call__(self, step: int, memory: StepMemory, accepted: Sequence[int], /) -> None: ...
