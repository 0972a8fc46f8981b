"""Adaptive: the paper's heuristic. docs/adaptive.md has the reason for every constant."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvpolicy.control.filling import Path, equal_path, fill, marginal_path, rows_in
from kvpolicy.control.observation import Observation, StoreView
from kvpolicy.control.plan import FULL, Plan, Target
from kvpolicy.control.pool import Pool, Rows
from kvpolicy.controllers.parameters import one_of, row_count, share

# Steps that free memory must cover: the default control interval.
AHEAD = 8
# Free memory is filled up to what this many times as many steps take, and left alone until then.
REFILL = 4
# Contexts get room in lots of so many tokens (memory.request.GROWTH_TOKENS; a test compares).
LOT = 64
# A request below this part of its fair share is brought up to it at once.
BEHIND = 0.75
# What is lacking is taken from as few caches as it can be, each by up to this part of its own: a cache that
# changes costs the host some thirty launches, be it by a frame or by ten.
GIVE = 1 / 8
# ... and not below this part of its fair share, so that nobody falls behind by it.
KEPT = 0.8
# Caches raised in one decision, for the same reason.
MOVES = 16
# Promotion needs room for this many times everything: one more request where four run.
HEADROOM = 1.25
# Steps a promoted cache must be able to stay full; the whole pool may be promoted in as many.
HORIZON = 512
# Decode steps behind every store's curve before it is used.
CURVE_STEPS = 64


@dataclass(frozen=True, slots=True)
class _State:
    """What one decision works on. Frames, int64 [requests, stores] or whole numbers.

    full, begun: which caches are full, which requests have begun. cap: the most rows. least: the
    protected floor. limit: all that a cache can use as it is. soon, later: full residency after
    AHEAD and HORIZON steps. held: as it is now. queue: what waiting requests get. low, high: marks
    of free memory.
    """

    pool: Pool
    path: Path
    full: NDArray[np.bool_]
    begun: NDArray[np.bool_]
    cap: Rows
    least: Rows
    limit: Rows
    soon: Rows
    later: Rows
    held: Rows
    free: int
    queue: int
    low: int
    high: int


class Adaptive:
    """Spare memory holds history, per request and store; pressure takes it back in one decision.

    split: ``marginal`` (by measured misses; equal until there are any) or ``equal`` (the paper's).
    min_rows: rows of a request and store below which waiting requests rather wait; None means
    1 x top-k. reserve: largest part of the pool kept free for growth.
    """

    def __init__(
        self, split: str = "marginal", min_rows: int | None = None, reserve: float = 0.01
    ) -> None:
        self.split = one_of("split", split, ("marginal", "equal"))
        self.min_rows = None if min_rows is None else row_count("min_rows", min_rows)
        self.reserve = share("reserve", reserve)
        self.wants_curves = split == "marginal"

    def initial(self, stores: tuple[StoreView, ...]) -> Target:
        """min_rows: so a waiting request's need is its whole need, and admission stops there."""
        return self._minimum(stores)

    def decide(self, observation: Observation) -> Plan:
        if not observation.requests or not observation.stores:
            return Plan()
        if self._is_settled(observation):
            return Plan()
        state = self._state(observation)
        frames = _share_out(state, observation)
        if bool((new := _promoted(state, observation, frames)).any()):
            state = _with_full(state, new)
            frames = _share_out(state, observation)
        numbers = [request.request_id for request in observation.requests]
        return Plan(targets=dict(zip(numbers, _targets(state, frames), strict=True)))

    def _is_settled(self, observation: Observation) -> bool:
        """Whether everyone is fully resident, nobody waits and there is room: then everyone keeps what it
        has, and the decision costs next to nothing."""
        o = observation
        pressure = o.waiting or o.shortages or o.free_bytes < self.reserve * o.pool_bytes
        return not pressure and all(r.budget == r.max_rows for r in o.requests)

    def _minimum(self, stores: tuple[StoreView, ...]) -> tuple[int, ...]:
        return tuple(s.topk if self.min_rows is None else self.min_rows for s in stores)

    def _state(self, observation: Observation) -> _State:
        pool = Pool(observation)
        floor = observation.floor_rows
        minimum = np.array(self._minimum(observation.stores), dtype=np.int64)
        minimum = np.maximum(minimum, floor)
        full = (pool.held >= pool.most) | (pool.most <= floor)
        begun = np.array([[r.context > 0] for r in observation.requests])
        soon = np.minimum(pool.most, pool.now + AHEAD)
        # A prompt that is still read will be longer soon; by how much, only max_rows says.
        reading = np.array([[not r.decoding] for r in observation.requests])
        later = np.where(reading, pool.most, np.minimum(pool.most, pool.now + HORIZON))
        useful = np.where(begun, np.maximum(soon, minimum), floor)
        cap = np.where(full, pool.most, np.minimum(useful, pool.most - 1))
        limit = np.where(full, pool.whole(pool.now), pool.mapped(cap))
        floors = pool.mapped(np.full_like(cap, floor))
        held = pool.frames(pool.held)
        free = observation.free_bytes // observation.frame_bytes
        low, high = self._marks(observation, pool, full)
        lowest = np.minimum(pool.mapped(minimum), pool.whole(pool.most))
        return _State(
            pool=pool,
            path=self._path(observation, later, minimum),
            full=full,
            begun=begun,
            cap=cap,
            soon=pool.whole(soon),
            later=pool.whole(later),
            least=np.minimum(floors, limit),
            limit=limit,
            held=held,
            free=free,
            queue=_queue(observation, int(held.sum()) + free - int(lowest.sum()) - high),
            low=low,
            high=high,
        )

    def _path(self, observation: Observation, most_rows: Rows, minimum: Rows) -> Path:
        most = np.maximum(most_rows.max(axis=0), minimum).tolist()
        curves = observation.curves
        known = len(curves) == len(most) and all(
            c.steps >= CURVE_STEPS and len(c.rows) > 1 for c in curves
        )
        if self.split == "marginal" and known:
            return marginal_path(observation.floor_rows, minimum.tolist(), most, curves)
        return equal_path(observation.floor_rows, [s.topk for s in observation.stores], most)

    def _marks(
        self, observation: Observation, pool: Pool, full: NDArray[np.bool_]
    ) -> tuple[int, int]:
        """Free frames below which memory is taken back, and up to which it is given out: what
        contexts grow by in AHEAD steps, and in REFILL times as many."""
        size = observation.frame_bytes
        tokens = max(1, int(pool.now.max(axis=1).sum()))
        # Index keys and maps by their mean, and a frame of each store begun; rows of full caches.
        lot = LOT * observation.required_bytes / tokens / size + len(observation.stores)
        lots = lot + (full * (LOT / pool.per_frame)).sum(axis=1)
        steps = max(observation.interval, AHEAD)
        marks = []
        for ahead in (steps, REFILL * steps):
            grown = [r.decoding * _lots(r.context, ahead) for r in observation.requests]
            marks.append(float(np.dot(grown, lots)))
        most = self.reserve * (observation.pool_bytes // size)
        high = int(min(marks[1], most))
        return min(int(marks[0]), high // 2), high


def _lots(context: int, steps: int) -> int:
    """Lots of room that a context needs within so many steps."""
    return (context + steps) // LOT - context // LOT


def _queue(observation: Observation, spare: int) -> int:
    """Frames for the waiting requests, from the first, that fit ``spare`` frames."""
    total = 0
    for size in observation.queue_bytes:
        frames = -(-size // observation.frame_bytes)
        if total + frames > spare:
            break
        total += frames
    return total


def _share_out(state: _State, observation: Observation) -> Rows:
    """Frames per request and store: the fair share under pressure or where someone is far behind,
    else what they hold and can use, and what is free beyond the upper mark."""
    held = np.minimum(state.held, state.limit)
    free = state.free + int(state.held.sum()) - int(held.sum()) - state.queue
    room = int(held.sum()) + free - state.high
    fair = _fair(state, max(room, 0))
    short = free < state.low or (observation.shortages > 0 and free < state.high)
    behind = held < BEHIND * fair
    frames = held
    if short or bool(behind.any()):
        frames = _toward(state, held, fair, behind, state.high - free)
    if int(frames.sum()) >= room:
        return frames
    return fill(state.pool, state.path, frames, state.limit, room)


def _toward(state: _State, held: Rows, fair: Rows, behind: NDArray[np.bool_], lacking: int) -> Rows:
    """A few caches that are far behind get their fair share; for them, and for the frames that are
    lacking, those furthest above theirs give, as few as can. Where that does not do, all get their share."""
    frames, even = held.ravel().copy(), fair.ravel()
    deficit = np.where(behind, fair - held, 0).ravel()
    raised = np.argsort(-deficit, kind="stable")[: min(MOVES, int(behind.sum()))]
    lacking += int(deficit[raised].sum())
    lowest = np.maximum(state.least.ravel(), np.ceil(KEPT * even).astype(np.int64))
    spare = np.minimum((frames * GIVE).astype(np.int64), frames - lowest)
    # A prompt that has not begun could use nothing between full and the floor.
    spare = np.where(np.broadcast_to(state.begun, held.shape).ravel(), spare, 0)
    gives = np.maximum(np.maximum(frames - even, spare), 0)
    gives[raised] = 0
    order = np.argsort(even - frames, kind="stable")
    given = np.cumsum(gives[order])
    if given[-1] < lacking:
        return fair
    frames[raised] = even[raised]
    givers = order[: int(np.searchsorted(given, lacking)) + 1] if lacking > 0 else order[:0]
    frames[givers] -= gives[givers]
    if len(givers):
        frames[givers[-1]] += int(given[len(givers) - 1]) - lacking
    return frames.reshape(held.shape)


def _fair(state: _State, room: int) -> Rows:
    """Everyone at the same point of the path. A prompt that has not begun is full or at the floor:
    it could not use anything between."""
    fair = fill(state.pool, state.path, state.least, state.limit, room)
    out = state.full & ~state.begun & (fair < state.limit)
    if bool(out.any()):
        limit = np.where(out, state.least, state.limit)
        fair = fill(state.pool, state.path, state.least, limit, room)
    return fair


def _promoted(state: _State, observation: Observation, frames: Rows) -> NDArray[np.bool_]:
    """Which mapped caches become full now: all in turn once everything fits, so many bytes at once;
    and those that have next to nothing to copy yet, where there is room for a while."""
    pool, full = state.pool, state.full
    if bool(full.all()):
        return np.zeros_like(full)
    context = np.array([[r.context] for r in observation.requests], dtype=np.int64)
    total = int(state.held.sum()) + state.free - state.queue
    share = fill(
        pool, state.path, np.minimum(state.least, state.later), state.later, total - state.high
    )
    young = context <= np.array([s.topk for s in observation.stores])
    fits = HEADROOM * int(state.later.sum()) <= total
    ready = ~full & (fits | (state.later <= frames) | (young & (state.soon <= share)))
    # Up to top-k rows are no more than one step could miss: they are not held up.
    copied = np.minimum(pool.now, context) * np.array([s.record_bytes for s in observation.stores])
    copied = np.where(young, 0, copied)
    order = np.argsort(np.where(ready, copied, np.iinfo(np.int64).max), axis=None, kind="stable")
    order = order[: int(ready.sum())]
    steps = min(max(observation.interval, 1), AHEAD)
    allowed = np.cumsum(copied.ravel()[order]) <= observation.pool_bytes * steps / HORIZON
    allowed[:1] = True  # one that is larger than that still has its turn
    extra = np.maximum(pool.whole(pool.now) - frames, 0).ravel()[order]
    chosen = np.zeros(full.size, dtype=bool)
    chosen[order[allowed & (np.cumsum(extra) <= total - int(frames.sum()))]] = True
    return chosen.reshape(full.shape)


def _targets(state: _State, frames: Rows) -> list[Target]:
    """Frames as rows: all that fit them; the same rows as before for the same frames."""
    rows = np.where(frames >= state.limit, state.cap, rows_in(state.pool, frames))
    rows = np.where(frames == state.held, state.pool.held, rows)
    full = state.full & (frames >= state.limit)
    return [
        tuple(FULL if whole else kept for whole, kept in zip(*request, strict=True))
        for request in zip(full.tolist(), rows.tolist(), strict=True)
    ]


def _with_full(state: _State, new: NDArray[np.bool_]) -> _State:
    """The state once these caches are full."""
    full = state.full | new
    cap = np.where(new, state.pool.most, state.cap)
    limit = np.where(new, state.pool.whole(state.pool.now), state.limit)
    held = np.where(new, limit, state.held)
    free = state.free + int(state.held.sum()) - int(held.sum())
    least = np.minimum(state.least, limit)
    return replace(state, full=full, cap=cap, limit=limit, least=least, held=held, free=free)
