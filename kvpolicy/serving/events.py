"""TensorBoard events of a running server: what a timeline shows, a sample at a time, and swaps."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvpolicy.telemetry.tensorboard import TAGS
from kvpolicy.telemetry.timeline import Timeline

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

    from kvpolicy.engine.engine import Engine

__all__ = ["EventLog"]

log = logging.getLogger(__name__)


class EventLog:
    """Writes into a folder, or nothing where that is None. first_step: added to the engine's steps, so
    that the curves of an engine that was started again go on."""

    def __init__(self, folder: str | None, first_step: int = 0) -> None:
        self._first = first_step
        self._last: Mapping[str, Any] | None = None
        self._writer: SummaryWriter | None = None
        if folder is not None:
            from torch.utils.tensorboard.writer import SummaryWriter

            self._writer = SummaryWriter(folder, flush_secs=10)

    def add(self, sample: Mapping[str, Any]) -> None:
        """One more moment: a record with the fields of the engine's ``Sample``."""
        last, self._last = self._last, sample
        if self._writer is None or last is None or last["step"] == sample["step"]:
            return
        two = Timeline()
        two.add(last)
        two.add(sample)
        series = two.series()
        for tag, name in TAGS.items():
            value = float(series[name][-1])
            if math.isfinite(value):
                self._writer.add_scalar(tag, value, self._first + int(sample["step"]))

    def note(self, engine: Engine, text: str) -> None:
        """A swap of the policy."""
        if self._writer is not None:
            self._writer.add_text("policy/swaps", text, self._first + engine.steps)
            self._writer.flush()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._writer is not None:
            self._writer.close()
