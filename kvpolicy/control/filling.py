"""Water-filling: hand frames out to hot caches along a path of levels, whole frames, nothing left.

A *path* says which budgets (rows per store) go together as memory grows: every request stands at
the same point of it, held back where it cannot use more. Requests are alike and stores are not: on
the shipped tiny-dsa LRU misses 10 to 13 % at 2 x top-k by request, 3 to 31 % by store.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvpolicy.control.observation import MissCurve
from kvpolicy.control.pool import Pool, Rows

# Levels a path is searched at. Four stores at 100,000 entries: 6 rows, half a frame of tiny-dsa.
RESOLUTION = 1 << 16
# Points kept of a measured curve. Its shape is smooth; the hull of 24 costs 10 us a store.
CURVE_POINTS = 24
_SPREAD = np.linspace(0.0, 1.0, CURVE_POINTS)
# Steps of the tail beyond the last measured point: the slope falls as 1 / rows^2 there.
TAIL_GROWTH = 1.5


class Path:
    """Budgets per store as one level rises from 0 to 1.

    corners: float64 [points, stores], rows, not falling in any store, at least two points. Between
    two corners the budgets rise in proportion.
    """

    def __init__(self, corners: NDArray[np.float64]) -> None:
        self.corners = corners
        self._total = corners.sum(axis=1)

    def rows(self, level: int) -> Rows:
        """Whole rows per store at a level of 0 to :data:`RESOLUTION`."""
        first, last = self._total[0], self._total[-1]
        at = first + (last - first) * level / RESOLUTION
        i = min(max(int(self._total.searchsorted(at)), 1), len(self._total) - 1)
        span = self._total[i] - self._total[i - 1]
        part = (at - self._total[i - 1]) / span if span > 0 else 1.0
        low, high = self.corners[i - 1], self.corners[i]
        rows: Rows = np.rint(low + (high - low) * part).astype(np.int64)
        return rows


def equal_path(floor: int, topk: Sequence[int], most: Sequence[int]) -> Path:
    """Every store gets the same multiple of its top-k, from ``floor`` rows up to ``most``."""
    sizes = np.array(topk, dtype=np.float64)
    end = max(rows / k for rows, k in zip(most, topk, strict=True)) * sizes
    start = np.full(len(sizes), float(floor))
    return Path(np.stack([start, np.maximum(start, end)]))


def marginal_path(
    floor: int, least: Sequence[int], most: Sequence[int], curves: Sequence[MissCurve]
) -> Path:
    """From ``floor`` to ``least`` rows together, then always the store that saves most per row.

    A miss of a store moves as many bytes as a row of it occupies, so misses saved per row is bytes
    saved per byte, whatever the size of its records.
    """
    start = np.maximum(np.array(least, dtype=np.float64), floor)
    gains: list[tuple[float, int, float]] = []
    for store, (curve, low, high) in enumerate(zip(curves, start.tolist(), most, strict=True)):
        gains += [(gain, store, rows) for gain, rows in segments(curve, low, float(high))]
    gains.sort(key=lambda segment: (-segment[0], segment[1]))
    corners = np.zeros((len(gains) + 2, len(start)))
    corners[0], corners[1] = floor, start - floor
    for i, (_, store, rows) in enumerate(gains):
        corners[i + 2, store] = rows
    return Path(corners.cumsum(axis=0))


def segments(curve: MissCurve, low: float, high: float) -> list[tuple[float, float]]:
    """(misses saved per row, rows) of a curve's convex hull from ``low`` to ``high`` rows, steepest
    first; beyond the last measured point misses are taken to fall as 1 / rows."""
    points = _points(curve, low, high)
    hull: list[tuple[float, float]] = []
    for x, y in points:
        while len(hull) > 1 and _concave(hull[-2], hull[-1], (x, y)):
            hull.pop()
        hull.append((x, y))
    return [(max(0.0, y0 - y1) / (x1 - x0), x1 - x0) for (x0, y0), (x1, y1) in pairwise(hull)]


def _points(curve: MissCurve, low: float, high: float) -> list[tuple[float, float]]:
    """The curve from ``low`` to ``high``: its start, some measured points, and the tail."""
    rows, misses = curve.rows, curve.misses
    inside: Sequence[int] = range(bisect_right(rows, low), bisect_left(rows, high))
    if len(inside) > CURVE_POINTS:
        picks = (len(inside) ** _SPREAD).astype(int) - 1
        inside = [inside[i] for i in dict.fromkeys(picks.tolist())]
    points = [(low, float(np.interp(low, rows, misses)))]
    points += [(float(rows[i]), misses[i]) for i in inside]
    if high <= rows[-1]:
        points.append((high, float(np.interp(high, rows, misses))))
    else:
        # A curve that has reached 0 still says that more rows are no worse.
        base, last = max(points[-1][1], 1e-6), max(points[-1][0], 1.0)
        x = points[-1][0]
        while x < high:
            x = min(high, max(x * TAIL_GROWTH, x + 1))
            points.append((x, base * last / max(x, last)))
    return [p for i, p in enumerate(points) if i == 0 or p[0] > points[i - 1][0]]


def _concave(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """Whether b lies on or above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


def fill(pool: Pool, path: Path, least: Rows, limit: Rows, room: int) -> Rows:
    """Frames per request and store at the highest level of the path that fits ``room`` frames.

    least, limit: frames [requests, stores] below which a cache does not fall and above which it
    does not rise (least <= limit). Every cache stands at the level, or at one of its bounds. What
    one more level would overrun goes to the first requests, so that less than a frame per store
    stays. Frames of ``least`` where they alone exceed the room.
    """

    def at(level: int) -> Rows:
        raised = np.maximum(least, pool.mapped(path.rows(level)))
        return np.minimum(raised, limit)

    if int(limit.sum()) <= room:
        return limit
    low, high = 0, RESOLUTION
    best = at(low)
    if int(best.sum()) > room:
        return least
    while high - low > 1:
        middle = (low + high) // 2
        tried = at(middle)
        if int(tried.sum()) <= room:
            low, best = middle, tried
        else:
            high = middle
    more = (at(high) - best).ravel()
    fits = np.cumsum(more) <= room - int(best.sum())
    return best + np.where(fits, more, 0).reshape(best.shape)


def rows_in(pool: Pool, frames: Rows) -> Rows:
    """The most rows that a mapped cache of these frames holds, slots' metadata counted."""
    whole = frames * pool.meta // (pool.per_frame + pool.meta)
    # One frame more of rows may pay where metadata, not rows, is what the frames run out of.
    cut = np.minimum((whole + 1) * pool.per_frame, (frames - whole - 1) * pool.meta)
    rows: Rows = np.maximum(whole * pool.per_frame, cut)
    return rows
