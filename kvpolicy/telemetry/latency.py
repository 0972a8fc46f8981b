"""Percentiles of request latencies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    """{"p50", "p99"} in milliseconds, None where there is nothing to measure."""
    if not seconds:
        return {"p50": None, "p99": None}
    p50, p99 = np.percentile(np.asarray(seconds) * 1e3, [50, 99])
    return {"p50": float(p50), "p99": float(p99)}
