"""How fast the environments are, and how far curves are from the exact twin.

    python -P benchmarks/environments.py --json FILE     # on one core; a minute

Rates by the process's own CPU time too, since wall time on a busy machine says little.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gymnasium
import numpy as np

import kvpolicy.env
from kvpolicy.config import SamplingParams
from kvpolicy.control.actions import make_actions
from kvpolicy.control.encoder import Encoder
from kvpolicy.env.vector import ResidencyVector
from kvpolicy.episodes.scenarios import find
from kvpolicy.episodes.twin import make_twin

REQUESTS = 32


def timed(what: Callable[[], int]) -> dict[str, float]:
    """A rate by wall and by CPU time. what: does something and says how often."""
    wall, cpu = time.perf_counter(), time.process_time()
    count = what()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"count": count, "per_s": count / wall, "per_cpu_s": count / cpu}


def exact(scenario: str, controller: str) -> dict[str, float]:
    """Decode steps of the exact twin with REQUESTS requests, prompts left out."""
    own = find(scenario)
    start = own.own.context
    changes = (
        {"device_kv_mib": 4096.0}
        if start is not None
        else {"device_kv_mib": 1024.0, "prefill_chunk": 65536}
    )
    twin = make_twin(own, controller, max_concurrency=REQUESTS, **changes)
    for i in range(REQUESTS):
        size, context = (4000 + 40 * i, 0) if start is None else (1, start + i)
        twin.submit(b"x" * size, SamplingParams(max_new_tokens=400), context)
    while any(not r.tokens for r in twin.requests.values()):
        twin.step()

    def run() -> int:
        steps = 0
        while len(twin.scheduler.running) == REQUESTS and steps < 250:
            twin.step()
            steps += 1
        return steps

    found = timed(run)
    return {**found, "miss_rate": twin.metrics()["miss_rate"], "requests": REQUESTS}


def env_steps(fidelity: str, steps: int) -> dict[str, float]:
    """Env steps of one environment, resets included."""
    env = gymnasium.make(kvpolicy.env.REPLAY, scenario="burst", fidelity=fidelity)
    env.reset(seed=0)
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(64)]

    def run() -> int:
        for i in range(steps):
            *_, terminated, truncated, _ = env.step(actions[i % 64])
            if terminated or truncated:
                env.reset()
        return steps

    return timed(run)


def vector(count: int, steps: int) -> dict[str, float]:
    """Env steps of many episodes together, resets included."""
    many = ResidencyVector(count, scenario="burst")
    many.reset(seed=0)
    random = np.random.default_rng(0)
    actions = random.uniform(-1, 1, (16, count, 3)).astype(np.float32)

    def run() -> int:
        for i in range(steps):
            many.step(actions[i % 16])
        return steps * count

    return timed(run)


def decision() -> dict[str, float]:
    """Microseconds to encode an observation of REQUESTS requests and to decode an action."""
    own = find("burst")
    twin = make_twin(own, "hisparse", max_concurrency=REQUESTS, device_kv_mib=4096)
    for i in range(REQUESTS):
        twin.submit(b"x", SamplingParams(max_new_tokens=100), int(own.own.context or 0) + i)
    for _ in range(20):
        twin.step()
    observation = twin.control.log[-1].observation
    found = {"requests": len(observation.requests)}
    encoder = Encoder()
    for name in ("global", "discrete", "per_request"):
        actions = make_actions(name, REQUESTS, 4)
        action = 8 if name == "discrete" else np.full(len(actions.knobs), 0.2, dtype=np.float32)
        times = []
        for _ in range(3000):
            start = time.perf_counter()
            encoder.encode(observation)
            actions.decode(action, observation)
            times.append(time.perf_counter() - start)
        p50, p99 = np.percentile(times, [50, 99])
        found |= {f"{name}_p50_us": p50 * 1e6, f"{name}_p99_us": p99 * 1e6}
    return found


def errors(scenario: str, seeds: int) -> dict[str, Any]:
    """Sums over episodes under the same constant actions: curves over exact, less 1."""
    rows = []
    for retained, reserve in ((-0.6, -1.0), (0.2, -0.8), (1.0, -1.0)):
        totals = []
        for fidelity in ("exact", "curves"):
            env = gymnasium.make(
                kvpolicy.env.REPLAY, scenario=scenario, fidelity=fidelity, split="validation"
            )
            total: dict[str, float] = {"reward": 0.0}
            for seed in range(seeds):
                env.reset(seed=seed)
                done = False
                while not done:
                    _, reward, _, done, info = env.step(
                        np.array([retained, reserve, -1.0], np.float32)
                    )
                    total["reward"] += reward
                    for name, value in info["terms"].items():
                        total[name] = total.get(name, 0.0) + value
            totals.append(total)
        one, two = totals
        names = ("reward", "tokens", "link_bytes")
        rows.append(
            {
                "retained": retained,
                "reserve": reserve,
                **{name: two[name] / one[name] - 1 for name in names},
            }
        )
    return {"scenario": scenario, "episodes": seeds, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="no errors, fewer steps")
    options = parser.parse_args()
    part = 4 if options.quick else 1
    result: dict[str, Any] = {
        "command": sys.argv,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "exact_decode_steps": {
            f"{scenario} {controller}": exact(scenario, controller)
            for scenario, controller in (
                *(("tiny-burst", "hisparse"), ("tiny-burst", "static"), ("burst", "hisparse")),
                *(("burst", "static"), ("burst", "adaptive:split=equal"), ("burst", "adaptive")),
            )
        },
        "exact_env_steps": env_steps("exact", 400 // part),
        "curves_env_steps": env_steps("curves", 4000 // part),
        "vector_env_steps": vector(256, 200 // part),
        "decision": decision(),
    }
    if not options.quick:
        result["errors"] = [errors(name, 1) for name in ("burst", "load-step", "pressure")]
    text = json.dumps(result, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
