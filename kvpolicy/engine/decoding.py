"""Decode rows through the model: one row per request, on a CUDA device as one graph per batch size."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicy.engine.request import Request
from kvpolicy.engine.sampler import DeviceSampler
from kvpolicy.memory.decode import NOBODY, DecodeInputs, Row
from kvpolicy.memory.hierarchy import Hierarchy
from kvpolicy.memory.rule import CacheRule
from kvpolicy.memory.segments import Segment
from kvpolicy.models.loader import DeviceModel

log = logging.getLogger(__name__)

# Scratch of a captured graph is sized for contexts of this many tokens and its doubles, so that a
# growing context asks for a new graph five times between 32K and a million.
SHORTEST = 32768
# Copies of a step's numbers that may be on their way to the device at once: the step that runs and
# the one that is launched behind it, with one to spare.
UPLOADS = 4


@dataclass(frozen=True, slots=True)
class _Key:
    """What a captured graph is made for. most: tokens of context. sampled: not all rows are greedy."""

    rows: int
    most: int
    rule: CacheRule
    sampled: bool


@dataclass(slots=True)
class _Program:
    """A captured step, ready to be run again with other numbers in ``inputs``."""

    inputs: DecodeInputs
    logits: Tensor
    graph: torch.cuda.CUDAGraph


class Decoder:
    """Runs one row of each of some requests: upload, model, retrieval, commit, and on a device with a
    sampler the next token too.

    capture: as CUDA graphs, one per power of two of rows. sampler: None where the host chooses tokens.
    """

    def __init__(
        self,
        model: DeviceModel,
        memory: Hierarchy,
        sampler: DeviceSampler | None,
        most_rows: int,
        capture: bool,
    ) -> None:
        self.model, self.memory, self.sampler = model, memory, sampler
        self.capture = capture
        self._most_rows = most_rows
        self._device = memory.arena.device
        self._programs: dict[_Key, _Program] = {}
        self._inputs: dict[int, DecodeInputs] = {}
        self._pool = torch.cuda.graph_pool_handle() if capture else None
        self._pinned = [
            torch.empty(3 * most_rows + 1, dtype=torch.int64, pin_memory=capture)
            for _ in range(UPLOADS)
        ]
        self._uploads = 0

    @property
    def graphs(self) -> int:
        """Graphs captured so far."""
        return len(self._programs)

    def size_of(self, rows: int) -> int:
        """Rows of the graph that serves ``rows``."""
        return min(1 << (rows - 1).bit_length(), self._most_rows)

    # --- running ---------------------------------------------------------------------------------

    def run(self, requests: Sequence[Request], step: int) -> Tensor:
        """Compute, commit, and account for one row of each request. Returns its logits [n, vocab],
        which the next run may overwrite."""
        held = [self.memory.decoding(request.id) for request in requests]
        pairs = zip(held, requests, strict=True)
        rows = [(h.seat, r.computed, r.token_at(r.computed)) for h, r in pairs]
        most = max(position for _, position, _ in rows) + 1
        sampled = any(request.params.temperature > 0.0 for request in requests)
        if self.capture:
            key = self._key(len(rows), most, sampled)
            program = self._programs.get(key) or self._captured(key)
            self._upload(program.inputs, rows, step)
            program.graph.replay()
            logits = program.logits
        else:
            inputs = self._inputs_of(len(rows))
            self._upload(inputs, rows, step)
            segments = [Segment(r.id, i, 1, r.computed, True) for i, r in enumerate(requests)]
            logits = self._compute(inputs, most, sampled, segments)
        self.memory.advance(held, step)
        return logits[: len(rows)]

    def _key(self, rows: int, most: int, sampled: bool) -> _Key:
        limit = self.model.geometry.max_context
        room = SHORTEST
        while room < most:
            room *= 2
        return _Key(self.size_of(rows), min(room, limit), self.memory.rule, sampled)

    def _inputs_of(self, size: int) -> DecodeInputs:
        if size not in self._inputs:
            self._inputs[size] = DecodeInputs(size, self._device)
        return self._inputs[size]

    def _upload(self, inputs: DecodeInputs, rows: Sequence[Row], step: int) -> None:
        numbers = torch.tensor(inputs.numbers(rows, step), dtype=torch.int64)
        staged = self._pinned[self._uploads % UPLOADS][: numbers.numel()]
        self._uploads += 1
        staged.copy_(numbers)
        inputs.table.copy_(staged, non_blocking=True)

    def _compute(
        self,
        inputs: DecodeInputs,
        most: int,
        sampled: bool,
        segments: Sequence[Segment] = (),
    ) -> Tensor:
        tokens = inputs.token
        if self.sampler is not None:
            tokens = self.sampler.tokens_of(inputs.seat, tokens)
        memory = self.memory.decode_step(inputs, most, segments)
        logits = self.model.forward(tokens, memory, inputs.index)
        memory.commit()
        if self.sampler is not None:
            self.sampler.choose(logits, inputs.seat, inputs.position + 1, sampled)
        return logits

    # --- capture ---------------------------------------------------------------------------------

    def _captured(self, key: _Key) -> _Program:
        """Capture a step of ``key.rows`` rows. What it runs first, to compile and to warm up, is all
        padding and changes nothing."""
        inputs = self._inputs_of(key.rows)
        inputs.table.copy_(torch.tensor(inputs.numbers([], 0)))
        assert bool((inputs.seat == NOBODY).all())
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._compute(inputs, key.most, key.sampled)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._compute(inputs, key.most, key.sampled)
        self._programs[key] = program = _Program(inputs, logits, graph)
        log.info("captured a decode step: %s", key)
        return program

    def prepare(self, most_tokens: int, sampled: bool = False) -> None:
        """Capture the graphs of every batch size now, for contexts up to ``most_tokens``, so that no
        step has to wait for it."""
        size = 1
        while self.capture:
            key = self._key(size, most_tokens, sampled)
            if key not in self._programs:
                self._captured(key)
            if size >= self._most_rows:
                return
            size *= 2
