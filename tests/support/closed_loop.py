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
from dataclasses import dataclass, field

import numpy as np

from kvpolicy.control.filling import RESOLUTION, equal_path, marginal_path
from kvpolicy.control.observation import MissCurve, Observation, RequestView, StoreView
from kvpolicy.control.projection import frames_of, project
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
KEYS, MAPS = 128, 4096  # per frame
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
    """A request. context grows by prompt chunks, then by one a step."""

    id: int
    prompt: int
    output: int
    arrived: int
    admitted: int = -1
    context: int = 0
    budget: list[int] = field(default_factory=list)

    @property
    def most(self) -> int:
        return self.prompt + self.output

    def required(self) -> int:
        """Frames of index keys and maps for what is there, at least the prompt."""
        tokens = max(self.prompt, self.context) + 1
        return len(STORES) * (-(-tokens // KEYS) - (-tokens // MAPS))

    def hot(self) -> int:
        now = min(self.context + 1, self.most)
        return sum(
            frames_of(s, b, self.most, now) for s, b in zip(STORES, self.budget, strict=True)
        )


@dataclass
class Phase:
    """What is counted between two changes of load."""

    steps: int = 0
    tight_steps: int = 0
    idle: float = 0.0
    idle_most: float = 0.0
    running: int = 0
    missed: float = 0.0
    selected: float = 0.0
    moved: int = 0
    waits: list[int] = field(default_factory=list)

    def row(self) -> str:
        waits = self.waits or [0]
        return (
            f"{self.running / max(self.steps, 1):7.1f} {self.idle / max(self.tight_steps, 1):7.1%} "
            f"{self.idle_most:7.1%} {self.missed / max(self.selected, 1):7.1%} "
            f"{np.mean(waits):7.0f} {max(waits):6d} {self.moved:9d}"
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

    def need(self, item: Item) -> int:
        rows = [int(min(r, item.most)) for r in self.initial]
        context = max(item.context, item.prompt)
        trial = Item(item.id, item.prompt, item.output, 0, context=context, budget=rows)
        return trial.required() + trial.hot()

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
                (min(r.context + 1, r.most),) * 4,
            )
            for r in self.running
        )  # fmt: skip
        hot = sum(r.hot() for r in self.running)
        seats = self.seats - len(self.running)
        first = list(self.waiting)[:seats]
        return Observation(
            step=self.step, interval=self.step - self.base, frame_bytes=FRAME,
            pool_bytes=self.frames * FRAME,
            required_bytes=(self.frames - self.free - hot) * FRAME, optional_bytes=hot * FRAME,
            free_bytes=self.free * FRAME, floor_rows=0, waiting=len(self.waiting),
            oldest_wait=self.step - self.waiting[0].arrived if self.waiting else 0,
            arrivals=self.events["arrivals"], finished=self.events["finished"], step_seconds=0.0,
            host_to_device_bytes=0, stores=STORES, requests=views, seats_free=seats,
            queue_bytes=tuple(self.need(r) * FRAME for r in first),
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
            if self.need(item) > self.free:
                return
            self.waiting.popleft()
            item.budget = [int(min(r, item.most)) for r in self.initial]
            item.admitted = self.step
            self.phase.waits.append(self.step - item.arrived)
            self.running.append(item)
            self.due = True

    def _compute(self) -> None:
        left = CHUNK
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
        self._make_room()

    def _make_room(self) -> None:
        """Contexts have grown: where frames are out, rows are taken back, then requests put back."""
        while self.free < 0:
            self.events["shortages"] += 1
            self.due = True
            largest = max(self.running, key=Item.hot)
            if largest.hot():
                kept = [min(b, largest.context + 1) for b in largest.budget]
                largest.budget = [max(0, b - max(16, b // 8)) for b in kept]
                continue
            last = self.running.pop()
            self.preemptions += 1
            self.events["preemptions"] += 1
            self.waiting.appendleft(last)

    def _account(self) -> None:
        phase = self.phase
        phase.steps += 1
        phase.running += len(self.running)
        caps = sum(
            -(-min(r.context + 1, r.most) // s.rows_per_frame) for r in self.running for s in STORES
        )
        tight = caps > sum(r.hot() for r in self.running) + self.free
        idle = self.free / self.frames
        if tight:
            phase.tight_steps += 1
            phase.idle += idle
            phase.idle_most = max(phase.idle_most, idle)
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
    print(" " * 28 + "running    idle    most    miss    wait   most  promoted")
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
