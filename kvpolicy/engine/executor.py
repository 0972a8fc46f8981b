"""Runs a step's work on the device, and reads its tokens now or a step later."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvpolicy.engine.decoding import Decoder
from kvpolicy.engine.request import Request
from kvpolicy.engine.sampler import DeviceSampler
from kvpolicy.engine.scheduler import Batch, Rows
from kvpolicy.engine.speculation import Drafts, Speculator, Verdict
from kvpolicy.engine.verifying import VerifyDecoder
from kvpolicy.kernels.paging import upload
from kvpolicy.memory.hierarchy import Hierarchy
from kvpolicy.memory.transfer import ToHost
from kvpolicy.models.loader import DecodeModel, on_device_only
from kvpolicy.sampling import choose_token

Logits = NDArray[np.float32]
Token = tuple[Request, int | None, Logits]
"""Whose it is, the token (None where its logits are not finite), the logits that decided it."""


@dataclass(slots=True)
class _Emitted:
    """Tokens of some requests that a step decided. seats: where each sat. found: None where the host
    chooses, from logits [n, V]; else (token, finite) of all seats."""

    requests: tuple[Request, ...]
    seats: list[int]
    logits: ToHost
    found: ToHost | None

    def read(self) -> Iterator[Token]:
        found = None if self.found is None else self.found.read().tolist()
        rows = self.logits.read().numpy()
        for i, request in enumerate(self.requests):
            seat = None if found is None else found[self.seats[i]]
            yield request, self._token(request, seat, rows[i]), rows[i]

    def _token(self, request: Request, found: list[int] | None, row: Logits) -> int | None:
        if found is not None:
            return found[0] if found[1] else None
        if not np.isfinite(row).all():
            return None
        return choose_token(row, request.params, request.prompt_end + len(request.tokens))


@dataclass(frozen=True, slots=True)
class _Verified:
    """Tokens that a verify step has decided, each with its row of logits [n, V]."""

    tokens: tuple[tuple[Request, int, int], ...]
    logits: ToHost

    def read(self) -> Iterator[Token]:
        rows = self.logits.read().numpy()
        for request, token, row in self.tokens:
            yield request, token if np.isfinite(rows[row]).all() else None, rows[row]


class Launched:
    """A step that has been launched; its tokens can be read once it is done. waited: seconds that the
    host waited for the device then."""

    def __init__(self) -> None:
        self.waited = 0.0
        self._emitted: list[_Emitted | _Verified] = []

    def add(self, emitted: _Emitted | _Verified) -> None:
        self._emitted.append(emitted)

    def tokens(self) -> Iterator[Token]:
        """Wait for the step; what it decided."""
        for emitted in self._emitted:
            start = time.perf_counter()
            emitted.logits.read()  # it was sent last: then all is there
            self.waited += time.perf_counter() - start
            yield from emitted.read()


class Executor:
    """Decode rows go through the Decoder, prompts through a step of their own; where staging could not
    hold what the decode rows miss, or the model needs host numbers, all rows go through one such step.

    capture: decode rows as CUDA graphs. Tokens are chosen on the device by the Triton backend there.
    speculator: with one, decode rows bring rows that verify what it drafts.
    """

    def __init__(
        self,
        model: DecodeModel,
        memory: Hierarchy,
        seats: int,
        graphs: bool,
        speculator: Speculator | None = None,
    ) -> None:
        self.model, self.memory = model, memory
        self._device = memory.arena.device
        on_device = self._device.type == "cuda" and model.backend == "triton"
        self.sampler = DeviceSampler(seats, self._device) if on_device else None
        self.speculator = speculator
        self.decoder: Decoder | None = None
        self.verifier: VerifyDecoder | None = None
        if on_device_only(model) and speculator is not None:
            capture = graphs and on_device
            self.verifier = VerifyDecoder(model, memory, speculator, seats, capture)
        elif on_device_only(model):
            capture = graphs and on_device
            self.decoder = Decoder(model, memory, self.sampler, seats, capture)

    @property
    def runs_ahead(self) -> bool:
        """Whether a step can be launched before the tokens of the last one have been read."""
        return self.sampler is not None and self.speculator is None

    def close(self) -> None:
        """Drop captured graphs and what they hold. Nothing may run any more."""
        self.decoder = self.verifier = None

    def launch(self, batch: Batch, step: int) -> Launched:
        """Compute and commit a step's rows, and decide their tokens."""
        launched = Launched()
        decode, rest = batch.decode, batch.prompts
        if self.sampler is not None:
            self._seat([*decode, *(request for request, _ in rest)])
        if self.speculator is not None:
            self._speculate(self.speculator, batch, step, launched)
            return launched
        decoder = self.decoder
        if decode and decoder is not None and self.memory.decodes_at_once(len(decode)):
            logits = decoder.run(decode, step)
            launched.add(self._emit(decode, logits))
        else:
            rest = (*((request, 1) for request in decode), *rest)
        if rest:
            self._host_step(Rows.of(rest), step, launched)
        for request, count in (*((r, 1) for r in decode), *batch.prompts):
            request.advance(count)
        return launched

    def _seat(self, requests: Sequence[Request]) -> None:
        assert self.sampler is not None
        for request in requests:
            seat = self.memory.requests[request.id].seat
            self.sampler.seat(seat, request.id, request.params)

    def _host_step(self, rows: Rows, step: int, launched: Launched) -> None:
        """A step whose shape the host knows row by row."""
        memory = self.memory.begin_step(rows.segments, step)
        numbers = upload([*rows.tokens, *rows.wanted], self._device)
        tokens, wanted = numbers[: len(rows.tokens)], numbers[len(rows.tokens) :]
        if self.sampler is not None:
            tokens = self.sampler.tokens_of(memory.numbers.seat, tokens)
        logits = self.model.forward(tokens, memory, wanted)
        self.memory.commit(memory, [segment.count for segment in rows.segments])
        if rows.emits:
            launched.add(self._chosen(rows.emits, logits))

    def _speculate(
        self, speculator: Speculator, batch: Batch, step: int, launched: Launched
    ) -> None:
        verifier = self.verifier
        if batch.decode and verifier is not None and verifier.fits(batch.decode):
            answer = verifier.run(batch.decode, step)
            launched.add(_Verified(answer.tokens, answer.logits))
            for request, count in zip(batch.decode, answer.counts, strict=True):
                request.advance(count)
            batch = Batch((), batch.prompts)
        if batch:
            self._verify_step(speculator, batch, step, launched)

    def _verify_step(
        self, speculator: Speculator, batch: Batch, step: int, launched: Launched
    ) -> None:
        """Draft, compute the rows of all anchors and drafts beside those of prompts, accept, and commit what
        was accepted. Waits for the device."""
        decode = batch.decode
        drafts = speculator.draft(decode, self.memory) if decode else None
        started = time.perf_counter()
        lengths = drafts.lengths if drafts else ()
        work = [*((r, 1 + n) for r, n in zip(decode, lengths, strict=True)), *batch.prompts]
        rows = Rows.of(work)
        memory = self.memory.begin_step(rows.segments, step)
        numbers = upload([*rows.tokens, *rows.wanted], self._device)
        tokens, wanted = numbers[: len(rows.tokens)], numbers[len(rows.tokens) :]
        if drafts:
            tokens = drafts.fill(tokens, rows)
        logits, taps = speculator.forward(tokens, memory, wanted)
        counts = [count for _, count in work]
        verified = sum(1 + length for length in lengths)
        if drafts:
            verdict = speculator.verify(logits[:verified], drafts)
            counts[: len(decode)] = [1 + accepted for accepted in verdict.accepted]
            launched.add(_verified(drafts, verdict, logits[:verified]))
        self.memory.commit(memory, counts)
        speculator.keep(taps, memory, [request for request, _ in work], counts)
        if rows.emits[verified:]:
            launched.add(self._chosen(rows.emits[verified:], logits[verified:]))
        for (request, _), count in zip(work, counts, strict=True):
            request.advance(count)
        if drafts:
            took = time.perf_counter() - started
            speculator.counts.verify_seconds += took
            if not batch.prompts:  # else the time is that of their rows too
                took, kept = took + drafts.seconds, counts[: len(decode)]
                speculator.timed(drafts.proposal.width, verified, kept, took, ragged=True)

    def _chosen(self, requests: tuple[Request, ...], logits: Tensor) -> _Emitted:
        """Choose a token from each row of logits."""
        if self.sampler is not None:
            seats = [self.memory.requests[request.id].seat for request in requests]
            positions = [request.next_position for request in requests]
            sampled = any(request.params.temperature > 0.0 for request in requests)
            self.sampler.choose_for(logits, seats, positions, sampled)
        return self._emit(requests, logits)

    def _emit(self, requests: tuple[Request, ...], logits: Tensor) -> _Emitted:
        """Send tokens and logits on their way to the host."""
        seats = [self.memory.requests[request.id].seat for request in requests]
        found = None if self.sampler is None else ToHost(self.sampler.found)
        return _Emitted(requests, seats, ToHost(logits), found)


def _verified(drafts: Drafts, verdict: Verdict, logits: Tensor) -> _Verified:
    tokens: list[tuple[Request, int, int]] = []
    start = 0
    for request, length, found in zip(drafts.requests, drafts.lengths, verdict.tokens, strict=True):
        tokens += [(request, token, start + i) for i, token in enumerate(found)]
        start += 1 + length
    return _Verified(tuple(tokens), ToHost(logits))
