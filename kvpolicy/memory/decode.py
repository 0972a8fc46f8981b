"""The memory during one step of plain decoding: one row per request, every number on the device.

The same service to a model as :class:`kvpolicy.memory.step.StepMemory`, without a host wait, an upload
or a shape that depends on the data, so that a CUDA graph can hold the whole step. What changes from
step to step lies in :class:`DecodeInputs`. Rows that pad a step to a graph's size write nothing that
anybody reads: they stand at position 0 of no request and see their own in-flight row only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvpolicy.geometry.geometry import Selector
from kvpolicy.kernels.eviction import EvictionRule
from kvpolicy.kernels.memory_ops import MemoryOps
from kvpolicy.kernels.retrieve import DecodeRows, StoreMemory
from kvpolicy.memory.access import StepAccess
from kvpolicy.memory.layout import Layout, StoreLayout
from kvpolicy.memory.rows import stored_keys, stored_rows
from kvpolicy.memory.segments import Segment, Wave
from kvpolicy.memory.tables import SharedTables

NOBODY = -1
"""Seat of a row that pads a step."""
UNKNOWN = -1
"""Token of a row whose token only the device knows."""

Row = tuple[int, int, int]
"""(seat, position, token)"""


class DecodeInputs:
    """The rows of a step on the device, in one tensor that one copy fills.

    seat: whose row it is, NOBODY for padding. position: in its request. token: its token id, or
    UNKNOWN. All int64 [size]. step: int64 [1], the engine step.
    """

    seat: Tensor
    position: Tensor
    token: Tensor

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.table = torch.zeros(3 * size + 1, dtype=torch.int64, device=device)
        self.seat, self.position, self.token = self.table[:-1].view(3, size)
        self.step = self.table[-1:]
        self.index = torch.arange(size, device=device)

    @classmethod
    def of(cls, seat: Tensor, position: Tensor, step: Tensor) -> DecodeInputs:
        """Rows that the device alone knows; tokens are the caller's business."""
        made = cls.__new__(cls)
        made.size = seat.shape[0]
        made.seat, made.position, made.step = seat, position, step
        made.token = torch.full_like(seat, UNKNOWN)
        made.index = torch.arange(made.size, device=seat.device)
        return made

    def numbers(self, rows: Sequence[Row], step: int) -> list[int]:
        """What ``table`` must hold for these rows; the others are padding."""
        padding = [(NOBODY, 0, 0)] * (self.size - len(rows))
        return [*itertools.chain(*zip(*rows, *padding, strict=True)), step]


class DecodeStep(StepAccess):
    """One step's access to the hierarchy for the rows of ``inputs``.

    stores: as kernels see them. most_tokens: no row stands at or beyond this position (known on the
    host; sizes scratch only). segments: the same rows as the host knows them, where somebody asks.
    """

    def __init__(
        self,
        layout: Layout,
        tables: SharedTables,
        stores: Sequence[StoreMemory],
        ops: MemoryOps,
        rule: EvictionRule,
        evict: bool,
        inputs: DecodeInputs,
        most_tokens: int,
        segments: Sequence[Segment] = (),
    ) -> None:
        super().__init__(layout, tables)
        self.segments = tuple(segments)
        self.rows = inputs.size
        self._ops, self._rule, self._evict = ops, rule, evict
        self._stores = stores
        self._numbers, self._most_tokens = inputs, most_tokens
        self._alive = inputs.seat != NOBODY
        self._accepted = self._alive.long()
        self._rows = DecodeRows(inputs.seat, inputs.position, inputs.step, self._alive)
        self._reads = inputs.seat.clamp_min(0)
        self._flying = [table.paged.locate(inputs.index) for table in tables.inflight]
        self._waves: dict[str, Wave] = {}
        self._latest: str | None = None

    @property
    def positions(self) -> Tensor:
        return self._numbers.position

    @property
    def seats(self) -> Tensor:
        return self._numbers.seat

    @property
    def row_segment(self) -> Tensor:
        return self._reads

    # --- rows, keys and selections of this step --------------------------------------------------

    def write_rows(self, layer: int, rows: Tensor) -> None:
        store = self.layout.owner(layer)
        rows = stored_rows(store, self._ops, rows)
        self._put_in_flight(store, layer, self._flying[store.index], rows)

    def write_keys(self, layer: int, keys: Tensor) -> None:
        store = self.layout.owner(layer)
        tables = self._tables_of(store)
        where = tables.key_location(self._numbers.seat, self._entry(store))
        where = torch.where(self._complete(store), where, -1)
        self._ops.put(tables.keys.view, where, stored_keys(store, self._ops, keys))

    def most_visible(self, selector: Selector) -> int:
        return self.layout.of(selector).store.entries(self._most_tokens)

    def _last_rows(self, selection: Tensor) -> tuple[Tensor, Tensor]:
        return self._numbers.seat, selection

    # --- retrieval -------------------------------------------------------------------------------

    def waves(self, selector: Selector) -> Iterator[Wave]:
        """The rows' selected records: one wave. Looked up, admitted and counted at the first call;
        fetched again, admitting nothing, where another selector has used staging since."""
        wave = self._waves.get(selector.name)
        if wave is None or self._latest != selector.name:
            wave = self._retrieve(selector, first=wave is None)
            self._waves[selector.name] = wave
            self._latest = selector.name
        yield wave

    def _retrieve(self, selector: Selector, first: bool) -> Wave:
        store = self._stores[self.layout.of(selector).index]
        chosen = self._selection[selector.name]
        found = self._ops.retrieve(store, self._rows, chosen, self._rule, first)
        valid = found >= 0
        return Wave(0, self.rows, found.clamp_min(0).long(), valid)

    # --- commit ----------------------------------------------------------------------------------

    def commit(self) -> None:
        """Every row is accepted: through to the host, then into the hot cache."""
        for store in self._stores:
            self._ops.publish(store, self._rows, self._accepted, self._rule, self._evict)

    # --- look-ups --------------------------------------------------------------------------------

    def _entry(self, store: StoreLayout) -> Tensor:
        """The entry that each row's token is in."""
        return self.positions // store.store.tokens_per_entry

    def _complete(self, store: StoreLayout) -> Tensor:
        """bool [n]: rows whose token completes an entry."""
        per = store.store.tokens_per_entry
        return self._alive & ((self.positions + 1) % per == 0)
