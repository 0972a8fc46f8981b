"""Random: the lower reference."""

from __future__ import annotations

import numpy as np

from kvpolicy.control.observation import Observation
from kvpolicy.control.plan import Plan
from kvpolicy.control.pool import Pool
from kvpolicy.controllers.parameters import whole_number


class Random:
    """Random budgets, drawn anew at every decision.

    seed: together with the step it decides the draw. Every request gets in every store a part of
    what full residency takes now, even between nothing and all of it, scaled down to fit.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = whole_number("seed", seed)

    def decide(self, observation: Observation) -> Plan:
        draw = np.random.default_rng((self.seed, observation.step))
        rows = draw.integers(0, Pool(observation).now + 1).tolist()
        targets = {
            r.request_id: tuple(own) for r, own in zip(observation.requests, rows, strict=True)
        }
        return Plan(targets=targets, reserve_bytes=float(sum(observation.queue_bytes)))
