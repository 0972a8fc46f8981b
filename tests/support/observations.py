"""Observations of engines that could exist: any sizes, budgets that fit what is said to be there."""

from __future__ import annotations

from hypothesis import strategies as st

from kvpolicy.control.observation import MissCurve, Observation, RequestView, StoreView

FRAME = 4096


def request(
    number: int,
    now: tuple[int, ...],
    budget: tuple[int, ...],
    most: tuple[int, ...] | None = None,
    decoding: bool = True,
    age: int = 50,
) -> RequestView:
    """A request whose context is what it has room for."""
    context = max(now, default=0)
    most = most or tuple(n + 100 for n in now)
    return RequestView(number, context, most, budget, decoding, age, 1, 0, 0, 0, now)


def frames_of(store: StoreView, rows: int, max_rows: int, rows_now: int | None = None) -> int:
    """Arena frames of one hot cache. A full one (rows at or above max_rows) has no slot metadata,
    and room for ``rows_now`` entries so far."""
    if rows >= max_rows:
        return -(-(max_rows if rows_now is None else rows_now) // store.rows_per_frame)
    return -(-rows // store.rows_per_frame) + -(-rows // store.meta_per_frame)


def observe(
    stores: tuple[StoreView, ...],
    requests: tuple[RequestView, ...],
    free: int,
    queue: tuple[int, ...] = (),
    floor: int = 0,
    required: int = 100,
    curves: tuple[MissCurve, ...] = (),
    shortages: int = 0,
    step: int = 640,
    interval: int = 8,
) -> Observation:
    """free, queue, required: frames. The pool is as large as all of it together."""
    hot = sum(
        frames_of(s, b, m, n)
        for r in requests
        for s, b, m, n in zip(stores, r.budget, r.max_rows, r.rows_now or r.max_rows, strict=True)
    )
    return Observation(
        step=step, interval=interval, frame_bytes=FRAME, pool_bytes=(hot + free + required) * FRAME,
        required_bytes=required * FRAME, optional_bytes=hot * FRAME, free_bytes=free * FRAME,
        floor_rows=floor, waiting=len(queue), oldest_wait=3 if queue else 0, arrivals=0, finished=0,
        step_seconds=0.01, host_to_device_bytes=0, stores=stores, requests=requests,
        seats_free=8, queue_bytes=tuple(frames * FRAME for frames in queue), shortages=shortages,
        curves=curves,
    )  # fmt: skip


@st.composite
def curves(draw: st.DrawFn, topk: int) -> MissCurve:
    """A falling curve from all of the top-k, on multiples of half of it; or none."""
    points = draw(st.integers(0, 12))
    if not points:
        return MissCurve()
    misses = sorted(draw(st.lists(st.floats(0, topk), min_size=points, max_size=points)))[::-1]
    rows = range(0, points * max(1, topk // 2), max(1, topk // 2))
    return MissCurve(tuple(rows), tuple(misses), draw(st.sampled_from([0.0, 10.0, 500.0])))


@st.composite
def observations(draw: st.DrawFn, most_requests: int = 6) -> Observation:
    """One to three stores, some requests, full or mapped, reading their prompts or not, a queue."""
    stores = tuple(
        StoreView(
            f"S{i}", draw(st.integers(1, 4)), draw(st.integers(1, 16)), draw(st.integers(16, 400)),
            draw(st.integers(1, 30)), draw(st.integers(1, 120)),
        )
        for i in range(draw(st.integers(1, 3)))
    )  # fmt: skip
    floor = draw(st.sampled_from([0, 0, 0, 1, 9]))
    views = []
    for number in range(draw(st.integers(0, most_requests))):
        most = tuple(draw(st.integers(1, 300)) for _ in stores)
        now = tuple(draw(st.integers(0, m)) for m in most)
        budget = tuple(
            draw(st.sampled_from([m, draw(st.integers(min(floor, m), m))])) for m in most
        )
        decoding = draw(st.booleans())
        views.append(request(number, now, budget, most, decoding, draw(st.integers(0, 90))))
    return observe(
        stores,
        tuple(views),
        free=draw(st.integers(0, 60)),
        queue=tuple(draw(st.lists(st.integers(1, 30), max_size=4))),
        floor=floor,
        required=draw(st.integers(1, 3000)),
        curves=tuple(draw(curves(s.topk)) for s in stores) if draw(st.booleans()) else (),
        shortages=draw(st.sampled_from([0, 0, 2])),
        interval=draw(st.integers(0, 20)),
    )
