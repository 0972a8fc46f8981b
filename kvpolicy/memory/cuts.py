"""Which hot caches give rows back, and how many, where a growing context finds no free frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpolicy.memory.hot_cache import HotCache
from kvpolicy.memory.layout import StoreLayout
from kvpolicy.memory.request import RequestMemory

# Optional rows are given back in eighths of what each cache holds.
PARTS = 8


@dataclass(frozen=True, slots=True)
class Holding:
    """A hot cache that may be cut, to ``least`` rows at the lowest."""

    request: RequestMemory
    store: StoreLayout
    hot: HotCache
    least: float

    def gain(self, rows: int) -> int:
        """Frames that a cut to ``rows`` rows frees; a cache that was full needs metadata then."""
        return self.hot.num_frames - self.store.hot_frames(rows, False)


@dataclass(frozen=True, slots=True)
class Cut:
    """A cache and the rows that it keeps."""

    holding: Holding
    rows: int


def cuts_for(holdings: Sequence[Holding], frames: int) -> list[Cut]:
    """The smallest even cut that frees at least ``frames`` frames; none if there is not so much."""
    for part in range(PARTS - 1, -1, -1):
        cuts = []
        freed = 0
        for holding in holdings:
            hot, least = holding.hot, holding.least
            held = hot.room if hot.full else hot.capacity
            if held <= least:
                continue
            rows = int(least + (held - least) * part // PARTS)
            gain = holding.gain(rows)
            if gain > 0:
                freed += gain
                cuts.append(Cut(holding, rows))
        if freed >= frames:
            return cuts
    return []


def cuts_of_full(holdings: Sequence[Holding]) -> list[Cut]:
    """All full caches that take no more frames with ``least`` rows, cut to these. It may free nothing,
    but they need no frames any more when the context grows."""
    return [
        Cut(holding, int(holding.least))
        for holding in holdings
        if holding.hot.full
        and holding.least < holding.hot.room
        and holding.gain(int(holding.least)) >= 0
    ]
