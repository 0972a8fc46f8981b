"""Latency targets, and goodput: the tokens of the requests that were served within them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvpolicy.errors import UserError, unknown_name
from kvpolicy.telemetry.latency import ROUNDING_S, Latencies

KEYS = ("tpot_ms", "ttft_ms")


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds in seconds of the engine's clock, None where there is none."""

    tpot: float | None = None
    ttft: float | None = None

    def holds(self, request: Latencies) -> bool:
        """Whether a request that has ended was served within every bound (a single token has no
        time per token, and holds that bound)."""
        if request.ttft is None:
            return False
        late = self.ttft is not None and request.ttft > self.ttft + ROUNDING_S
        tpot = 0.0 if request.tpot is None else request.tpot
        slow = self.tpot is not None and tpot > self.tpot + ROUNDING_S
        return not late and not slow

    def to_dict(self) -> dict[str, float | None]:
        """The bounds in milliseconds, under the names of ``--slo``."""
        return {
            "tpot_ms": None if self.tpot is None else self.tpot * 1e3,
            "ttft_ms": None if self.ttft is None else self.ttft * 1e3,
        }


def parse_slo(text: str) -> Slo:
    """``tpot_ms=X,ttft_ms=Y``, at least one of them. UserError for anything else."""
    found: dict[str, float] = {}
    for item in text.split(","):
        key, separator, value = item.partition("=")
        key = key.strip()
        if not separator:
            raise UserError(f"--slo {text!r}: must be tpot_ms=X, ttft_ms=Y, or both with a comma")
        if key not in KEYS:
            raise UserError(f"--slo {text!r}: {unknown_name('bound', key, KEYS)}")
        if key in found:
            raise UserError(f"--slo {text!r}: {key} is given twice")
        found[key] = _milliseconds(text, key, value)
    seconds = {key: value / 1e3 for key, value in found.items()}
    return Slo(seconds.get("tpot_ms"), seconds.get("ttft_ms"))


def _milliseconds(text: str, key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise UserError(f"--slo {text!r}: {key} = {value!r}: must be a number above 0")
    return number


def goodput(
    requests: Iterable[Latencies], slo: Slo | None, start: float, end: float
) -> float | None:
    """Tokens chosen in [start, end) for requests inside the bounds, per second of that time.

    start, end: seconds of the engine's clock. None without bounds or time.
    """
    if slo is None or end <= start:
        return None
    good = sum(r.tokens_between(start, end) for r in requests if slo.holds(r))
    return good / (end - start)
