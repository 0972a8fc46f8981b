"""The plain records of the twin's memory: frames, a request, its caches, what was counted."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpolicy.errors import CapacityError
from kvpolicy.memory.counters import NOTHING, Counted, RetrievalCounters
from kvpolicy.memory.extents import Extent
from kvpolicy.memory.layout import StoreLayout
from kvpolicy.memory.request import TRACE_LENGTH
from kvpolicy.twin.streams import Assigned

__all__ = ["TwinCounters", "TwinFrames", "TwinHot", "TwinRequest"]

Ints = NDArray[np.integer[Any]]


class _Frames:
    """How many frames are used, and how many of them by hot rows. As FrameAllocator, without numbers."""

    def __init__(self, num_frames: int) -> None:
        self.num_frames = num_frames
        self.used = self.hot = self.peak = 0

    @property
    def free(self) -> int:
        return self.num_frames - self.used

    def require(self, count: int) -> None:
        """CapacityError unless ``count`` frames are free."""
        if count > self.free:
            raise CapacityError("device", f"{count} frames wanted, {self.free} free")

    def take(self, count: int, hot: bool = False) -> None:
        """Use ``count`` frames more (or fewer, where negative)."""
        self.require(count)
        self.used += count
        self.hot += count if hot else 0
        self.peak = max(self.peak, self.used)

    def held_for(self, kind: str) -> int:
        """Frames of hot rows; of other kinds nothing is known apart."""
        return self.hot if kind == "hot" else 0

    def give(self, count: int, hot: bool = False) -> None:
        """Give frames back."""
        self.take(-count, hot)


class TwinFrames:
    """The arena's size and its books."""

    def __init__(self, num_frames: int, frame_bytes: int) -> None:
        self.frame_bytes = frame_bytes
        self.frames = _Frames(num_frames)


@dataclass(slots=True, eq=False)
class TwinHot:
    """One hot cache as :class:`kvpolicy.memory.hot_cache.HotCache` counts it. lane: in the SlotPool."""

    layout: StoreLayout
    lane: int
    room: int
    max_entries: int
    capacity: int = 0
    full: bool = False

    @property
    def num_frames(self) -> int:
        """Arena frames held by rows and metadata."""
        return self.layout.hot_frames(self.room if self.full else self.capacity, self.full)

    def frames_for(self, rows: int) -> int:
        """Arena frames that a budget takes now."""
        full = rows >= self.max_entries
        return self.layout.hot_frames(self.room if full else rows, full)


@dataclass(slots=True, eq=False)
class TwinRequest:
    """One request's books. last_row: of the streams' table, what it selected last, -1 for nothing.
    trace: (store, step, committed tokens, row) while somebody follows it."""

    request_id: int
    max_tokens: int
    assigned: Assigned
    extent: Extent
    committed: int = 0
    reserved: int = 0
    seat: int = -1
    decoded: int = 0
    last_row: int = -1
    hot: list[TwinHot] = field(default_factory=list)
    trace: deque[tuple[int, int, int, int]] | None = None

    def next_row(self) -> int:
        """The table's row of the next decode row."""
        own = self.assigned
        self.last_row = own.first + (own.start + self.decoded) % own.rows
        self.decoded += 1
        return self.last_row

    def follow(self) -> None:
        """Keep what is selected from now on."""
        self.trace = deque(maxlen=TRACE_LENGTH)

    def leave(self) -> None:
        """Off the device."""
        self.hot, self.trace = [], None
        self.seat, self.reserved = -1, 0


class _Retrieval:
    """Decode rows counted by seat: selected, fetched (rows, per layer), bytes. Prompt rows are not
    recorded, so nothing is counted of theirs."""

    def __init__(self, seats: int) -> None:
        self._live = np.zeros((seats, 3), dtype=np.int64)
        self._ended = np.zeros(3, dtype=np.int64)
        self.sent: Counted = NOTHING

    def add(self, seats: Ints, selected: Ints, fetched: Ints, moved: Ints) -> None:
        """Count one decode row of each of these seats."""
        self._live[seats] += np.stack((selected, fetched, moved), axis=1)

    def end(self, seat: int) -> None:
        """A seat is given up: its counts become part of the totals."""
        self._ended += self._live[seat]
        self._live[seat] = 0

    @property
    def totals(self) -> Ints:
        """selected, fetched, bytes; of all requests ever."""
        total: Ints = self._ended + self._live.sum(axis=0)
        return total

    def read(self, seat_of: dict[int, int] | None = None) -> Counted:
        """As of now."""
        live = self._live.tolist()
        own = {number: _counters(*live[seat]) for number, seat in (seat_of or {}).items()}
        return Counted(own, _counters(*self.totals.tolist()), RetrievalCounters())

    def received(self) -> Counted:
        """What was last sent."""
        return self.sent


def _counters(selected: int, fetched: int, moved: int) -> RetrievalCounters:
    return RetrievalCounters(selected, selected, fetched, 0, 0, moved)


class TwinCounters:
    """As MemoryCounters. assigned: what each request that may be admitted replays. entered_tokens: of
    contexts that came with dummy weights."""

    def __init__(self, seats: int) -> None:
        self.retrieval = _Retrieval(seats)
        self.assigned: dict[int, Assigned] = {}
        self.moved_rows = self.moved_bytes = self.device_to_host_bytes = 0
        self.release_steps = self.request_waves = self.shortages = self.forced_frames = 0
        self.entered_tokens = 0
