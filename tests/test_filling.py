"""Paths of levels and water-filling."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import curves, observe, request

from kvpolicy.control.filling import (
    RESOLUTION,
    Path,
    equal_path,
    fill,
    marginal_path,
    rows_in,
    segments,
)
from kvpolicy.control.observation import MissCurve, StoreView
from kvpolicy.control.pool import Pool, Rows

STORES = (StoreView("A", 1, 8, 100, 10, 100), StoreView("B", 2, 8, 200, 5, 100))


def pool_of(count: int, stores: tuple[StoreView, ...] = STORES) -> Pool:
    views = tuple(request(i, (500,) * len(stores), (0,) * len(stores)) for i in range(count))
    return Pool(observe(stores, views, free=0))


@given(
    topk=st.lists(st.integers(1, 64), min_size=1, max_size=4),
    floor=st.integers(0, 20),
    data=st.data(),
)
def test_paths_rise_from_the_floor_to_the_end(
    topk: list[int], floor: int, data: st.DataObject
) -> None:
    """No store ever falls; the last level reaches everything."""
    most = [data.draw(st.integers(k, 40 * k)) for k in topk]
    known = [data.draw(curves(k).filter(lambda c: len(c.rows) > 1)) for k in topk]
    for path in (equal_path(floor, topk, most), marginal_path(floor, topk, most, known)):
        levels = [path.rows(level) for level in np.linspace(0, RESOLUTION, 60).astype(int).tolist()]
        assert (levels[0] == floor).all()
        assert (levels[-1] >= np.array(most)).all()
        assert all((high >= low).all() for low, high in pairwise(levels))


@given(
    count=st.integers(1, 8),
    room=st.integers(0, 3000),
    data=st.data(),
)
def test_filling_leaves_less_than_a_frame_a_store(
    count: int, room: int, data: st.DataObject
) -> None:
    """Between the bounds; all the room is used unless everyone is at the limit."""
    pool = pool_of(count)
    limit = np.array(
        [[data.draw(st.integers(0, 160)) for _ in STORES] for _ in range(count)], dtype=np.int64
    )
    least = np.minimum(limit, data.draw(st.integers(0, 9)))
    frames = fill(pool, equal_path(0, (8, 8), (2000, 2000)), least, limit, room)
    assert (frames >= least).all() and (frames <= limit).all()
    if int(least.sum()) > room:
        assert (frames == least).all()
    else:
        assert int(frames.sum()) <= room
        assert int(frames.sum()) >= min(room - 2 * len(STORES), int(limit.sum()))


def test_requests_get_the_same_and_the_first_get_the_rest() -> None:
    pool = pool_of(3)
    limit = np.full((3, 2), 50)
    frames = fill(pool, equal_path(0, (8, 8), (900, 900)), np.zeros_like(limit), limit, 52)
    assert frames.sum() == 52
    assert (frames[0] >= frames[2]).all()
    assert (frames.max(axis=0) - frames.min(axis=0) <= 1).all()


@given(
    frames=st.lists(st.integers(0, 60), min_size=2, max_size=2),
    per=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    meta=st.tuples(st.integers(1, 90), st.integers(1, 90)),
)
def test_rows_in_is_the_most_that_fits(
    frames: list[int], per: tuple[int, int], meta: tuple[int, int]
) -> None:
    """One row more takes another frame."""
    stores = tuple(
        StoreView(str(i), 1, 8, 100, p, m) for i, (p, m) in enumerate(zip(per, meta, strict=True))
    )
    pool = pool_of(1, stores)
    given_frames: Rows = np.array([frames], dtype=np.int64)
    rows = rows_in(pool, given_frames)
    assert (pool.mapped(rows) <= given_frames).all() and (rows >= 0).all()
    assert (pool.mapped(rows + 1) > given_frames).all()


@given(curve=curves(32).filter(lambda c: len(c.rows) > 1), low=st.integers(0, 64))
def test_segments_are_a_convex_curve(curve: MissCurve, low: int) -> None:
    """Steepest first, to the end, never above what was measured by more than rounding."""
    found = segments(curve, float(low), 1000.0)
    gains = [gain for gain, _ in found]
    assert gains == sorted(gains, reverse=True) and min(gains) >= 0
    assert sum(rows for _, rows in found) == pytest.approx(1000.0 - low)


def test_segments_of_a_curve_of_many_points() -> None:
    """A subset of the points carries the curve: within 2 % of it at every budget."""
    rows = tuple(range(0, 8193, 64))
    curve = MissCurve(rows, tuple(min(128.0, 128 * 38 / max(r, 1)) for r in rows), 500.0)
    x, y = 128.0, float(np.interp(128.0, curve.rows, curve.misses))
    for gain, width in segments(curve, 128.0, 8192.0):
        x, y = x + width, y - gain * width
        assert y == pytest.approx(float(np.interp(x, curve.rows, curve.misses)), rel=0.02)


def test_a_path_of_one_height() -> None:
    """Nothing to rise: every level is the floor."""
    path = Path(np.array([[3.0, 4.0], [3.0, 4.0]]))
    assert path.rows(0).tolist() == path.rows(RESOLUTION).tolist() == [3, 4]
