"""How long a decision takes: `adaptive` itself, and a question to a controller in a thread or a process.

    python -P benchmarks/decision_time.py [REQUESTS ...]

Medians and 99th percentiles of 300, in milliseconds, for plans of one target per request and store.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvpolicy.control.observation import Observation, RequestView, StoreView
from kvpolicy.controllers import make
from kvpolicy.controllers.decider import Decider
from kvpolicy.controllers.process import ProcessController

ROUNDS, WARM, PATIENT = 300, 20, 5.0
STORES = tuple(StoreView(f"s{i}", 4, 2048, 2624, 12, 4096) for i in range(4))
FOREIGN = """
from kvpolicy import Plan

class Same:
    def decide(self, observation):
        targets = {r.request_id: r.budget for r in observation.requests}
        return Plan(targets=targets)
"""


def observe(requests: int) -> Observation:
    """Requests of 100,000 tokens with 4,096 rows per store, and some memory to spare."""
    now, budget = (100_000,) * len(STORES), (4096,) * len(STORES)
    views = tuple(
        RequestView(i, 100_000, now, budget, True, 500, 500, 8192, 8192, 800, now)
        for i in range(requests)
    )
    frame = 32_768
    hot = requests * len(STORES) * (-(-4096 // 12) + 1) * frame
    return Observation(
        step=4000, interval=8, frame_bytes=frame, pool_bytes=4 * hot, required_bytes=hot,
        optional_bytes=hot, free_bytes=2 * hot, floor_rows=0, waiting=0, oldest_wait=0, arrivals=0,
        finished=0, step_seconds=0.02, host_to_device_bytes=1 << 30, stores=STORES, requests=views,
        seats_free=8, queue_bytes=(), shortages=0, curves=(),
    )  # fmt: skip


def timed(ask: Callable[[Observation], object], observation: Observation) -> str:
    """Median and 99th percentile."""
    found = []
    for _ in range(ROUNDS + WARM):
        start = time.perf_counter()
        ask(observation)
        found.append((time.perf_counter() - start) * 1e3)
    median, late = np.percentile(found[WARM:], (50, 99))
    return f"{median:7.2f} / {late:6.2f}"


def main() -> None:
    """One line per number of requests."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "same.py"
        path.write_text(FOREIGN)
        measure(f"{path}:Same", [int(text) for text in sys.argv[1:]] or [32, 128])


def measure(spec: str, sizes: list[int]) -> None:
    """Print the table. spec: a controller in a file."""
    process = ProcessController(spec, STORES)
    thread = Decider(make(spec), deadline=PATIENT)
    print("requests   adaptive         in a thread, projected   in a process     (ms, p50 / p99)")
    for requests in sizes:
        seen = observe(requests)
        print(
            f"{requests:8d} {timed(make('adaptive').decide, seen)} {timed(thread.decide, seen):>24}"
            f" {timed(lambda o: process.ask(o, PATIENT), seen):>16}"
        )
    thread.close()
    process.close()


if __name__ == "__main__":
    main()
