"""The memory as a model sees it during one step: in-flight rows in, index keys in, retrieved rows out.

A step computes *rows* (one per token) of several requests; a segment is one request's
consecutive rows. Rows computed now are *in flight*: visible to later rows of the same request in
the same step, and to nobody else, until :meth:`kvpolicy.memory.hierarchy.Hierarchy.commit`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvpolicy.errors import IntegrityError
from kvpolicy.geometry.geometry import Selector
from kvpolicy.kernels.eviction import EvictionRule
from kvpolicy.kernels.indexer import KeyPages
from kvpolicy.kernels.memory_ops import MemoryOps
from kvpolicy.kernels.paging import scatter
from kvpolicy.memory.counters import MemoryCounters
from kvpolicy.memory.host_pool import HostPool
from kvpolicy.memory.layout import Layout, PinnedLayout
from kvpolicy.memory.request import RequestMemory
from kvpolicy.memory.retrieval import Retriever
from kvpolicy.memory.rows import StepRows, stored_keys, stored_rows
from kvpolicy.memory.segments import Segment, Wave
from kvpolicy.memory.tables import SharedTables


class StepMemory:
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
        self.layout = layout
        self.tables = tables
        self.requests = tuple(requests)
        self.segments = tuple(segments)
        self.step = step
        self.device = device
        self._ops = ops
        self.rows = sum(segment.count for segment in segments)
        self.numbers = StepRows(self.requests, self.segments, device)
        self._selection: dict[str, Tensor] = {}
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
        """Position of every row in its request: int64 [n], on the device."""
        return self.numbers.positions

    @property
    def row_segment(self) -> Tensor:
        """Which row of ``key_pages`` every row reads, its request's seat: int64 [n]."""
        return self.numbers.seat

    @property
    def request_numbers(self) -> Tensor:
        """Number of the request of every row: int64 [n]."""
        return self.tables.requests[self.numbers.seat]

    # --- rows and keys of this step --------------------------------------------------------------

    def write_rows(self, layer: int, rows: Tensor) -> None:
        """Put this step's rows of one layer in flight. rows: [n, width], one per row of the step."""
        store = self.layout.owner(layer)
        records = self.tables.stores[store.index].cache.records
        view = records[..., store.store.layers.index(layer), :]
        where = self.tables.inflight[store.index].paged.locate(self.numbers.index)
        scatter(view, where, stored_rows(store, self._ops, rows))

    def write_keys(self, layer: int, keys: Tensor) -> None:
        """Index keys of this step's rows, for the store whose rows ``layer`` owns. [n, width].

        A key is written when its entry is complete. Keys past the committed length are invisible
        to every row but the later ones of this step, and overwritten when a row is rejected.
        """
        store = self.layout.owner(layer)
        per = store.store.tokens_per_entry
        seats, positions = self.numbers.seat, self.positions
        if per > 1:
            complete = (positions + 1) % per == 0
            seats, positions, keys = seats[complete], positions[complete], keys[complete]
        tables = self.tables.stores[store.index]
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

    def visible(self, selector: Selector) -> Tensor:
        """Entries that each row may choose from: int64 [n]; a row sees its own when it completes one."""
        return (self.positions + 1) // self.layout.of(selector).store.tokens_per_entry

    def most_visible(self, selector: Selector) -> int:
        """No row sees more entries."""
        store = self.layout.of(selector).store
        return max(store.entries(own.position + own.count) for own in self.segments)

    def key_pages(self, selector: Selector) -> KeyPages:
        """The index keys of all seats, where they lie."""
        return self.tables.stores[self.layout.of(selector).index].keys

    def select(self, selector: Selector, selection: Tensor) -> None:
        """Publish the top-k of every row: int64 [n, k], ascending, -1 after the last one."""
        if selector.name in self._selection:
            raise IntegrityError(f"selector {selector.name!r} chose twice in one step")
        self._selection[selector.name] = selection
        tables, last = self.tables.stores[self.layout.of(selector).index], self.numbers.last
        tables.note_selected(selector, self.numbers.seat[last], selection[last])

    def selection(self, selector: Selector) -> Tensor:
        """What was published: int64 [n, k]."""
        return self._selection[selector.name]

    # --- retrieval -------------------------------------------------------------------------------

    def waves(self, selector: Selector) -> Iterator[Wave]:
        """The rows' selected records, in waves that fit staging; use each wave before the next.

        The first call of a step looks up, admits and counts; later calls (other layers of the
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

    def row_view(self, layer: int) -> Tensor:
        """The arena read as rows that one layer attends: [F, per, width], strided."""
        store = self.layout.read_by(layer)
        return self.layout.row_view(layer, self.tables.stores[store.index].cache.records)

    # --- look-ups --------------------------------------------------------------------------------

    def _pinned(self, name: str) -> tuple[int, PinnedLayout]:
        for i, pinned in enumerate(self.layout.pinned):
            if pinned.pinned.name == name:
                return i, pinned
        raise ValueError(f"no pinned set {name!r}")
