"""Miss rates of a selection source under classic policies: what a process is fitted by and tested on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvpolicy.geometry.geometry import Selector
from kvpolicy.recording.bounds import belady
from kvpolicy.recording.caches import RULES
from kvpolicy.recording.lanes import Lane
from kvpolicy.recording.replay import replay
from kvpolicy.selection.source import SelectionSource

__all__ = ["PUBLISHED", "Span", "lane_of", "miss_rates"]

BELADY = "belady"

PUBLISHED = {
    ("lru", 1): 0.30,
    ("lru", 2): 0.134,
    ("fifo", 2): 0.172,
    ("random", 2): 0.161,
    (BELADY, 2): 0.082,
    ("lru", 4): 0.067,
}
"""(policy, rows in multiples of top-k) -> fetched over selected rows of GLM-5.1 at top-k 2048 and a
context of 100K (HiSparse, arXiv 2608.07009)."""

# Entries drawn at a time: some 40 int64 temporaries of this size, 80 MiB.
_BATCH = 1 << 18


@dataclass(frozen=True, slots=True)
class Span:
    """Steps of a measurement: warm ones fill the caches, the counted ones count, and Belady sees the
    later ones, so that the end of the trace gains it nothing."""

    warm: int = 1200
    counted: int = 600
    later: int = 600

    @property
    def steps(self) -> int:
        return self.warm + self.counted + self.later


def lane_of(
    source: SelectionSource, selector: Selector, request: int, context: int, steps: int
) -> Lane:
    """A request that decodes from ``context`` tokens on, one entry per token, as caches see it."""
    visible = torch.arange(steps + 1) + context
    numbers = torch.full_like(visible, request)
    size = max(1, _BATCH // selector.topk)
    parts = zip(numbers.split(size), visible.split(size), strict=True)
    chosen = torch.cat([source.select(selector, r, v) for r, v in parts]).numpy()
    committed = visible.numpy() - 1  # a row's own entry is in flight
    wanted = [
        row[: np.searchsorted(row, old)] for row, old in zip(chosen[1:], committed[1:], strict=True)
    ]
    nothing: NDArray[np.int64] = np.empty(0, dtype=np.int64)
    return Lane(
        request=request,
        store=0,
        weight=1,
        at=np.arange(1, steps + 1),
        back=np.zeros(steps, dtype=bool),
        seats=np.zeros(steps + 1, dtype=np.int64),
        calls=[[each] for each in wanted],
        wanted=wanted,
        recent=list(chosen[1:]),
        committed=np.append(committed[1:], committed[-1] + 1),
        seed=chosen[0],
        seeded_at=0,
        budgets=nothing,
        prior=nothing,
    )


def miss_rates(
    source: SelectionSource,
    selector: Selector,
    context: int,
    points: Iterable[tuple[str, int]] = tuple(PUBLISHED),
    span: Span | None = None,
    request: int = 0,
) -> dict[tuple[str, int], float]:
    """Misses over selected rows at (policy, multiple of top-k): lru, clock, fifo, random or belady.

    context: entries when decoding begins. Work is on the CPU; the source must be there too.
    """
    span = span or Span()
    lane = lane_of(source, selector, request, context, span.steps)
    counted = slice(span.warm, span.warm + span.counted)
    steps = np.arange(span.steps + 1)
    found = {}
    for policy, multiple in points:
        budgets = np.full(span.steps + 1, multiple * selector.topk)
        if policy == BELADY:
            missed = belady(lane, budgets).missed
        else:
            missed = replay(lane, budgets, RULES[policy], steps).missed
        found[policy, multiple] = float(missed[counted].sum()) / (span.counted * selector.topk)
    return found
