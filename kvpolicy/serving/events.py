"""TensorBoard events of a running server: the diagnostics of every policy, and swaps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpolicy.engine.engine import Engine
    from kvpolicy.telemetry.live import LiveDiagnostics

__all__ = ["EventLog"]


class EventLog:
    """Writes into a folder, or nothing where that is None. first_step: steps of the engines before this one;
    an engine that was started again writes into a folder of its own."""

    def __init__(self, engine: Engine, folder: str | None, first_step: int = 0) -> None:
        self._live: LiveDiagnostics | None = None
        if folder is not None:
            from kvpolicy.telemetry.live import LiveDiagnostics

            own = Path(folder, f"after-step-{first_step}") if first_step else Path(folder)
            self._live = LiveDiagnostics(engine, own)

    def add(self, sample: Mapping[str, Any]) -> None:
        """One more moment: a record with the fields of the engine's ``Sample``."""
        if self._live is not None:
            self._live(sample)

    def note(self, text: str) -> None:
        """A swap of the policy."""
        if self._live is not None:
            self._live.note(text)

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.close()
