"""Windows of live steps: what was done, and how long it took. What the cost model is fitted to."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from kvpolicy.engine.engine import Engine
from kvpolicy.engine.request import Request
from kvpolicy.engine.scheduler import Batch
from kvpolicy.errors import UserError
from kvpolicy.twin.cost import TERMS, Work

__all__ = ["Window", "WorkLog"]

# Steps of a window. At its end the device is waited for, which costs one launch: 0.5 % of it.
STEPS = 64


@dataclass(frozen=True, slots=True)
class Window:
    """Some steps without idle time between them."""

    work: Work
    seconds: float
    steps: int

    def to_list(self) -> list[float]:
        """steps, seconds, then the terms."""
        return [float(self.steps), self.seconds, *self.work.values()]

    @classmethod
    def from_list(cls, values: list[float]) -> Window:
        """As :meth:`to_list` gave it."""
        return cls(Work(*values[2 : 2 + len(TERMS)]), values[1], int(values[0]))


class WorkLog:
    """Watches an engine (``Engine.observers``) and cuts its steps into windows.

    All but bytes over the link is known on the host; they are read where a window ends. UserError for
    an engine with a drafter: the cost model knows one row per request and step.
    """

    def __init__(self, engine: Engine, steps: int = STEPS) -> None:
        if engine.speculator is not None:
            raise UserError(
                f"drafter = {engine.speculator.drafter.name!r}: the cost model knows one row per request "
                "and step, so its records are made without a drafter"
            )
        self.windows: list[Window] = []
        self._engine, self._every = engine, steps
        layout = engine.memory.layout
        self._topk = [
            sum(s.topk for s in layout.geometry.selectors_of(store.store.name))
            for store in layout.stores
        ]
        self._per = [store.store.tokens_per_entry for store in layout.stores]
        self._layers = [store.store.n_layers for store in layout.stores]
        self._selectors = len(layout.geometry.selectors)
        self._entered: set[int] = set()
        engine.observers.append(self)
        self.begin()

    def begin(self) -> None:
        """A window begins now: the device has nothing to do, and what was seen since the last one is
        dropped."""
        self._work, self._steps = Work(), 0
        counted = self._engine.memory.counted()
        self._bytes = counted.decode.host_to_device_bytes
        self._moved = self._engine.memory.counters.moved_bytes
        self._started = time.perf_counter()

    def cut(self) -> None:
        """A window ends here, if a step has been done in it; the next one begins."""
        if self._steps:
            counted = self._engine.memory.counted()  # waits for the device
            seconds = time.perf_counter() - self._started
            self._work.link_bytes = float(counted.decode.host_to_device_bytes - self._bytes)
            self._work.moved_bytes = float(self._engine.memory.counters.moved_bytes - self._moved)
            self.windows.append(Window(self._work, seconds, self._steps))
        self.begin()

    def note(self) -> None:
        """A step has been done."""
        if self._steps >= self._every:
            self.cut()

    def leave(self) -> None:
        """Watch no more."""
        if self in self._engine.observers:
            self._engine.observers.remove(self)

    def __call__(self, step: int, batch: Batch, /) -> None:
        work = self._work
        self._steps += 1
        if batch.decode:
            work.decode_steps += 1
            work.rows += len(batch.decode)
        for request in batch.decode:
            self._decode(request)
        for request, count in batch.prompts:
            work.prompt_rows += count
            work.prompt_keys += count * (request.computed - count) * self._selectors
            hot = self._engine.memory.requests[request.id].hot
            mapped = sum(
                layers for layers, cache in zip(self._layers, hot, strict=True) if not cache.full
            )
            work.prompt_mapped_rows += count * mapped
            self._enter(request)
        work.prompt_steps += bool(batch.prompts)

    def _decode(self, request: Request) -> None:
        work, before = self._work, request.computed - 1
        work.scanned_keys += before * self._selectors
        hot: Any = self._engine.memory.requests[request.id].hot
        for topk, per, layers, cache in zip(self._topk, self._per, self._layers, hot, strict=True):
            rows = min(topk, before // per) * layers
            work.attended_rows += rows
            work.resolved_rows += 0 if cache.full else rows

    def _enter(self, request: Request) -> None:
        if request.id not in self._entered:
            self._entered.add(request.id)
            self._work.entered_tokens += request.context
