"""The memory as a model sees it during one step: in-flight rows in, index keys in, retrieved rows out.

A step computes *rows* (one per token) of several requests; a segment is one request's
consecutive rows. Rows computed now are *in flight*: visible to later rows of the same request in
the same step, and to nobody else, until :meth:`kvpolicy.memory.hierarchy.Hierarchy.commit`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvpolicy.geometry.geometry import Selector
from kvpolicy.kernels.demote import demote
from kvpolicy.kernels.eviction import EvictionRule
from kvpolicy.kernels.memory_ops import MemoryOps
from kvpolicy.kernels.paging import scatter, upload
from kvpolicy.kernels.retrieve import StoreMemory
from kvpolicy.memory.access import StepAccess
from kvpolicy.memory.counters import MemoryCounters
from kvpolicy.memory.host_pool import HostPool
from kvpolicy.memory.layout import Layout, PinnedLayout
from kvpolicy.memory.request import RequestMemory
from kvpolicy.memory.retrieval import Retriever
from kvpolicy.memory.rows import StepRows, stored_keys, stored_rows
from kvpolicy.memory.segments import Accepted, Segment, Wave
from kvpolicy.memory.tables import SharedTables


class StepMemory(StepAccess):
    """One step's access to the hierarchy. Made by ``Hierarchy.begin_step``, used once.

    numbers: of every row, on the device (see StepRows).
    """

    def __init__(
        self,
        layout: Layout,
        tables: SharedTables,
        host: HostPool,
        ops: MemoryOps,
        rule: EvictionRule,
        requests: Sequence[RequestMemory],
        segments: Sequence[Segment],
        step: int,
        counters: MemoryCounters,
        device: torch.device,
    ) -> None:
        super().__init__(layout, tables)
        self.requests = tuple(requests)
        self.segments = tuple(segments)
        self.step = step
        self.device = device
        self._ops = ops
        self.rows = sum(segment.count for segment in segments)
        self.numbers = StepRows(self.requests, self.segments, device)
        self._waves: dict[str, list[Wave]] = {}
        self._latest: str | None = None
        self._retriever = Retriever(
            layout,
            tables,
            host,
            ops,
            rule,
            self.requests,
            self.segments,
            self.numbers,
            step,
            counters,
        )

    @property
    def positions(self) -> Tensor:
        return self.numbers.positions

    @property
    def seats(self) -> Tensor:
        return self.numbers.seat

    # --- rows and keys of this step --------------------------------------------------------------

    def write_rows(self, layer: int, rows: Tensor) -> None:
        store = self.layout.owner(layer)
        where = self.tables.inflight[store.index].paged.locate(self.numbers.index)
        self._put_in_flight(store, layer, where, stored_rows(store, self._ops, rows))

    def write_keys(self, layer: int, keys: Tensor) -> None:
        """Keys past the committed length are invisible to every row but the later ones of this step, and
        overwritten when a row is rejected."""
        store = self.layout.owner(layer)
        per = store.store.tokens_per_entry
        seats, positions = self.numbers.seat, self.positions
        if per > 1:
            complete = (positions + 1) % per == 0
            seats, positions, keys = seats[complete], positions[complete], keys[complete]
        tables = self._tables_of(store)
        where = tables.key_location(seats, positions // per)
        scatter(tables.keys.view, where, stored_keys(store, self._ops, keys))

    def write_pinned(self, name: str, layer: int, rows: Tensor) -> None:
        """Put rows of a pinned set in flight for one of its layers. rows: [n, width]."""
        i, pinned = self._pinned(name)
        table = self.tables.inflight_pinned[i].paged
        view = table.view[..., pinned.pinned.layers.index(layer), :]
        scatter(view, table.locate(self.numbers.index), rows)

    def read_pinned(self, name: str, layer: int, segment: int, row: int) -> Tensor:
        """The window that one row of a segment sees, oldest first, its own row last.

        Returns [w, width] with w = min(position + 1, window).
        """
        i, pinned = self._pinned(name)
        own = self.segments[segment]
        at = pinned.pinned.layers.index(layer)
        position = own.position + row
        span = torch.arange(max(0, position - pinned.rows + 1), position + 1, device=self.device)
        old, new = span[span < own.position], span[span >= own.position]
        ring = self.requests[segment].pinned[i].paged
        flight = self.tables.inflight_pinned[i].paged
        parts = [ring.get(old % pinned.rows), flight.get(new - own.position + own.start)]
        return torch.cat(parts)[:, at]

    # --- selection -------------------------------------------------------------------------------

    def most_visible(self, selector: Selector) -> int:
        store = self.layout.of(selector).store
        return max(store.entries(own.position + own.count) for own in self.segments)

    def _last_rows(self, selection: Tensor) -> tuple[Tensor, Tensor]:
        last = self.numbers.last
        return self.numbers.seat[last], selection[last]

    def demote(self, stores: Sequence[StoreMemory], kept: Sequence[Accepted]) -> None:
        """What only rejected rows wanted goes first in the next step. stores: as decode kernels see them."""
        rejecting = [one for one in kept if one.segment.decode and one.count < one.segment.count]
        if not rejecting:
            return
        rows: list[int] = []
        committed: list[int] = []
        stays: list[int] = []
        for one in rejecting:
            own = one.segment
            rows += range(own.start, own.stop)
            committed += [own.position] * own.count
            stays += [int(i < one.count) for i in range(own.count)]
        numbers = upload([*rows, *committed, *stays, self.step], self.device)
        index, before, accepted = numbers[:-1].view(3, -1)
        for selector in self.layout.geometry.selectors:
            if selector.name in self._selection:
                store, chosen = (
                    stores[self.layout.of(selector).index],
                    self._selection[selector.name],
                )
                demote(
                    *(store, self.seats[index], before, accepted > 0, chosen[index]), numbers[-1:]
                )

    def note_accepted(self, accepted: Sequence[int]) -> None:
        """What a request's last row chose is what its last accepted one did."""
        cut = [
            (request.seat, segment.start + count - 1)
            for request, segment, count in zip(self.requests, self.segments, accepted, strict=True)
            if 0 < count < segment.count
        ]
        if not cut:
            return
        seats, rows = upload(list(zip(*cut, strict=True)), self.device)
        for selector in self.layout.geometry.selectors:
            if selector.name in self._selection:
                chosen = self._selection[selector.name][rows]
                self._tables_of(self.layout.of(selector)).note_selected(selector, seats, chosen)

    # --- retrieval -------------------------------------------------------------------------------

    def waves(self, selector: Selector) -> Iterator[Wave]:
        """The first call of a step looks up, admits and counts; later calls (other layers of the
        group) reuse its result where it was one wave that nothing has overwritten since, and
        otherwise fetch again without touching the hot cache.
        """
        known = self._waves.get(selector.name)
        if known is not None and len(known) == 1 and self._latest == selector.name:
            yield known[0]
            return
        done: list[Wave] = []
        self._latest = selector.name
        for wave in self._retriever.waves(
            selector, self._selection[selector.name], first=known is None
        ):
            done.append(wave)
            yield wave
        self._waves[selector.name] = done

    # --- look-ups --------------------------------------------------------------------------------

    def _pinned(self, name: str) -> tuple[int, PinnedLayout]:
        for i, pinned in enumerate(self.layout.pinned):
            if pinned.pinned.name == name:
                return i, pinned
        raise ValueError(f"no pinned set {name!r}")
