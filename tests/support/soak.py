"""Random life for an engine: arrivals, cancels, preemptions, swaps, reloads and deadlines, step by step."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from abuse import draw_spec, made
from hostile import Hostile
from quick_model import QuickModel

from kvpolicy import Engine, EngineConfig, Observation, Plan, SamplingParams
from kvpolicy.engine.handle import RequestHandle
from kvpolicy.errors import CapacityError

MIB = 0.3
# With threads controllers are asked under a deadline, as on the wall clock, though steps are the clock.
DECISION_SECONDS = 0.02
SEASON = 500


@dataclass(frozen=True)
class Expected:
    """A request and what it gives when it has the engine to itself."""

    prompt: bytes
    params: SamplingParams
    tokens: tuple[int, ...]


def variants(count: int) -> list[Expected]:
    """Requests of all kinds: lengths at and around frames and lots of growth, greedy and drawn."""
    draw = random.Random(7)
    found = []
    with Engine(config("resident"), model=QuickModel()) as engine:
        for number in range(count):
            size = draw.choice((1, 2, 15, 16, 17, 63, 64, 65, draw.randint(1, 200)))
            prompt = bytes(draw.randrange(256) for _ in range(size))
            params = SamplingParams(
                max_new_tokens=draw.choice((1, 20, 64, draw.randint(1, 250), 250)),
                temperature=draw.choice((0.0, 20.0)),
                seed=number,
            )
            output = engine.generate([prompt], params)[0]
            found.append(Expected(prompt, params, tuple(output.tokens)))
    return found


def config(controller: Any, **values: Any) -> EngineConfig:
    return EngineConfig(
        **{
            "device": "cpu",
            "controller": controller,
            "clock": "steps",
            "max_concurrency": 5,
            "prefill_chunk": 24,
            "staging_rows": 16,
            "device_kv_mib": MIB,
            "host_kv_mib": 0.8,
            **values,
        }
    )


class Sleepy:
    """Now and then too late for a decision."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def decide(self, observation: Observation) -> Plan:
        if self._random.random() < 0.1:
            time.sleep(1.5 * DECISION_SECONDS)
        return Plan.even(self._random.randrange(60))


class Soak:
    """One engine and what happens to it. counts: of everything that was done.

    every: steps between two checks of integrity. threads: ask controllers in threads, with a deadline;
    else a life depends on its seed alone.
    """

    def __init__(
        self, seed: int, expected: list[Expected], every: int, folder: Path, threads: bool
    ) -> None:
        self._random = random.Random(seed)
        self._expected = expected
        self._every = every
        self._yaml = folder / "soak.yaml"
        self.counts: Counter[str] = Counter()
        self._live: dict[int, tuple[Expected, RequestHandle]] = {}
        self.engine = Engine(config(Hostile(seed)), model=QuickModel())
        self.engine.control.decider.deadline = DECISION_SECONDS if threads else 0.0
        self.most_threads = 0
        self.start = self.books()

    def books(self) -> dict[str, Any]:
        """All that must be at the end as it was at the start."""
        engine, memory = self.engine, self.engine.memory
        tables = [
            (table.data_ptr(), table.shape)
            for store in memory._tables.stores
            for table in (store.cache.row_frames, store.cache.map_frames, store.cache.meta_frames)
        ]
        return {
            "usage": memory.usage(),
            "owners": memory.arena.frames.owners(),
            "free frames": sorted(memory.arena.frames._free),
            "seats": sorted(memory._seats),
            "host": (memory.host.extents.largest, memory.host.extents._used),
            "requests": (engine.requests, memory.requests, memory.suspended, engine.control._seen),
            "queue": (list(engine.scheduler.waiting), engine.scheduler.running),
            "block tables": tables,
        }

    def run(self, steps: int) -> None:
        """So many steps, in which something happens before each."""
        engine = self.engine
        while engine.steps < steps:
            self._happen()
            if not engine.step():
                engine.skip()
            self._collect()
            if engine.steps % self._every == 0:
                engine.check_integrity()
                self.counts["checks"] += 1
            self.most_threads = max(self.most_threads, threading.active_count())

    def drain(self) -> None:
        """Let all that runs end, and cancel what waits."""
        for request in list(self.engine.scheduler.waiting):
            self._live[request.id][1].cancel()
        while self.engine.step():
            self._collect()
        self._collect()

    def _happen(self) -> None:
        draw = self._random.random
        if len(self._live) < 12 and draw() < 0.1:
            self._submit()
        if self._live and draw() < 0.01:
            self._random.choice(list(self._live.values()))[1].cancel()
            self.counts["cancels"] += 1
        running = self.engine.scheduler.running
        if running and draw() < 0.02:
            self.engine.residents.preempt(self._random.choice(running), self.engine.steps)
            self.counts["forced preemptions"] += 1
        if self._season() == 1:
            if self.engine.config.controller != "resident":
                self.engine.set_controller("resident")
            return
        if draw() < 0.01:
            self._swap()
        if draw() < 0.005:
            self._reload()

    def _season(self) -> int:
        """In one of three everybody is promised everything for long, so that growth preempts."""
        return self.engine.steps // SEASON % 3

    def _submit(self) -> None:
        expected = self._random.choice(self._expected)
        limit = self._random.randint(3, 200) if self._random.random() < 0.2 else None
        params = expected.params.model_copy(update={"deadline_ms": limit})
        try:
            handle = self.engine.submit(expected.prompt, params)
        except CapacityError:  # resident: it would not fit alone
            self.counts["refused"] += 1
            return
        self._live[handle.id] = (expected, handle)
        self.counts["requests"] += 1

    def _swap(self) -> None:
        seed = self._random.randrange(1000)
        other = {0: Sleepy(seed), 1: Hostile(seed), 2: Hostile(seed)}.get(seed % 10)
        self.engine.set_controller(other or made(draw_spec(self._random)))
        self.counts["swaps"] += 1

    def _reload(self) -> None:
        eviction = self._random.choice(("lru", "clock", "fifo", "random", "null"))
        rows = self._random.randrange(80)
        self._yaml.write_text(
            f"controller: static:device_buffer_rows={rows}\neviction: {eviction}\n"
            f"control_interval: {self._random.randint(1, 12)}\n"
        )
        self.engine.reload(self._yaml)
        self.counts["reloads"] += 1

    def _collect(self) -> None:
        """Hold what has ended against what it gives alone."""
        for number in [n for n, (_, handle) in self._live.items() if handle.done]:
            expected, handle = self._live.pop(number)
            output = handle.result()
            count = len(output.tokens)
            assert tuple(output.tokens) == expected.tokens[:count]
            assert output.finish_reason == "cancelled" or count == len(expected.tokens)
            self.counts["tokens"] += count
            self.counts[output.finish_reason] += 1
