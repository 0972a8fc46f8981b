"""When things happened to requests, and percentiles of how long they took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Moments this close are the same but for the rounding of floating-point sums: a latency of 3 steps
# holds a bound of 3 ms.
ROUNDING_S = 1e-9


@dataclass(frozen=True, slots=True)
class Latencies:
    """Moments of one request in seconds of the engine's clock; None: it has not happened.

    arrived: submitted. admitted: its memory was first reserved, waited_steps engine steps later.
    first_token, last_token: when these were chosen. tokens: how many there are.
    """

    arrived: float
    admitted: float | None
    first_token: float | None
    last_token: float | None
    waited_steps: int | None
    tokens: int

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first, None for a request of fewer than two tokens."""
        if self.first_token is None or self.last_token is None or self.tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.tokens - 1)

    @property
    def wait(self) -> float | None:
        """Seconds from arrival to admission."""
        return None if self.admitted is None else self.admitted - self.arrived

    def tokens_between(self, start: float, end: float) -> int:
        """Tokens chosen in [start, end), taken to be evenly spaced from the first to the last."""
        if self.first_token is None:
            return 0
        gap = self.tpot or 0.0
        times = self.first_token + gap * np.arange(self.tokens) + ROUNDING_S
        return int(np.count_nonzero((times >= start) & (times < end)))


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    """{"p50", "p99"} in milliseconds, None where there is nothing to measure."""
    if not seconds:
        return {"p50": None, "p99": None}
    p50, p99 = np.percentile(np.asarray(seconds) * 1e3, [50, 99])
    return {"p50": float(p50), "p99": float(p99)}
