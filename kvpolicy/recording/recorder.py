"""Watches an engine and writes what its selectors chose (``Engine.observers``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvpolicy.engine.engine import Engine
from kvpolicy.engine.request import RequestOutput
from kvpolicy.engine.scheduler import Batch
from kvpolicy.errors import UserError
from kvpolicy.kernels.paging import upload
from kvpolicy.memory.layout import Layout
from kvpolicy.memory.tables import SharedTables, StoreTables
from kvpolicy.recording.layout import (
    KINDS,
    REQUEST_COLUMNS,
    SEGMENT_COLUMNS,
    STEP_COLUMNS,
    Header,
    SelectorInfo,
    StoreInfo,
)
from kvpolicy.recording.writer import Lane, RecordingWriter

__all__ = ["Recorder", "header_of", "where_selected"]

# Entries kept on the device before they are copied to the host and written: 4 MiB, and one wait for
# the device in some 100 steps of 16 requests of tiny-dsa.
CHUNK_ENTRIES = 1 << 20

PROMPT, SEED, DECODE = range(len(KINDS))


def header_of(layout: Layout) -> Header:
    """What a recording says of a model's memory."""
    geometry = layout.geometry
    names = [store.store.name for store in layout.stores]
    return Header(
        model=geometry.name,
        stores=tuple(
            StoreInfo(s.store.name, s.store.n_layers, s.store.tokens_per_entry, s.record.bytes)
            for s in layout.stores
        ),
        selectors=tuple(
            SelectorInfo(s.name, names.index(s.store), s.topk) for s in geometry.selectors
        ),
    )


def where_selected(tables: SharedTables, layout: Layout) -> list[tuple[StoreTables, int, int]]:
    """Of every selector: the tables that hold its last selections, its column there, and its top-k."""
    found = []
    for selector in layout.geometry.selectors:
        own = tables.stores[layout.of(selector).index]
        found.append((own, own.selectors.index(selector.name), selector.topk))
    return found


class Recorder:
    """Records an engine from now on, into a file that appears when :meth:`finish` is called.

    Per step it keeps a copy of what each selector chose for rows that extend a generation, and for the
    last row of a prompt, on the device; per chunk these go to the host. As a context manager it leaves
    the engine, and drops the file unless it was finished. chunk: entries kept at a time. UserError for
    an engine with a drafter: a recording has one row per request and step, and what a position selects
    does not depend on who drafted it.
    """

    def __init__(self, engine: Engine, path: Path, chunk: int = CHUNK_ENTRIES) -> None:
        if engine.speculator is not None:
            raise UserError(
                f"drafter = {engine.speculator.drafter.name!r}: a recording has one row per request and "
                "step, so it is made without a drafter (selections are the same with and without)"
            )
        layout = engine.memory.layout
        self.engine = engine
        self.writer = RecordingWriter(path, header_of(layout))
        self._layout = layout
        self._limit = chunk
        self._device = engine.device
        self._tables = where_selected(engine.memory.tables, layout)
        self._origin = engine.clock.now()
        self._seconds: list[float] = []
        self._busy = engine.totals.busy_seconds
        self._requests: dict[int, tuple[int, int]] = {}
        self._start_chunk()
        engine.observers.append(self)

    def _start_chunk(self) -> None:
        self._steps: list[tuple[int, ...]] = []
        self._segments: list[tuple[int, ...]] = []
        self._budgets: list[tuple[int, ...]] = []
        self._owners: list[int] = []
        self._chosen: list[list[Tensor]] = [[] for _ in self._layout.geometry.selectors]
        self._entries = 0

    # --- every step ------------------------------------------------------------------------------

    def __call__(self, step: int, batch: Batch, /) -> None:
        """One step of the engine. Waits for the device where a chunk is full, and only there."""
        self._note_time()
        work = [(request, 1, DECODE) for request in batch.decode]
        for request, count in batch.prompts:
            last = request.computed == request.prompt_end
            work.append((request, count, SEED if last else PROMPT))
        at, kept = len(self._steps), []
        for request, count, kind in work:
            held = self.engine.memory.requests[request.id]
            self._requests.setdefault(request.id, (request.max_tokens, request.arrived_step))
            joined = int(request.admitted_step == step)
            self._segments.append(
                (at, request.id, request.computed - count, count, count, kind, held.seat, joined)
            )
            self._budgets.append(tuple(-1 if hot.full else hot.capacity for hot in held.hot))
            if kind != PROMPT:
                kept.append(held.seat)
                self._owners.append(request.id)
        self._steps.append((step, *self._room()))
        self._copy(kept)
        if self._entries >= self._limit:
            self._flush()

    def _note_time(self) -> None:
        """The engine has timed the step before this one."""
        now = self.engine.totals.busy_seconds
        self._seconds.append(now - self._busy)
        self._busy = now

    def _room(self) -> tuple[int, int]:
        """Device bytes that hot rows could have, and those that they have."""
        memory = self.engine.memory
        frames = memory.arena.frames
        hot = sum(cache.num_frames for each in memory.requests.values() for cache in each.hot)
        size = self._layout.frame_bytes
        return (frames.num_frames - frames.used + hot) * size, hot * size

    def _copy(self, seats: list[int]) -> None:
        """Keep what the requests in these seats have selected: the next step writes over it."""
        if not seats:
            return
        index = upload(seats, self._device)
        for kept, (own, column, topk) in zip(self._chosen, self._tables, strict=True):
            chosen = own.recent[:, column, :topk].index_select(0, index)
            kept.append(chosen.to(torch.int32))
            self._entries += chosen.numel()

    # --- chunks ----------------------------------------------------------------------------------

    def _flush(self) -> None:
        if self._steps:
            segments = _columns(self._segments, SEGMENT_COLUMNS)
            segments["budgets"] = np.array(self._budgets, dtype=np.int32).reshape(
                len(self._budgets), len(self._layout.stores)
            )
            self.writer.add(_columns(self._steps, STEP_COLUMNS), segments, self._lanes())
        self._start_chunk()

    def _lanes(self) -> list[Lane]:
        owners = np.array(self._owners, dtype=np.int64)
        order = np.argsort(owners, kind="stable")
        names, starts = np.unique(owners[order], return_index=True)
        lanes: list[Lane] = []
        for selector, kept in enumerate(self._chosen):
            if not kept:
                continue
            chosen = to_host(torch.cat(kept)).numpy()[order]
            for request, own in zip(names.tolist(), np.split(chosen, starts[1:]), strict=True):
                lanes.append((request, selector, own))
        return lanes

    # --- the end ---------------------------------------------------------------------------------

    def finish(
        self,
        outputs: Sequence[RequestOutput],
        record: Mapping[str, Any],
        origin: float | None = None,
    ) -> None:
        """Write what is left, the requests and the record (ready for JSON), and leave the engine.

        outputs: of every request of the run. origin: the engine's clock at its start (None: when the
        recorder was made). ``cache_rule`` is added to the record: how hot caches behaved at the end.
        """
        self._note_time()
        self._flush()
        start = self._origin if origin is None else origin
        record = {**record, "cache_rule": asdict(self.engine.memory.rule)}
        self.writer.close(
            self._table(outputs, start), record, np.array(self._seconds[1:], dtype=np.float32)
        )
        self._leave()

    def _table(self, outputs: Sequence[RequestOutput], origin: float) -> dict[str, Any]:
        def moment(value: float | None) -> float:
            return math.nan if value is None else value - origin

        rows = []
        for output in outputs:
            most, arrived = self._requests.get(output.id, (-1, -1))
            times, waited = output.latencies, output.latencies.waited_steps
            tokens = (output.prompt_tokens, len(output.tokens), most)
            steps = (arrived, -1 if waited is None else waited)
            moments = (times.arrived, times.admitted, times.first_token, times.last_token)
            rows.append((output.id, *tokens, *steps, *map(moment, moments)))
        return _columns(rows, REQUEST_COLUMNS)

    def _leave(self) -> None:
        if self in self.engine.observers:
            self.engine.observers.remove(self)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()
        self.writer.abandon()


def to_host(tensor: Tensor) -> Tensor:
    """The one place that waits for the device."""
    return tensor.cpu()


def _columns(
    rows: Sequence[tuple[Any, ...]], columns: Mapping[str, type[np.generic]]
) -> dict[str, Any]:
    """Rows of numbers as named columns."""
    by_name = zip(*rows, strict=True) if rows else ([] for _ in columns)
    pairs = zip(columns.items(), by_name, strict=True)
    return {name: np.array(values, dtype=kind) for (name, kind), values in pairs}
