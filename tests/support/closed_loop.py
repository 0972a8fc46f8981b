"""A closed loop without a model: requests that come, grow and end, under a controller and a load step.

Everything that a controller deals with is there: frames, admission in order, growing contexts,
projection; only the rows are missing. Sizes are those of tiny-dsa in float32 (frames of 16 KiB), and
so are the miss curves: measured on its selections, least-recently-used order, then 1 / rows.

    python -P tests/support/closed_loop.py        prints the tables of docs/adaptive.md
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter, deque
from dataclasses import dataclass, field, replace

import numpy as np
from observations import frames_of

from kvpolicy.control.filling import RESOLUTION, equal_path, marginal_path
from kvpolicy.control.observation import MissCurve, Observation, RequestView, StoreView
from kvpolicy.control.projection import project
from kvpolicy.controllers.base import Controller, initial_rows
from kvpolicy.controllers.registry import make
from kvpolicy.models.checkpoint import checkpoint_folder

FRAME, TOPK, INTERVAL, CHUNK = 16384, 128, 8, 64
STORES = (
    StoreView("L0", 1, TOPK, 320, 51, 2048),
    StoreView("L1", 1, TOPK, 320, 51, 2048),
    StoreView("L2-5", 4, TOPK, 1280, 12, 2048),
    StoreView("L6-7", 2, TOPK, 640, 25, 2048),
)
KEYS, MAPS, LOT = 128, 4096, 64  # keys and map entries a frame; tokens that room grows by
GROWTH = 2 * len(STORES)  # frames that a lot may take, left for everyone at an admission
SHARED = 180  # frames of staging and in-flight rows
# Misses per step by layer group and budget, as measured on the shipped model (training/evaluate.py).
_MEASURED = json.loads((checkpoint_folder("tiny-dsa") / "evaluation.json").read_text())
_MISSES = _MEASURED["miss_percent"]
ROWS = (0, *(int(TOPK * ratio) for ratio in _MISSES["ratios"]))
RATES = tuple(
    (1.0, *(percent / 100 for percent in _MISSES["lru"]["groups"][group]))
    for group in ("0-0", "1-1", "2-5", "6-7")
)
CURVES = tuple(MissCurve(ROWS, tuple(TOPK * rate for rate in rates), 500.0) for rates in RATES)


@dataclass(eq=False)
class Item:
    """A request. context grows by prompt chunks, then by one a step; room, the tokens there is
    memory for, is the prompt's from the start and grows in lots."""

    id: int
    prompt: int
    output: int
    arrived: int
    admitted: int = -1
    context: int = 0
    room: int = 0
    budget: list[int] = field(default_factory=list)

    @property
    def most(self) -> int:
        return self.prompt + self.output

    def room_for(self, tokens: int) -> int:
        return min(self.most, -(-tokens // LOT) * LOT)

    def required(self) -> int:
        """Frames of index keys and maps."""
        return len(STORES) * (-(-self.room // KEYS) - (-self.room // MAPS))

    def hot(self) -> int:
        return sum(
            frames_of(s, b, self.most, self.room) for s, b in zip(STORES, self.budget, strict=True)
        )


@dataclass
class Phase:
    """What is counted between two changes of load."""

    steps: int = 0
    tight_steps: int = 0
    idle: float = 0.0
    idle_most: float = 0.0
    idle_steps: int = 0
    running: int = 0
    missed: float = 0.0
    selected: float = 0.0
    moved: int = 0
    shortages: int = 0
    waits: list[int] = field(default_factory=list)

    def row(self) -> str:
        waits = self.waits or [0]
        return (
            f"{self.running / max(self.steps, 1):7.1f} {self.idle / max(self.tight_steps, 1):7.1%} "
            f"{self.idle_most:7.1%} {self.missed / max(self.selected, 1):7.1%} "
            f"{np.mean(waits):7.0f} {max(waits):6d} {self.moved:9d} {self.shortages:5d}"
        )


class ClosedLoop:
    """Clients that each send their next request when the last has ended."""

    def __init__(
        self,
        spec: str | Controller,
        frames: int,
        seats: int = 64,
        seed: int = 0,
        curves: bool = True,
    ) -> None:
        self.controller = make(spec) if isinstance(spec, str) else spec
        self.initial = initial_rows(self.controller, STORES)
        self.frames, self.seats = frames, seats
        self.random = random.Random(seed)
        self.curves = CURVES if curves else ()
        self.step = self.clients = self.made = self.base = 0
        self.waiting: deque[Item] = deque()
        self.running: list[Item] = []
        self.events: Counter[str] = Counter()
        self.due = True
        self.projections = self.preemptions = 0
        self.phase = Phase()
        self.releases: list[tuple[int, int]] = []

    # --- memory ------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        return self.frames - SHARED - sum(r.required() + r.hot() for r in self.running)

    def start(self, item: Item) -> Item:
        """The request as it would be admitted."""
        rows = [int(min(r, item.most)) for r in self.initial]
        room = item.room_for(max(item.prompt, item.context) + 1)
        return replace(item, room=room, budget=rows, admitted=self.step)

    def need(self, item: Item) -> int:
        started = self.start(item)
        return started.required() + started.hot() + GROWTH

    # --- one step ----------------------------------------------------------------------------

    def run(self, clients: int, steps: int) -> Phase:
        """So many clients for so many steps; what happened."""
        self.phase = Phase()
        self.clients = clients
        for _ in range(steps):
            while len(self.waiting) + len(self.running) < self.clients:
                self._submit()
            if self.due or self.step - self.base >= INTERVAL:
                self._control()
            self._admit()
            self._account()
            self._compute()
            self.step += 1
        return self.phase

    def _submit(self) -> None:
        item = Item(
            self.made, self.random.randint(800, 3200), self.random.randint(100, 400), self.step
        )
        self.made += 1
        self.events["arrivals"] += 1
        self.waiting.append(item)
        self.due = True

    def observe(self) -> Observation:
        views = tuple(
            RequestView(
                r.id, r.context, (r.most,) * 4, tuple(r.budget), r.context >= r.prompt,
                self.step - r.admitted, max(0, r.context - r.prompt), 0, 0, 0,
                (r.room,) * 4,
            )
            for r in self.running
        )  # fmt: skip
        hot = sum(r.hot() for r in self.running)
        seats = self.seats - len(self.running)
        queue = [self.need(r) for r in list(self.waiting)[:seats]]
        queue[:1] = [frames + GROWTH * len(self.running) for frames in queue[:1]]
        return Observation(
            step=self.step, interval=self.step - self.base, frame_bytes=FRAME,
            pool_bytes=self.frames * FRAME,
            required_bytes=(self.frames - self.free - hot) * FRAME, optional_bytes=hot * FRAME,
            free_bytes=self.free * FRAME, floor_rows=0, waiting=len(self.waiting),
            oldest_wait=self.step - self.waiting[0].arrived if self.waiting else 0,
            arrivals=self.events["arrivals"], finished=self.events["finished"], step_seconds=0.0,
            host_to_device_bytes=0, stores=STORES, requests=views, seats_free=seats,
            queue_bytes=tuple(frames * FRAME for frames in queue),
            shortages=self.events["shortages"], preemptions=self.events["preemptions"],
            tokens=self.events["tokens"], curves=self.curves,
        )  # fmt: skip

    def _control(self) -> None:
        if not self.running:
            return
        observation = self.observe()
        before = self.free
        projected = project(self.controller.decide(observation), observation)
        self.projections += projected.changed
        for item in self.running:
            new = list(projected.budgets[item.id])
            for store, (old, rows) in enumerate(zip(item.budget, new, strict=True)):
                if rows >= item.most > old:
                    self.phase.moved += item.context * STORES[store].layers
            item.budget = new
        if observation.queue_bytes:
            self.releases.append((before, self.free))
        self.base, self.due = self.step, False
        self.events.clear()
        assert self.free >= 0

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.seats:
            item = self.waiting[0]
            if self.need(item) + GROWTH * len(self.running) > self.free:
                return
            self.waiting.popleft()
            self.phase.waits.append(self.step - item.arrived)
            self.running.append(self.start(item))
            self.due = True

    def _compute(self) -> None:
        left = CHUNK
        self._grow()
        for item in list(self.running):
            before = item.context
            if item.context < item.prompt:
                item.context += min(left, item.prompt - item.context)
                left -= item.context - before
            else:
                item.context += 1
                self.events["tokens"] += 1
            if item.context >= item.most:
                self.running.remove(item)
                self.events["finished"] += 1
                self.due = True

    def _grow(self) -> None:
        """Room for the next row of everyone. Where frames lack, rows beyond those promised are taken
        back in proportion, an eighth at least; then the youngest is put back."""
        for item in list(self.running):
            room = item.room_for(item.context + 1)
            if room <= item.room or item not in self.running:
                continue
            item.room, before = room, item.room
            while self.free < 0 and item in self.running:
                self.events["shortages"] += 1
                self.phase.shortages += 1
                self.due = True
                item.room, missing = before, -self.free
                if not self._take_back(missing):
                    self._preempt()
                item.room = room

    def _take_back(self, missing: int) -> bool:
        for part in range(7, -1, -1):
            budgets = []
            for item in self.running:
                rows = []
                for budget, promised in zip(item.budget, self.initial, strict=True):
                    held = item.room if budget >= item.most else budget
                    low = int(min(promised, held))
                    rows.append(low + (held - low) * part // 8 if held > low else budget)
                budgets.append(rows)
            trial = [replace(r, budget=b) for r, b in zip(self.running, budgets, strict=True)]
            if sum(r.hot() for r in self.running) - sum(r.hot() for r in trial) >= missing:
                for item, rows in zip(self.running, budgets, strict=True):
                    item.budget = rows
                return True
        return False

    def _preempt(self) -> None:
        last = self.running.pop()
        last.arrived = self.step
        self.preemptions += 1
        self.events["preemptions"] += 1
        self.waiting.appendleft(last)

    def _account(self) -> None:
        phase = self.phase
        phase.steps += 1
        phase.running += len(self.running)
        caps = sum(-(-r.context // s.rows_per_frame) for r in self.running for s in STORES)
        tight = caps > sum(r.hot() for r in self.running) + self.free
        idle = self.free / self.frames
        if tight:
            phase.tight_steps += 1
            phase.idle += idle
            phase.idle_most = max(phase.idle_most, idle)
            phase.idle_steps += idle > 0.02
        for item in self.running:
            if item.context < item.prompt:
                continue
            for store, rows in enumerate(item.budget):
                layers = STORES[store].layers
                phase.selected += TOPK * layers
                if rows < item.context:
                    phase.missed += TOPK * layers * miss_rate(store, rows)


def miss_rate(store: int, rows: int) -> float:
    """Missed rows per selected row of a store at a budget."""
    if rows > ROWS[-1]:
        return RATES[store][-1] * ROWS[-1] / rows
    return float(np.interp(rows, ROWS, RATES[store]))


def split_table() -> None:
    """Misses of the equal and of the marginal split of the same bytes."""
    layers = np.array([s.layers for s in STORES])
    equal = equal_path(0, (TOPK,) * 4, (8192,) * 4)
    marginal = marginal_path(0, (TOPK,) * 4, (8192,) * 4, CURVES)

    def weighted(rows: np.ndarray) -> float:
        rates = [miss_rate(i, int(r)) for i, r in enumerate(rows)]
        return float(np.dot(rates, layers) / layers.sum())

    print("rows a layer    equal  marginal   rows of the marginal split by store")
    for ratio in (1.5, 2, 3, 4, 8):
        size = ratio * TOPK * layers.sum()
        found = []
        for path in (equal, marginal):
            fits = [
                rows
                for level in range(0, RESOLUTION + 1, 16)
                if float(np.dot(rows := path.rows(level), layers)) <= size
            ]
            found.append(fits[-1])
        one, other = (weighted(rows) for rows in found)
        print(f"{ratio:4g} x top-k {one:9.2%} {other:9.2%}   {found[1].tolist()}")


SPECS = (
    "adaptive",
    "adaptive:split=equal",
    "adaptive:min_rows=0",
    "hybrid",
    "hisparse",
    "resident",
)
# Clients, steps, note. The steps until the queue has been served, after a fall of load, are apart.
LOADS = ((3, 3000, ""), (24, 4000, ""), (3, 1500, "draining"), (3, 1500, ""))


def main(frames: int) -> None:
    """The load step of docs/adaptive.md: 3 clients, 24, 3 again."""
    print(f"{frames} frames; idle: share of the pool, while demand exceeds memory")
    print(" " * 28 + "running    idle    most    miss    wait   most  promoted short")
    for spec in SPECS:
        loop = ClosedLoop(spec, frames)
        for clients, steps, note in LOADS:
            print(f"{spec:22} {clients:4d} {loop.run(clients, steps).row()} {note}")
        print(
            f"{'':22} made {loop.made}, preempted {loop.preemptions}, projected {loop.projections}"
        )


if __name__ == "__main__":
    split_table()
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2048)
