"""Gymnasium environments over the decode engine, imported as `kvpolicy.env`.

Importing it registers `kvpolicy/ResidencyReplay-v0` and `kvpolicy/ResidencyLive-v0`; where it cannot
be imported
first, `gym.make("kvpolicy.env:kvpolicy/ResidencyReplay-v0")` does so. docs/environments.md has the tables.
"""

from __future__ import annotations

import gymnasium

from kvpolicy.episodes.environments import LIVE, REPLAY

__all__ = ["LIVE", "REPLAY"]

gymnasium.register(
    REPLAY,
    entry_point="kvpolicy.env.replay:ResidencyReplay",
    vector_entry_point="kvpolicy.env.vector:ResidencyVector",
)
gymnasium.register(LIVE, entry_point="kvpolicy.env.live:ResidencyLive", nondeterministic=True)
