"""What goes between an engine and a controller's process: JSON in frames, over a socket.

Plain data only, both ways: nothing that arrives can run code. A frame is its length (4 bytes, big
endian) and one JSON value. Records travel as lists of their fields in order.
"""

from __future__ import annotations

import json
import math
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import fields
from itertools import islice
from operator import attrgetter
from typing import Any

from kvpolicy.control.observation import MissCurve, Observation, RequestView, StoreView
from kvpolicy.control.plan import Plan
from kvpolicy.control.reading import UnreadablePlan, read
from kvpolicy.controllers.answer import Failure

_HEAD = 4


class Garbled(Exception):
    """The other side sent what it never sends by itself."""


class Channel:
    """One end of a connection. Nothing blocks beyond the moment it is given: ``until`` is a time of
    time.perf_counter, None for ever. most_bytes: of a message that may come (reading 1 MiB of JSON takes
    10 ms).

    Raises EOFError where the other end is closed, Garbled for a frame that is none.
    """

    def __init__(self, end: socket.socket, most_bytes: int) -> None:
        end.setblocking(False)
        self.most_bytes = most_bytes
        self._end = end
        self._poll = select.poll()  # no select: it knows 1,024 files at most
        self._out = b""
        self._in = bytearray()

    @property
    def unsent(self) -> int:
        """Bytes that the other end has not taken yet."""
        return len(self._out)

    def send(self, message: object, until: float | None = None) -> bool:
        """Send a message, or as much of it as goes until then; :meth:`flush` sends the rest."""
        body = json.dumps(message, default=_flat, separators=(",", ":")).encode()
        self._out += len(body).to_bytes(_HEAD, "big") + body
        return self.flush(until)

    def flush(self, until: float | None = None) -> bool:
        """Whether everything is sent by then."""
        while self._out:
            try:
                self._out = self._out[self._end.send(self._out) :]
            except BlockingIOError:
                if not self._wait(select.POLLOUT, until):
                    return False
            except OSError as error:
                raise EOFError from error
        return True

    def receive(self, until: float | None = None) -> Any:
        """The next message, or None if it is not there by then."""
        while True:
            if len(self._in) >= _HEAD:
                size = int.from_bytes(self._in[:_HEAD], "big")
                if size > self.most_bytes:
                    raise Garbled(f"a message of {size} bytes")
                if len(self._in) >= _HEAD + size:
                    body = bytes(self._in[_HEAD : _HEAD + size])
                    del self._in[: _HEAD + size]
                    return _parsed(body)
            if not self._wait(select.POLLIN, until):
                return None
            try:
                new = self._end.recv(1 << 16)
            except BlockingIOError:
                continue
            except OSError as error:
                raise EOFError from error
            if not new:
                raise EOFError
            self._in += new

    def _wait(self, event: int, until: float | None) -> bool:
        left = None if until is None else max(0.0, until - time.perf_counter())
        self._poll.register(self._end, event)
        # Whole milliseconds, rounded up: that much may be added to a deadline.
        return bool(self._poll.poll(None if left is None else math.ceil(left * 1e3)))


def _parsed(body: bytes) -> Any:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Garbled(f"no JSON: {error}") from None
    if value is None:
        raise Garbled("nothing")
    return value


# --- records as lists -----------------------------------------------------------------------------


def _names(kind: type) -> list[str]:
    return [field.name for field in fields(kind)]


_OBSERVATION = _names(Observation)
_FLAT = {
    kind: attrgetter(*_names(kind)) for kind in (Observation, RequestView, StoreView, MissCurve)
}
_PARTS: dict[str, type] = {"stores": StoreView, "requests": RequestView, "curves": MissCurve}


def _flat(value: Any) -> Any:
    """A record as the values of its fields, a scalar of numpy as Python's own."""
    get = _FLAT.get(type(value))
    return value.item() if get is None else get(value)


def _record(kind: type, values: Sequence[Any]) -> Any:
    return kind(*[tuple(value) if type(value) is list else value for value in values])


def stores_of(values: Any) -> tuple[StoreView, ...]:
    """Stores as they were sent."""
    return tuple(_record(StoreView, one) for one in values)


def observation_of(values: Any) -> Observation:
    """An observation as it was sent: equal to it in every field."""
    named = dict(zip(_OBSERVATION, values, strict=True))
    for name, kind in _PARTS.items():
        named[name] = [_record(kind, one) for one in named[name]]
    return _record(Observation, list(named.values()))  # type: ignore[no-any-return]


def reply_to(found: Plan | Failure, observation: Observation) -> list[Any]:
    """An answer to send. Of requests that do not run one is kept, for the projection to name."""
    if isinstance(found, Failure):
        return [found.kind, found.text]
    running = {request.request_id for request in observation.requests}
    targets = {i: target for i, target in found.targets.items() if i in running}
    targets.update(islice(((i, t) for i, t in found.targets.items() if i not in running), 1))
    others = (found.default, found.reserve_rows, found.reserve_bytes, found.draft_tokens)
    return [list(targets.items()), *others]


def most_bytes(observation: Observation) -> int:
    """Bytes that a reply takes at most: 25 a number, and the text of a failure."""
    return 4096 + 25 * (len(observation.requests) + 2) * (len(observation.stores) + 3)


def answer_of(reply: Any, stores: int) -> Plan | Failure:
    """An answer that came, checked: the sender is not to be trusted. Garbled for anything else."""
    match reply:
        case ["raised" | "type" | "number" as kind, str(text)]:
            return Failure(kind, text[:400])
        case [list(pairs), default, rows, size, draft]:
            try:
                targets = {key: target for key, target in pairs}
                return read(Plan(targets, default, rows, size, draft), stores)
            except (TypeError, ValueError, UnreadablePlan) as error:
                raise Garbled(f"no plan: {error}") from None
    raise Garbled("no answer")
