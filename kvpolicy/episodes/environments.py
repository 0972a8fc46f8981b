"""The ids of the environments, known without Gymnasium; importing ``kvpolicy.env`` registers them."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["ENVIRONMENTS", "LIVE", "REPLAY"]

REPLAY = "kvpolicy/ResidencyReplay-v0"
LIVE = "kvpolicy/ResidencyLive-v0"

ENVIRONMENTS: Mapping[str, str] = {
    REPLAY: "residency decisions on the deterministic twin: recorded selections, modelled time",
    LIVE: "residency decisions on live decode steps of the engine of this machine",
}
"""Id -> one line about it."""
