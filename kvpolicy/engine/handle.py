"""A caller's end of one request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvpolicy.engine.request import Request, RequestOutput
from kvpolicy.errors import IntegrityError
from kvpolicy.telemetry.latency import Latencies


class RequestHandle:
    """Tokens of one request as they come. Iterating drives the engine (and all its other requests)."""

    def __init__(
        self, request: Request, step: Callable[[], bool], cancel: Callable[[Request], None]
    ) -> None:
        self._request = request
        self._step = step
        self._cancel = cancel

    @property
    def id(self) -> int:
        return self._request.id

    @property
    def done(self) -> bool:
        """Whether the request has ended, for whatever reason."""
        return self._request.finished

    @property
    def tokens(self) -> Sequence[int]:
        """Those made so far; not to be changed."""
        return self._request.tokens

    @property
    def latencies(self) -> Latencies:
        """What has happened to it so far, and when."""
        return self._request.latencies

    def output(self) -> RequestOutput:
        """The output as it is now, without driving the engine."""
        return self._request.output()

    def cancel(self) -> None:
        """End the request now and free its memory; tokens made so far stay readable."""
        self._cancel(self._request)

    def __iter__(self) -> Iterator[int]:
        given = 0
        while True:
            while given < len(self._request.tokens):
                yield self._request.tokens[given]
                given += 1
            if self.done:
                return
            if not self._step() and not self.done:
                raise IntegrityError(f"request {self.id} is neither running nor waiting")

    def result(self) -> RequestOutput:
        """Run until the request has ended; its output."""
        for _ in self:
            pass
        return self._request.output()


class TokenStream:
    """The tokens of one request, which ends with the stream: exhausted, closed or dropped, also
    before its first token (a generator that never started would run no ``finally``)."""

    def __init__(self, handle: RequestHandle) -> None:
        self._handle = handle
        self._tokens = iter(handle)

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        return next(self._tokens)

    def close(self) -> None:
        """Cancel the request, if it is not done; a second call does nothing."""
        self._handle.cancel()
        self._tokens = iter(())

    def __del__(self) -> None:
        self.close()
