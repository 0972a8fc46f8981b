"""Decode rows with a drafter: draft, verify, accept and commit on the device, on CUDA as one graph.

The host gives seats, anchors and limits in one copy, and reads back what was accepted: one wait a step. Where
a drafter's code waits for the device itself it runs before the graph (``capturable`` of a drafter is not
true of it).
"""

from __future__ import annotations

import itertools
import logging
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicy.engine.decoding import SHORTEST, UPLOADS
from kvpolicy.engine.request import Request
from kvpolicy.engine.speculation import Places, Speculator, first_of
from kvpolicy.memory.decode import NOBODY
from kvpolicy.memory.hierarchy import Hierarchy
from kvpolicy.memory.rule import CacheRule
from kvpolicy.memory.transfer import ToHost
from kvpolicy.memory.verify import VerifyRows
from kvpolicy.models.loader import DeviceModel
from kvpolicy.speculative.drawing import RowSampling
from kvpolicy.speculative.proposal import OneHot, Proposal

log = logging.getLogger(__name__)

_COLUMNS = (
    9  # seat, anchor, token, limit, request number, seed, top_k, bits of temperature, of top_p
)


def _bits(number: float) -> int:
    return int(struct.unpack("q", struct.pack("d", number))[0])


class VerifyInputs:
    """What changes from step to step, in one tensor that one copy fills; int64 [size] each."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.table = torch.zeros(_COLUMNS * size + 1, dtype=torch.int64, device=device)
        columns = self.table[:-1].view(_COLUMNS, size)
        self.seat, self.anchor, self.token, self.limit, self.number = columns[:5]
        bits = columns[7:9].view(torch.float64)
        self.sampling = RowSampling(columns[5], bits[0], columns[6], bits[1])
        self.step = self.table[-1:]

    def numbers(self, rows: Sequence[tuple[int, ...]], step: int) -> list[int]:
        """What ``table`` must hold for these rows; the others are padding."""
        nobody = (NOBODY, 0, 0, 0, 0, 0, 0, _bits(0.0), _bits(1.0))
        padding = [nobody] * (self.size - len(rows))
        return [*itertools.chain(*zip(*rows, *padding, strict=True)), step]


@dataclass(frozen=True, slots=True)
class _Key:
    """What a captured graph is made for. q: rows of a request. most: tokens of context. confident: the
    proposal from outside the graph has a confidence."""

    rows: int
    q: int
    most: int
    rule: CacheRule
    sampled: bool
    confident: bool


@dataclass(slots=True)
class _Found:
    """Outputs of a step. kept: int64 [p, 4 + K'], (accepted, next token, length, sound, tokens). logits:
    float32 [p * q, V]. keep: what :meth:`Speculator.keep_rows` is to be told."""

    kept: Tensor
    logits: Tensor
    keep: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a step gave each request. counts: rows committed, the anchor's included. tokens: (request, token,
    row of logits), in order."""

    counts: tuple[int, ...]
    tokens: tuple[tuple[Request, int, int], ...]
    logits: ToHost


class VerifyDecoder:
    """Runs decode rows with their proposals. capture: as CUDA graphs, one per power of two of requests and
    number of rows of each."""

    def __init__(
        self,
        model: DeviceModel,
        memory: Hierarchy,
        speculator: Speculator,
        most_rows: int,
        capture: bool,
    ) -> None:
        self.model, self.memory, self.speculator = model, memory, speculator
        self.capture = capture
        self._inside = capture and bool(getattr(speculator.drafter, "capturable", False))
        # Few, since each is a graph: some of the proposed tokens, or all.
        self._widths = tuple(dict.fromkeys((max(1, speculator.width // 2), speculator.width)))
        self._most_rows = most_rows
        self._device = memory.arena.device
        self._inputs: dict[int, VerifyInputs] = {}
        self._programs: dict[_Key, tuple[torch.cuda.CUDAGraph, _Found]] = {}
        self._drafted: Places = {}
        self._pool = torch.cuda.graph_pool_handle() if capture else None
        self._pinned = [
            torch.empty(_COLUMNS * most_rows + 1, dtype=torch.int64, pin_memory=capture)
            for _ in range(UPLOADS)
        ]
        self._uploads = 0

    @property
    def graphs(self) -> int:
        """Graphs captured so far."""
        return len(self._programs)

    def fits(self, requests: Sequence[Request]) -> bool:
        """Whether staging holds all that the step's rows can miss."""
        return self.memory.decodes_at_once(self._size(len(requests)) * self.rows_of(requests))

    def rows_of(self, requests: Sequence[Request]) -> int:
        """Rows of each request in the next step: 1 where nothing is to be verified, else 1 + K, or 1 + half
        of it where that is enough, or all that staging holds."""
        most = max(self._limits(requests))
        if not most or not self.speculator.active:
            return 1
        return 1 + min(width for width in self._widths if width >= most)

    def _limits(self, requests: Sequence[Request]) -> list[int]:
        """Most tokens to verify of each request in rows that staging holds; where it does not even hold
        half, the step is not ours (:meth:`fits`)."""
        size = self._size(len(requests))
        fitting = [w for w in self._widths if self.memory.decodes_at_once(size * (1 + w))]
        return self.speculator.limits(requests, self.memory, max(fitting, default=None))

    def _size(self, rows: int) -> int:
        return min(1 << (rows - 1).bit_length(), self._most_rows) if self.capture else rows

    # --- running ---------------------------------------------------------------------------------

    def run(self, requests: Sequence[Request], step: int) -> Answer:
        """Draft, verify, commit and account for some requests. Waits for the device."""
        started = time.perf_counter()
        speculator = self.speculator
        limits = self._limits(requests)
        q = self.rows_of(requests)
        held = [
            self.memory.decoding(request.id, 1 + limit)
            for request, limit in zip(requests, limits, strict=True)
        ]
        rows = [
            (
                *(own.seat, r.computed, r.token_at(r.computed), limit, r.id, r.params.seed),
                *(r.params.top_k, _bits(r.params.temperature), _bits(r.params.top_p)),
            )
            for own, r, limit in zip(held, requests, limits, strict=True)
        ]
        inputs = self._inputs_of(self._size(len(rows)))
        self._upload(inputs, rows, step)
        most = max(r.computed + 1 + limit for r, limit in zip(requests, limits, strict=True))
        sampled = any(request.params.temperature > 0.0 for request in requests)
        counts = speculator.counts
        failures, drafted, began = counts.failures, 0.0, time.perf_counter()
        proposal = self._ahead(inputs, q)
        if proposal is not None:
            drafted = time.perf_counter() - began
            counts.draft_seconds += drafted
        found = self._step(inputs, q, most, sampled, proposal)
        sent, logits = ToHost(found.kept), ToHost(found.logits[: len(rows) * q])
        kept = sent.read()[: len(rows)].tolist()
        if not all(row[3] for row in kept) and failures == counts.failures:
            speculator.failed("proposed tokens or probabilities that are none")
        width = min(max(limits), q - 1)
        answer = self._read(requests, [min(limit, width) for limit in limits], kept, logits, q)
        self.memory.advance(held, step, answer.counts)
        seconds = time.perf_counter() - started
        counts.verify_seconds += seconds - drafted
        speculator.timed(width, len(rows) * q, answer.counts, seconds, ragged=False)
        return answer

    def _read(
        self,
        requests: Sequence[Request],
        limits: Sequence[int],
        kept: list[list[int]],
        logits: ToHost,
        q: int,
    ) -> Answer:
        counts, tokens = [], []
        for i, (request, limit, (accepted, last, length, sound, *drafted)) in enumerate(
            zip(requests, limits, kept, strict=True)
        ):
            self.speculator.counts.note(limit if sound else 0, length, accepted)
            counts.append(accepted + 1)
            found = [*drafted[:accepted], last]
            tokens += [(request, token, i * q + j) for j, token in enumerate(found)]
        return Answer(tuple(counts), tuple(tokens), logits)

    def _ahead(self, inputs: VerifyInputs, q: int) -> Proposal | None:
        """What is drafted before the step, None where the graph drafts."""
        return None if self._inside else self._placed(inputs, q, self._draft(inputs, q))

    def _step(
        self, inputs: VerifyInputs, q: int, most: int, sampled: bool, proposal: Proposal | None
    ) -> _Found:
        if not self.capture:
            return self._compute(inputs, q, most, sampled, proposal)
        room = SHORTEST
        while room < most:
            room *= 2
        limit = self.model.geometry.max_context
        confident = proposal is not None and proposal.confidence is not None
        key = _Key(inputs.size, q, min(room, limit), self.memory.rule, sampled, confident)
        graph, found = self._programs.get(key) or self._captured(key, inputs, proposal)
        graph.replay()
        if not self._inside:
            self.speculator.keep_rows(*found.keep)
        return found

    def _draft(self, inputs: VerifyInputs, q: int) -> Proposal:
        """The proposal of q - 1 tokens, harmless where the drafter failed."""
        if q > 1:
            found = self.speculator.propose(
                self.memory, inputs.seat, inputs.anchor, inputs.token, inputs.sampling
            )
            if found is not None:
                return first_of(found, q - 1)
        return Proposal(inputs.token.new_full((inputs.size, q - 1), -1), OneHot())

    def _placed(self, inputs: VerifyInputs, q: int, proposal: Proposal) -> Proposal:
        """The proposal where a captured graph looks for it, if it is captured."""
        if not self.capture:
            return proposal
        return self.speculator.placed(self._drafted, inputs.size, q, proposal)

    def _compute(
        self, inputs: VerifyInputs, q: int, most: int, sampled: bool, proposal: Proposal | None
    ) -> _Found:
        """The whole step; asks the host nothing (but for what a drafter does)."""
        speculator = self.speculator
        drafted = self._draft(inputs, q) if proposal is None else proposal
        drafted, lengths, sound = speculator.lengths(
            drafted, inputs.seat, inputs.number, inputs.limit
        )
        rows = VerifyRows(inputs.seat, inputs.anchor, lengths, inputs.step, q)
        tokens = torch.cat([inputs.token[:, None], drafted.tokens], dim=1).flatten()
        tokens = torch.where(rows.alive, tokens, 0)
        memory = self.memory.verify_step(rows, most)
        index = torch.arange(inputs.size * q, device=tokens.device)
        logits, taps = speculator.forward(tokens, memory, index)
        answers = logits.view(inputs.size, q, -1)
        accepted, last = speculator.accepted(
            answers, drafted, lengths, inputs.sampling, inputs.anchor, sampled
        )
        memory.commit_accepted(accepted)
        speculator.learn(inputs.seat, lengths, accepted, q > 1)
        stays = rows.alive & (rows.row <= accepted[:, None]).flatten()
        keep = (taps, rows.row_seat, rows.position, stays, accepted, q)
        if self._inside or not self.capture:
            speculator.keep_rows(*keep)
        numbers = torch.stack([accepted, last, lengths, sound.long()], dim=1)
        return _Found(torch.cat([numbers, drafted.tokens], dim=1), logits, keep)

    def prepare(self, most_tokens: int, sampled: bool = False) -> None:
        """Capture the graphs of every number of requests now, with and without proposals."""
        size = 1
        while self.capture:
            inputs = self._inputs_of(size)
            inputs.table.copy_(torch.tensor(inputs.numbers([], 0)))
            for q in (1, *(1 + width for width in self._widths)):
                if self.memory.decodes_at_once(size * q):
                    self._step(inputs, q, most_tokens, sampled, self._ahead(inputs, q))
            if size >= self._most_rows:
                return
            size = min(2 * size, self._most_rows)

    # --- inputs and graphs -----------------------------------------------------------------------

    def _inputs_of(self, size: int) -> VerifyInputs:
        if size not in self._inputs:
            self._inputs[size] = VerifyInputs(size, self._device)
        return self._inputs[size]

    def _upload(self, inputs: VerifyInputs, rows: Sequence[tuple[int, ...]], step: int) -> None:
        numbers = torch.tensor(inputs.numbers(rows, step), dtype=torch.int64)
        staged = self._pinned[self._uploads % UPLOADS][: numbers.numel()]
        self._uploads += 1
        staged.copy_(numbers)
        inputs.table.copy_(staged, non_blocking=True)

    def _captured(
        self, key: _Key, inputs: VerifyInputs, proposal: Proposal | None
    ) -> tuple[torch.cuda.CUDAGraph, _Found]:
        """Capture a step. What it runs first, to compile and to warm up, is all padding and changes
        nothing."""
        real = inputs.table.clone()
        inputs.table.copy_(torch.tensor(inputs.numbers([], 0)))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._compute(inputs, key.q, key.most, key.sampled, proposal)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            found = self._compute(inputs, key.q, key.most, key.sampled, proposal)
        inputs.table.copy_(real)
        self._programs[key] = graph, found
        log.info("captured a verify step: %s", key)
        return self._programs[key]
