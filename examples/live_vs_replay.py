"""The same constant policy on the engine of this machine, and in its deterministic twin.

    python examples/live_vs_replay.py                    # some seconds on a CPU

On a CPU the times differ by as much as the machines do: the twin's clock was fitted to a GPU. What
agrees anywhere
is what residency is about: rows kept, rows missed.
"""

from __future__ import annotations

import gymnasium
import numpy as np

import kvpolicy.env

SCENARIO, STEPS = "tiny", 6
ENGINE = {"prefill_chunk": 512}  # the twin's recorded prompts have some thousand tokens
HALF = np.array([0.0, -1.0, -1.0], dtype=np.float32)  # half of the spare memory holds history


def serve(env: gymnasium.Env) -> dict[str, float]:
    """Sums of an episode's first steps."""
    env.reset(seed=0)
    total: dict[str, float] = {"reward": 0.0, "engine steps": 0.0}
    for _ in range(STEPS):
        _, reward, terminated, truncated, info = env.step(HALF)
        total["reward"] += reward
        total["engine steps"] += info["steps"]
        for name in ("seconds", "tokens", "link_bytes"):
            total[name] = total.get(name, 0.0) + info["terms"][name]
        if terminated or truncated:
            break
    env.close()
    return total


def main() -> None:
    live = serve(gymnasium.make(kvpolicy.env.LIVE, scenario=SCENARIO, engine=ENGINE))
    twin = serve(gymnasium.make(kvpolicy.env.REPLAY, scenario=SCENARIO, engine=ENGINE))
    print(f"{'':14s}{'live':>14s}{'twin':>14s}")
    # At most four requests run, and each makes one token a step.
    assert all(0 < each["tokens"] <= 4 * each["engine steps"] for each in (live, twin))
    for name in live:
        print(f"{name:14s}{live[name]:14,.3f}{twin[name]:14,.3f}")


if __name__ == "__main__":
    main()
