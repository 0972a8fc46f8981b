"""Which rows the next step computes: one per decoding request, the rest a chunk of prompts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvpolicy.engine.request import Request, State
from kvpolicy.memory.segments import Segment


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work. tokens: one per row. wanted: rows whose logits decide a token.

    emits: the request of each wanted row.
    """

    segments: tuple[Segment, ...]
    tokens: tuple[int, ...]
    wanted: tuple[int, ...]
    emits: tuple[Request, ...]


class Scheduler:
    """First come, first served; prompts are computed beside decoding, at most ``prefill_chunk`` rows
    of all prompts together in a step."""

    def __init__(self, max_concurrency: int, prefill_chunk: int) -> None:
        self.max_concurrency = max_concurrency
        self.prefill_chunk = prefill_chunk
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self.waiting.append(request)

    @property
    def next_waiting(self) -> Request | None:
        """The request to admit next, None if there is none or no seat is free."""
        return self.waiting[0] if self.waiting and self.seats_free else None

    @property
    def seats_free(self) -> int:
        """Requests that may still run beside those that do."""
        return self.max_concurrency - len(self.running)

    def start(self, step: int) -> Request:
        """Move the first waiting request to the running ones."""
        request = self.waiting.popleft()
        request.start(step)
        self.running.append(request)
        return request

    def put_back(self, request: Request, step: int) -> None:
        """A preempted request becomes the first of the waiting ones."""
        self.running.remove(request)
        request.put_back(step)
        self.waiting.appendleft(request)

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def batch(self) -> Batch:
        """Rows of the next step (none if nothing runs)."""
        segments: list[Segment] = []
        tokens: list[int] = []
        wanted: list[int] = []
        emits: list[Request] = []
        left = self.prefill_chunk
        for request in self.running:
            decode = request.state is State.DECODE
            count = 1 if decode else min(left, len(request.prompt) - request.computed)
            if count == 0:
                continue
            left -= 0 if decode else count
            start, position = len(tokens), request.computed
            last = not decode and position + count == len(request.prompt)
            segments.append(Segment(request.id, start, count, position, decode, last))
            tokens.extend(request.token_at(position + i) for i in range(count))
            if decode or last:
                wanted.append(start + count - 1)
                emits.append(request)
        return Batch(tuple(segments), tuple(tokens), tuple(wanted), tuple(emits))
