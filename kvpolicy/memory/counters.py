"""What retrieval did, counted. Rows are per layer: one record of n layers counts n rows.

Retrieval counts on the device, without waiting for it; a reader asks for a snapshot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kvpolicy.memory.transfer import ToHost


@dataclass(slots=True)
class RetrievalCounters:
    """Totals. In-flight rows are never counted: they need no retrieval.

    selected_rows: rows that query rows attended to. unique_rows: after the union over the query
    rows of one request. fetched_rows: copied from the host for attention (misses).
    staged_rows: those of them that could not stay. refetched_rows: copied again for a later layer
    because the step was served in waves.
    """

    selected_rows: int = 0
    unique_rows: int = 0
    fetched_rows: int = 0
    staged_rows: int = 0
    refetched_rows: int = 0
    host_to_device_bytes: int = 0

    @property
    def miss_rate(self) -> float:
        """Fetched rows over unique rows, 0 where nothing was selected."""
        return self.fetched_rows / self.unique_rows if self.unique_rows else 0.0

    @property
    def miss_rate_selected(self) -> float:
        """Fetched rows over selected rows, the form the paper reports."""
        return self.fetched_rows / self.selected_rows if self.selected_rows else 0.0

    def since(self, earlier: RetrievalCounters) -> RetrievalCounters:
        """What was counted after ``earlier``."""
        return RetrievalCounters(*(getattr(self, n) - getattr(earlier, n) for n in NAMES))


NAMES = tuple(field.name for field in fields(RetrievalCounters))
WIDTH = len(NAMES)


@dataclass(frozen=True, slots=True)
class Counted:
    """Retrieval up to some moment. by_request: of decode rows, since each took its seat. decode,
    prefill: of all requests ever."""

    by_request: dict[int, RetrievalCounters]
    decode: RetrievalCounters
    prefill: RetrievalCounters

    @property
    def host_to_device_bytes(self) -> int:
        """Bytes fetched for attention."""
        return self.decode.host_to_device_bytes + self.prefill.host_to_device_bytes


NOTHING = Counted({}, RetrievalCounters(), RetrievalCounters())


class _Snapshot:
    """Counters on their way to the host."""

    def __init__(self, table: Tensor, seats: int, seat_of: Mapping[int, int]) -> None:
        self._seats, self._seat_of = seats, dict(seat_of)
        self._table = ToHost(table)

    @property
    def ready(self) -> bool:
        return self._table.ready

    def read(self) -> Counted:
        """Waits until it is ready."""
        live, seats = self._table.read(), self._seats
        totals = live[: 2 * seats].view(2, seats, WIDTH).sum(1) + live[2 * seats :]
        decode, prefill = (RetrievalCounters(*row) for row in totals.tolist())
        rows = live[:seats].tolist()
        own = {r: RetrievalCounters(*rows[seat]) for r, seat in self._seat_of.items()}
        return Counted(own, decode, prefill)


class RetrievalCounts:
    """The counters of all seats on the device, in the order of RetrievalCounters' fields.

    decode and prefill are apart: miss rates speak of decode.
    """

    def __init__(self, seats: int, device: torch.device) -> None:
        self.seats = seats
        self._table = torch.zeros((2 * seats + 2, WIDTH), dtype=torch.int64, device=device)
        self._live, self._ended = self._table[:-2], self._table[-2:]
        self._sent: deque[_Snapshot] = deque()
        self._latest = NOTHING

    def row(self, seat: int, decode: bool) -> int:
        """Where a seat is counted."""
        return seat if decode else seat + self.seats

    def add(self, rows: Tensor, counts: Tensor) -> None:
        """Add counts [p, WIDTH] at rows [p] (int64)."""
        self._live.index_add_(0, rows, counts)

    def end(self, seat: int) -> None:
        """A seat is given up: its counts become part of the totals."""
        own = self._live[seat :: self.seats]
        self._ended += own
        own.zero_()

    @property
    def by_seat(self) -> Tensor:
        """int64 [2 * seats, WIDTH] on the device: decode rows of all seats, then prompt rows."""
        return self._live

    def read(self, seat_of: Mapping[int, int] | None = None) -> Counted:
        """As of now; waits for the device. seat_of: the seats of the requests that sit."""
        return _Snapshot(self._table, self.seats, seat_of or {}).read()

    def send(self, seat_of: Mapping[int, int]) -> None:
        """Send the counters, as they will be when the work launched so far is done, to the host."""
        self._sent.append(_Snapshot(self._table, self.seats, seat_of))

    def received(self) -> Counted:
        """The newest counters that have arrived of those sent. Waits for nothing."""
        while self._sent and self._sent[0].ready:
            self._latest = self._sent.popleft().read()
        return self._latest


class MemoryCounters:
    """Everything the hierarchy counts.

    moved_*: rows copied from the host to seed or promote hot caches, not for attention.
    release_steps: steps in which a budget was taken back. request_waves: extra waves, beyond one
    per retrieval. shortages: times a growing context found no free frame. forced_frames: optional
    frames that were taken back for it, whatever the controller had planned.
    """

    def __init__(self, seats: int, device: torch.device) -> None:
        self.retrieval = RetrievalCounts(seats, device)
        self.moved_rows = 0
        self.moved_bytes = 0
        self.device_to_host_bytes = 0
        self.release_steps = 0
        self.request_waves = 0
        self.shortages = 0
        self.forced_frames = 0

    @property
    def decode(self) -> RetrievalCounters:
        """Retrieval for rows that extend generations."""
        return self.retrieval.read().decode

    @property
    def prefill(self) -> RetrievalCounters:
        """Retrieval for prompt rows."""
        return self.retrieval.read().prefill

    @property
    def host_to_device_bytes(self) -> int:
        """All bytes copied from host to device."""
        return self.retrieval.read().host_to_device_bytes + self.moved_bytes
