"""Sends an answer while it is made, and lets go of the request when its client does."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from kvpolicy.serving.answers import Answer, error_event
from kvpolicy.serving.calls import Call
from kvpolicy.serving.errors import ApiError
from kvpolicy.serving.link import Submission

__all__ = ["Delivery", "Outcome", "error_response"]

log = logging.getLogger(__name__)

# A document goes in pieces, so that a client which takes none is told from one that is slow.
_PIECE = 1 << 16
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended. what: ``done``, ``disconnected``, ``stalled``, ``cancelled``, or the code of an
    error."""

    what: str
    status: int


class _Stalled(Exception):
    """The client takes no more."""


def error_response(error: ApiError) -> Response:
    """An error before anything of an answer was sent."""
    return Response(
        json.dumps(error.body()),
        status_code=error.status,
        headers=error.headers,
        media_type="application/json",
    )


class Delivery(Response):
    """The answer of one call. abort: cuts a connection off without waiting for it.

    The client's leaving, its not reading, and an error all end with the submission closed: what runs of
    it is cancelled and its memory freed. on_end is called once.
    """

    def __init__(
        self,
        call: Call,
        model: str,
        submission: Submission,
        stall_seconds: float,
        abort: Callable[[Scope], None],
        on_end: Callable[[Outcome], None],
    ) -> None:
        super().__init__()
        self._call = call
        self._answer = Answer(call, model)
        self._submission = submission
        self._stall = stall_seconds
        self._abort = abort
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome = Outcome("cancelled", 0)
        gone = asyncio.ensure_future(_disconnected(receive))
        work = asyncio.ensure_future(self._work(scope, receive, send))
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            outcome = work.result() if work.done() else Outcome("disconnected", 499)
        except _Stalled:
            outcome = Outcome("stalled", 499)
            self._abort(scope)
        finally:
            for task in (gone, work):
                task.cancel()
            self._submission.close()
            self._on_end(outcome)

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> Outcome:
        try:
            await self._submission.accepted()
            if not self._call.stream:
                return await self._document(send)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return Outcome(error.code or "error", error.status)
        return await self._stream(send)

    async def _document(self, send: Send) -> Outcome:
        group = self._submission
        while not group.done:
            await group.change()
        body = json.dumps(self._answer.document(group.choices)).encode()
        length = (b"content-length", str(len(body)).encode())
        await self._send(send, _start(length, (b"content-type", b"application/json")))
        for at in range(0, len(body), _PIECE):
            more = at + _PIECE < len(body)
            piece = body[at : at + _PIECE]
            await self._send(send, {**_BODY, "body": piece, "more_body": more})
        return Outcome("done", 200)

    async def _stream(self, send: Send) -> Outcome:
        group, answer = self._submission, self._answer
        await self._send(send, _start(*_EVENTS))
        outcome = Outcome("done", 200)
        try:
            while not group.done:
                await group.change()
                if body := answer.events(group.choices):
                    await self._send(send, {**_BODY, "body": body})
            # All that was left came with the last end.
            rest = answer.events(group.choices) + answer.last()
        except ApiError as error:
            rest = error_event(error)
            outcome = Outcome(error.code or "error", error.status)
        await self._send(send, {**_BODY, "body": rest, "more_body": False})
        return outcome

    async def _send(self, send: Send, message: Message) -> None:
        try:
            async with asyncio.timeout(self._stall):
                await send(message)
        except TimeoutError:
            raise _Stalled from None


_BODY: Message = {"type": "http.response.body", "more_body": True}


def _start(*headers: tuple[bytes, bytes]) -> Message:
    return {"type": "http.response.start", "status": 200, "headers": list(headers)}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
