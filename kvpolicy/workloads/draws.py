"""Seeded draws: the same numbers for the same seed, and for each request on its own."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

__all__ = ["exponential_times", "uniforms"]

# Streams of one seed, so that lengths and texts do not depend on how arrivals are drawn.
REQUESTS, ARRIVALS = 0, 1


def uniforms(seed: int, request: int, count: int) -> list[float]:
    """``count`` numbers in [0, 1) that depend on the seed and the request's number alone."""
    return [float(x) for x in _generator(seed, REQUESTS, request).random(count)]


def exponential_times(seed: int, rate: float, end: float) -> Iterator[tuple[float, float]]:
    """Arrival times of a Poisson process of ``rate`` in [0, end), ascending, each with a number in
    [0, 1) that thinning may use."""
    generator = _generator(seed, ARRIVALS)
    time = 0.0
    while True:
        gap, mark = generator.random(2)
        time -= math.log1p(-gap) / rate
        if time >= end:
            return
        yield time, float(mark)


def _generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))
