"""A progress display on stderr while an engine works. Without a terminal it shows nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

    from kvpolicy.engine.engine import Engine

# Drawing is work on the same core as decoding: ten times a second looks live and is enough.
_REFRESH_S = 0.1


class OnStep(Protocol):
    """What an engine calls after every step."""

    def __call__(self, engine: Engine, /) -> None: ...


@contextmanager
def step_progress(label: str) -> Iterator[OnStep | None]:
    """Yield the callback to give to `Engine.generate`, or None where nobody would see it."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    bars = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,
    )
    with bars:
        yield _Display(bars, label)


@contextmanager
def task_progress(label: str) -> Iterator[Callable[[str], None]]:
    """Yield what is told the name of each thing that is done; a line on stderr shows it."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console

    with Console(stderr=True).status(label, spinner="line") as status:
        yield lambda done: status.update(f"{label} {done}".replace("[", "("))


@contextmanager
def load_progress(label: str) -> Iterator[Callable[[Any], None] | None]:
    """Yield the callback for a load that a server is under: one line on stderr."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status(label, spinner="line") as status:

        def show(remote: Any) -> None:
            sample = remote.sample()
            failed = sum(remote.errors.values())
            status.update(
                f"{label} {remote.generated:,} tokens, {sample.running} running, "
                f"{sample.waiting} waiting, {failed} failed"
            )

        yield show


class _Display:
    """Two bars: prompt tokens read and tokens generated."""

    def __init__(self, bars: Bars, label: str) -> None:
        self._bars = bars
        self._prompt = bars.add_task(f"{label} prompt", total=None, note="")
        self._decode = bars.add_task(f"{label} decode", total=None, note="")
        self._next = 0.0

    def __call__(self, engine: Engine, /) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _REFRESH_S
        state = engine.progress()
        note = f"{state.running} running, {state.waiting} waiting, {state.finished} finished"
        done, total = state.prompt_tokens_done, state.prompt_tokens_total
        self._bars.update(self._prompt, completed=done, total=total)
        done, total = state.generated_tokens, state.max_new_tokens_total
        self._bars.update(self._decode, completed=done, total=total, note=note)
        self._bars.refresh()
