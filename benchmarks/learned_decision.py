"""How long the controller `learned` takes: its network alone, and a whole decision (encode, network, decode).

    python -P benchmarks/learned_decision.py [ARTIFACT.npz]

Medians and 99th percentiles of 5,000, in microseconds, on one thread.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from decision_time import observe

from kvpolicy.learned.controller import Learned
from kvpolicy.learned.network import Network

ROUNDS, WARM = 5000, 200


def timed(ask: Callable[[Any], object], seen: Any) -> str:
    """Median and 99th percentile."""
    found = []
    for _ in range(ROUNDS + WARM):
        start = time.perf_counter()
        ask(seen)
        found.append((time.perf_counter() - start) * 1e6)
    median, late = np.percentile(found[WARM:], (50, 99))
    return f"{median:7.1f} / {late:7.1f}"


def main() -> None:
    """One line for the network, one per number of requests."""
    controller = Learned(sys.argv[1] if len(sys.argv) > 1 else None)
    encoder = controller.artifact.encoder
    network = Network(controller.artifact)
    sys.stdout.write("us, p50 / p99\n")
    sys.stdout.write(f"network               {timed(network, encoder.encode(observe(8)))}\n")
    for requests in (1, 8, 32):
        seen = observe(requests)
        sys.stdout.write(f"decide, {requests:3d} requests  {timed(controller.decide, seen)}\n")


if __name__ == "__main__":
    main()
