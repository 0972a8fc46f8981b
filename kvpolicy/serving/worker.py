"""The process of the engine: takes requests from a socket, steps, and sends back what became of them.

Started by :mod:`kvpolicy.serving.process`. JSON in frames both ways (:mod:`kvpolicy.controllers.wire`):
nothing that arrives can run code. It ends when the other side hangs up.

Messages that come are ``[what, ...]``: submit, cancel, policy, status. Each frame that goes is one record,
of which only these keys are sent that have something to say:

    accepted   ids of requests that were queued
    refused    [id, kind, tier, text] of those that were not
    tokens     [id, [token, ...]] of streamed requests: what is new
    logprobs   [id, logprob, [[token, logprob], ...]] of each such token where asked for
    ended      [id, reason, record], record: the tokens that were not sent, and what was asked for besides
    load       [running, waiting, what keeps the first one waiting]
    replies    [number, error or null, record] to policy and status
    sample     the engine's numbers at this moment
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpolicy.config import EngineConfig, SamplingParams
from kvpolicy.controllers.wire import Channel
from kvpolicy.engine.engine import Engine
from kvpolicy.engine.handle import RequestHandle
from kvpolicy.errors import CapacityError, IntegrityError, UserError, reason
from kvpolicy.serving.events import EventLog
from kvpolicy.shadows.watcher import Shadows

log = logging.getLogger(__name__)

# Tokens of faster steps share a frame, and an event of each stream: a frame of 64 streams costs the engine
# some 80 us, an event server and client some 30 each, and nobody reads 100 events a second. What is urgent
# (the first token of a request, its end) goes at once, alone.
FLUSH_SECONDS = 0.01
# An idle engine looks up this often, to send a sample if one is due; else it is silent.
IDLE_SECONDS = 0.25
# With this much unread by the other side the engine waits for it.
MOST_UNREAD = 4 << 20
# Messages taken between two steps, so that a flood of them cannot hold up what runs.
MOST_MESSAGES = 512
# A frame from the server: a body is at most 1 GiB by its settings.
MOST_BYTES = 1 << 31


def main(descriptor: int) -> None:
    """Serve over the socket of this number."""
    # Signals to the group of processes are the server's: it drains, then hangs up.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=descriptor), most_bytes=MOST_BYTES)
    with contextlib.suppress(EOFError):
        start = channel.receive()
        logging.basicConfig(level=start["log_level"], format=start["log_format"])
        with contextlib.ExitStack() as stack:
            try:
                engine = stack.enter_context(Engine(EngineConfig(**start["config"])))
                shadows = _shadows(engine, start["shadows"], stack)
            except UserError as error:
                channel.send({"error": str(error)})
                return
            engine.prepare(sampled=True)
            channel.send({"ready": about(engine)})
            log_of = EventLog(engine, start["logdir"], start["first_step"], shadows)
            events = stack.enter_context(log_of)
            Worker(engine, channel, events, start["sample_seconds"], shadows).run()


def _shadows(engine: Engine, specs: list[str], stack: contextlib.ExitStack) -> Shadows | None:
    """The shadow controllers of these specs; nobody pays for none."""
    return stack.enter_context(Shadows(engine, specs)) if specs else None


def about(engine: Engine) -> dict[str, Any]:
    """What the server must know of the model, and the run record."""
    model = engine.model
    return {
        "vocab": model.vocab,
        "bos": model.bos if engine.config.bos else None,
        "eos": list(model.eos),
        "max_context": model.geometry.max_context,
        "record": engine.record(),
    }


class _Live:
    """A request that has not ended. handle: set once it is queued. stream: its tokens are sent as they
    come. top: how many of the likeliest tokens go with each, None for no logprobs."""

    handle: RequestHandle

    def __init__(self, worker: Worker, number: int, wants: dict[str, Any]) -> None:
        self.number = number
        self.stream: bool = wants["stream"]
        self.fingerprint: bool = wants["fingerprint"]
        self.top: int | None = wants["logprobs"]
        self.logprobs: list[Any] = []  # not sent yet
        self.cancelled = False
        self._sent = 0
        self._begun = False
        self._worker = worker

    def note(self, token: int, row: NDArray[np.float32]) -> None:
        """Called by the engine with each token. A microsecond here is 3 % of a step of 2 ms with 64
        requests."""
        if self.top is not None:
            self.logprobs.append(logprobs_of(row, token, self.top))
        if not self._begun:
            self._begun = True
            self._worker.begin(self)

    def fresh(self) -> list[int]:
        """Tokens that were not sent yet; now they count as sent."""
        made = self.handle.tokens
        new = list(made[self._sent :])
        self._sent = len(made)
        return new


class Worker:
    """Steps an engine for the other end of a channel, until that hangs up."""

    def __init__(
        self,
        engine: Engine,
        channel: Channel,
        events: EventLog,
        sample_seconds: float,
        shadows: Shadows | None = None,
    ) -> None:
        self._engine = engine
        self._shadows = shadows
        self._channel = channel
        self._events = events
        self._sample_seconds = sample_seconds
        self._live: dict[int, _Live] = {}
        self._streams: dict[int, _Live] = {}  # of these, those to be streamed that have a token
        self._frame: dict[str, Any] = {}
        self._urgent = False  # what is in the frame should go at once
        self._hurried: list[_Live] = []  # and so should the tokens of these
        self._finished = 0
        self._sent = self._sampled = 0.0
        self._load: list[Any] = []

    def run(self) -> None:
        """Until EOFError: the server has closed, or is gone."""
        while True:
            self._take()
            if self._live:
                worked = self._engine.step()
                self._collect()
                if not worked and self._live:
                    raise IntegrityError(f"{len(self._live)} requests neither run nor wait")
            self._report()

    # --- messages --------------------------------------------------------------------------------

    def _take(self) -> None:
        """Act on what has come; without work, wait for it a little."""
        now = time.perf_counter()
        message = self._channel.receive(now if self._live else now + IDLE_SECONDS)
        for _ in range(MOST_MESSAGES):
            if message is None:
                return
            self._act(message)
            message = self._channel.receive(time.perf_counter())
        if message is not None:
            self._act(message)

    def _act(self, message: list[Any]) -> None:
        match message:
            case ["submit", number, prompt, params, wants]:
                self._submit(number, prompt, params, wants)
            case ["cancel", number]:
                self._cancel(number)
            case ["policy", number, settings, origin]:
                self._reply(number, *self._set_policy(settings, origin))
            case ["status", number]:
                self._reply(number, None, self._sample())
            case _:
                log.error("a message that is none: %.200r", message)

    def _reply(self, number: int, error: str | None, record: dict[str, Any]) -> None:
        self._frame.setdefault("replies", []).append([number, error, record])
        self._urgent = True

    def _submit(
        self, number: int, prompt: str | list[int], params: dict[str, Any], wants: dict[str, Any]
    ) -> None:
        """prompt: bytes as text of their code points, or token ids."""
        self._urgent = True
        raw = prompt.encode("latin-1") if isinstance(prompt, str) else prompt
        live = _Live(self, number, wants)
        note = live.note if live.stream or live.top is not None else None
        try:
            live.handle = self._engine.submit(raw, SamplingParams(**params), on_token=note)
        except CapacityError as error:
            refusal = [number, "capacity", error.tier, str(error)]
            self._frame.setdefault("refused", []).append(refusal)
        except UserError as error:
            self._frame.setdefault("refused", []).append([number, "invalid", "", str(error)])
        else:
            self._live[number] = live
            self._frame.setdefault("accepted", []).append(number)

    def begin(self, live: _Live) -> None:
        """A request has its first token, which goes at once if it is to be streamed."""
        if live.stream:
            self._streams[live.number] = live
            self._hurried.append(live)
            self._urgent = True

    def _cancel(self, number: int) -> None:
        live = self._live.get(number)
        if live is not None:
            live.cancelled = True
            live.handle.cancel()
            self._end(number, live)

    def _set_policy(
        self, settings: dict[str, Any], origin: str
    ) -> tuple[str | None, dict[str, Any]]:
        """Take over a policy, or say why not: then the old one stays."""
        config = self._engine.config
        try:
            new = EngineConfig(**{**config.model_dump(by_alias=True), **settings})
            changed = self._engine.reload(new).names
        except UserError as error:
            log.warning("%s: the policy stays as it is: %s", origin, error)
            self._events.note(f"{origin}: refused: {error}")
            return str(error), {}
        new_policy = {name: getattr(self._engine.config, name) for name in settings}
        log.info("%s: policy %s (changed: %s)", origin, new_policy, ", ".join(changed) or "nothing")
        self._events.note(f"{origin}: {new_policy}")
        return None, {"changed": list(changed), "step": self._engine.steps}

    # --- results ---------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Note what has ended."""
        finished = self._engine.totals.finished
        if finished == self._finished:
            return
        self._finished = finished
        for number, live in list(self._live.items()):
            if live.handle.done:
                self._end(number, live)

    def _end(self, number: int, live: _Live) -> None:
        del self._live[number]
        self._streams.pop(number, None)
        output = live.handle.output()
        why = output.finish_reason
        if why == "cancelled" and not live.cancelled:
            why = "deadline"
        latencies = output.latencies
        record: dict[str, Any] = {
            "count": len(output.tokens),
            "ttft": latencies.ttft,
            "tpot": latencies.tpot,
            "tokens": live.fresh(),
        }
        if live.fingerprint:
            record["logits_sha256"] = output.logits_sha256
        self._add_logprobs(live)
        self._frame.setdefault("ended", []).append([number, why, record])
        self._urgent = True

    def _add_logprobs(self, live: _Live) -> None:
        if live.logprobs:
            rows = self._frame.setdefault("logprobs", [])
            rows += ([live.number, *row] for row in live.logprobs)
            live.logprobs.clear()

    def _report(self) -> None:
        """Send what there is to say, if it is urgent or has waited for a moment."""
        now = time.perf_counter()
        due = now - self._sent >= FLUSH_SECONDS
        if now - self._sampled >= self._sample_seconds:
            self._frame["sample"] = self._sample()
            self._events.add(self._frame["sample"])
            self._sampled = now
        elif not self._urgent and not (self._streams and due):
            return
        if due:
            self._sent = now
        self._add_tokens(self._streams.values() if due else self._hurried)
        scheduler, binding = self._engine.scheduler, self._engine.residents.binding
        load = [len(scheduler.running), len(scheduler.waiting), binding]
        if load != self._load:
            self._frame["load"] = self._load = load
        frame, self._frame = self._frame, {}
        self._urgent = False
        self._hurried.clear()
        if frame:
            unread = self._channel.unsent > MOST_UNREAD
            self._channel.send(frame, None if unread else now)

    def _add_tokens(self, lives: Iterable[_Live]) -> None:
        """What is new of these requests, and its logprobs. Those that have ended have sent all."""
        tokens = [[live.number, new] for live in lives if (new := live.fresh())]
        if tokens:
            self._frame["tokens"] = tokens
        for live in lives:
            self._add_logprobs(live)

    def _sample(self) -> dict[str, Any]:
        """The engine's numbers, ready for JSON."""
        engine = self._engine
        memory, control, totals = engine.memory, engine.control, engine.totals
        sample = asdict(engine.sample())
        usage = memory.usage()
        return {
            **sample,
            **{f"memory_{name}_bytes": value for name, value in asdict(usage).items()},
            "device_to_host_bytes": memory.counters.device_to_host_bytes,
            "release_steps": memory.counters.release_steps,
            "request_waves": memory.counters.request_waves,
            "shortages": memory.counters.shortages,
            "decisions": control.decisions,
            "projections": control.projections,
            "fallbacks": control.fallbacks,
            "expired": totals.expired,
            "deferred": dict(totals.deferred),
            "reduced_admissions": totals.reduced_admissions,
            "binding": engine.residents.binding,
            "accepted_length": engine.speculator.counts.accepted_length
            if engine.speculator
            else None,
            "shadows": self._shadows_of(sample),
        }

    def _shadows_of(self, sample: dict[str, Any]) -> list[dict[str, Any]]:
        """What each shadow would have fetched of the same rows."""
        if self._shadows is None:
            return []
        pairs = zip(self._shadows.policies, self._shadows.samples(sample), strict=True)
        names = ("unique_rows", "fetched_rows", "optional_bytes")
        return [{"name": p.name, **{name: own[name] for name in names}} for p, own in pairs]


def logprobs_of(row: NDArray[np.float32], token: int, top: int) -> list[Any]:
    """Natural log of the model's probability of a token, and the ``top`` likeliest tokens with theirs
    (ties to the lowest id). row: float32 [vocab], finite; before temperature and top-p."""
    logits = row.astype(np.float64)
    logits -= logits.max()
    logits -= np.log(np.exp(logits).sum())
    best = np.argsort(-logits, kind="stable")[:top]
    return [float(logits[token]), [[int(i), float(logits[i])] for i in best]]


def run(descriptor: int) -> None:
    """As :func:`main`, with what ends it in the log."""
    try:
        main(descriptor)
    except Exception as error:
        log.exception("the engine's process ends: %s", reason(error))
        raise SystemExit(1) from None
