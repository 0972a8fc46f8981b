"""Which rows the next step computes: one per decoding request, the rest a chunk of prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvpolicy.engine.request import Request, State
from kvpolicy.memory.segments import Segment


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work. decode: requests that compute one row each. prompts: others, and how many rows
    of their prompts each computes."""

    decode: tuple[Request, ...]
    prompts: tuple[tuple[Request, int], ...]

    def __bool__(self) -> bool:
        return bool(self.decode or self.prompts)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one step, segment by segment. tokens: one per row. wanted: rows whose logits decide a
    token, of a generation all. emits: the request of each wanted row."""

    segments: tuple[Segment, ...]
    tokens: tuple[int, ...]
    wanted: tuple[int, ...]
    emits: tuple[Request, ...]

    @classmethod
    def of(cls, work: Iterable[tuple[Request, int]]) -> Rows:
        """The next ``count`` rows of each request; tokens that nobody has decided yet are UNKNOWN."""
        segments: list[Segment] = []
        tokens: list[int] = []
        wanted: list[int] = []
        emits: list[Request] = []
        for request, count in work:
            start, position = len(tokens), request.computed
            decode = request.state is State.DECODE
            last = not decode and position + count == request.prompt_end
            segments.append(Segment(request.id, start, count, position, decode, last))
            tokens.extend(request.token_at(position + i) for i in range(count))
            if decode or last:
                own = range(start if decode else start + count - 1, start + count)
                wanted.extend(own)
                emits.extend([request] * len(own))
        return cls(tuple(segments), tuple(tokens), tuple(wanted), tuple(emits))


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
        """The next step's work (none if nothing runs). A request all of whose tokens are decided waits
        for them to be read."""
        decode: list[Request] = []
        prompts: list[tuple[Request, int]] = []
        left = self.prefill_chunk
        for request in self.running:
            if request.state is State.DECODE:
                if request.issued < request.params.max_new_tokens:
                    decode.append(request)
            elif count := min(left, request.prompt_end - request.computed):
                left -= count
                prompts.append((request, count))
        return Batch(tuple(decode), tuple(prompts))
