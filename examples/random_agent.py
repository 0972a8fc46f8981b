"""An agent that acts at random, in the deterministic twin: what an episode looks like.

python examples/random_agent.py [SCENARIO]          # a second, on any machine
"""

from __future__ import annotations

import sys

import gymnasium

import kvpolicy.env


def main(scenario: str = "tiny-burst") -> None:
    env = gymnasium.make(kvpolicy.env.REPLAY, scenario=scenario, max_steps=200)
    observation, info = env.reset(seed=0)
    env.action_space.seed(0)
    print(f"{scenario}: {observation.size} numbers seen, actions {env.action_space}")
    print(f"reward 1 in all = {info['baseline']}: {info['baseline_tokens_per_s']:,.0f} tokens/s")
    total, done, count = 0.0, False, 0
    while not done:
        observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
        total, done, count = total + reward, terminated or truncated, count + 1
        if count % 40 == 0:
            terms = info["terms"]
            print(
                f"step {count}: {len(info['projected']['budgets'])} running, reward so far {total:.3f}, "
                f"{terms['link_bytes'] / 1e6:.2f} MB from the host in {1e3 * info['seconds']:.1f} ms"
            )
    assert 0 < total <= 1  # rewards of an episode sum to its goodput
    print(f"{count} decisions, reward {total:.3f}, ended: {info['ended']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
