"""The memory during one step that verifies proposed tokens, every number on the device.

As :class:`kvpolicy.memory.decode.DecodeStep`, with q rows of each request: the anchor's and up to q - 1
proposed tokens'. How many of them count is known to the device only; the others are padding, like the
rows of requests that are not there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpolicy.geometry.geometry import Selector
from kvpolicy.kernels.demote import demote
from kvpolicy.kernels.eviction import EvictionRule
from kvpolicy.kernels.memory_ops import MemoryOps
from kvpolicy.kernels.retrieve import DecodeRows, StoreMemory
from kvpolicy.memory.decode import NOBODY, DecodeInputs, DecodeStep
from kvpolicy.memory.layout import Layout
from kvpolicy.memory.rule import Admission
from kvpolicy.memory.tables import SharedTables


class VerifyRows:
    """Rows of a verify step, p requests of q: row i * q + j is row j of request i.

    seat: int64 [p], NOBODY for padding. anchor: int64 [p], position of row 0. lengths: int64 [p], rows
    behind the anchor's that count, 0..q - 1. step: int64 [1]. alive: bool [p * q], rows that count.
    """

    def __init__(self, seat: Tensor, anchor: Tensor, lengths: Tensor, step: Tensor, q: int) -> None:
        self.q, self.step = q, step
        self.seat, self.anchor = seat, anchor
        self.row = torch.arange(q, device=seat.device)
        alive = (self.row <= lengths[:, None]) & (seat != NOBODY)[:, None]
        self.alive = alive.flatten()
        self.row_seat = torch.where(alive, seat[:, None], NOBODY).flatten()
        self.position = torch.where(alive, anchor[:, None] + self.row, 0).flatten()

    def inputs(self) -> DecodeInputs:
        """The same as single rows."""
        return DecodeInputs.of(self.row_seat, self.position, self.step)


class VerifyStep(DecodeStep):
    """One step's access to the hierarchy for the rows of ``rows``; see DecodeStep for the rest."""

    def __init__(
        self,
        layout: Layout,
        tables: SharedTables,
        stores: Sequence[StoreMemory],
        ops: MemoryOps,
        rule: EvictionRule,
        evict: bool,
        rows: VerifyRows,
        most_tokens: int,
        admission: Admission,
    ) -> None:
        super().__init__(layout, tables, stores, ops, rule, evict, rows.inputs(), most_tokens)
        self.verified, self._admission = rows, admission
        live = rows.seat != NOBODY
        self._rows = DecodeRows(rows.seat, rows.anchor, rows.step, live, rows.q)

    def select(self, selector: Selector, selection: Tensor) -> None:
        """As ``StepAccess.select``; rows that do not count choose nothing. What the last accepted row
        chose is noted at commit."""
        self._selection[selector.name] = torch.where(self._alive[:, None], selection, -1)

    def commit_accepted(self, accepted: Tensor) -> None:
        """The anchor's row and ``accepted`` (int64 [p]) rows behind it stay: through to the host, then into
        the hot cache. The others were never there."""
        rows = self.verified
        count = torch.where(rows.seat != NOBODY, accepted + 1, 0)
        if self._admission == "accepted" and rows.q > 1:
            self._demote(accepted)
        for store in self._stores:
            self._ops.publish(store, self._rows, count, self._rule, self._evict)
        last = torch.arange(rows.seat.shape[0], device=count.device) * rows.q + accepted
        for selector in self.layout.geometry.selectors:
            chosen = self._selection.get(selector.name)
            if chosen is not None:
                tables = self._tables_of(self.layout.of(selector))
                tables.note_selected(selector, rows.seat, chosen[last])

    def _demote(self, accepted: Tensor) -> None:
        """What only rejected rows wanted goes first in the next step."""
        rows = self.verified
        committed = rows.anchor.repeat_interleave(rows.q)
        kept = (rows.row <= accepted[:, None]).flatten()
        for selector in self.layout.geometry.selectors:
            chosen = self._selection.get(selector.name)
            if chosen is not None:
                store = self._stores[self.layout.of(selector).index]
                demote(store, rows.row_seat, committed, kept, chosen, rows.step)
