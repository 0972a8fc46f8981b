"""One request: its state, its tokens, its output."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpolicy.config import SamplingParams
from kvpolicy.engine.clock import Clock
from kvpolicy.errors import IntegrityError
from kvpolicy.memory.decode import UNKNOWN
from kvpolicy.telemetry.latency import Latencies

log = logging.getLogger(__name__)

OnToken = Callable[[int, NDArray[np.float32]], None]
"""Called with each token and the logits that decided it, float32 [vocab]; must not keep the row."""


class State(Enum):
    """Life of a request. WAITING -> PREFILL -> DECODE -> FINISHED; any may go to FINISHED.

    A preempted request goes back to WAITING, and from there to where it was.
    """

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


_NEXT = {
    State.WAITING: {State.PREFILL, State.DECODE, State.FINISHED},
    State.PREFILL: {State.DECODE, State.WAITING, State.FINISHED},
    State.DECODE: {State.WAITING, State.FINISHED},
    State.FINISHED: set(),
}


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What a request gave. prompt_tokens: a count. text: without the stop text, bad UTF-8 replaced.

    finish_reason: stop, length, cancelled or error. logits_sha256: over the float32 bytes of the
    logits row that decided each token, in order. latencies: when what happened.
    """

    id: int
    prompt_tokens: int
    tokens: list[int]
    text: str
    finish_reason: str
    logits_sha256: str
    latencies: Latencies = field(compare=False)

    def to_dict(self, fingerprint: bool = False) -> dict[str, Any]:
        """Ready for JSON; the fingerprint only where asked for."""
        values: dict[str, Any] = {
            "id": self.id,
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "text": self.text,
            "finish_reason": self.finish_reason,
        }
        if fingerprint:
            values["logits_sha256"] = self.logits_sha256
        return values


@dataclass(slots=True, eq=False)
class Request:
    """A request inside the engine. context: tokens before the prompt, whose rows nobody computed (see
    ``Engine.submit``). computed: tokens whose rows are committed. issued: tokens that have
    been decided, of which the last may be known to the device only. stops: stop texts.

    waiting_since: engine step at which it came, or was preempted. Times are the clock's seconds:
    arrived, admitted (first time), first_token, last_token; expires: when it is given up. on_token: told of
    each token before the request may finish by it.
    """

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    eos: tuple[int, ...]
    stops: tuple[bytes, ...]
    arrived_step: int
    clock: Clock
    context: int = 0
    arrived: float = 0.0
    state: State = State.WAITING
    admitted_step: int = 0
    waiting_since: int = 0
    longest_wait: int = 0
    preemptions: int = 0
    expires: float | None = None
    computed: int = 0
    issued: int = 0
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    admitted: float | None = None
    waited_steps: int | None = None
    first_token: float | None = None
    last_token: float | None = None
    on_token: OnToken | None = None
    _text: bytearray = field(default_factory=bytearray)
    _digest: Any = field(default_factory=hashlib.sha256)

    def __post_init__(self) -> None:
        self.arrived = self.clock.now()
        self.computed = self.context
        self.waiting_since = self.arrived_step
        if self.params.deadline_ms is not None:
            self.expires = self.arrived + self.params.deadline_ms / 1e3

    @property
    def finished(self) -> bool:
        """Whether it has ended, however."""
        return self.state is State.FINISHED

    def move(self, state: State) -> None:
        """Change state; IntegrityError on a transition that does not exist."""
        if state not in _NEXT[self.state]:
            raise IntegrityError(f"request {self.id}: {self.state.value} -> {state.value}")
        self.state = state

    def start(self, step: int) -> None:
        """From the queue to where it was: its prompt, or its generation."""
        self.move(State.PREFILL if self.computed < self.prompt_end else State.DECODE)
        self.admitted_step = step
        self.longest_wait = max(self.longest_wait, step - self.waiting_since)
        if self.admitted is None:
            self.admitted = self.clock.now()
            self.waited_steps = step - self.arrived_step

    def put_back(self, step: int) -> None:
        """Preempted: back to the queue."""
        self.move(State.WAITING)
        self.waiting_since = step
        self.preemptions += 1

    @property
    def prompt_end(self) -> int:
        """Position behind the prompt's last token."""
        return self.context + len(self.prompt)

    @property
    def prompt_done(self) -> int:
        """Prompt tokens that have been computed."""
        return min(self.computed - self.context, len(self.prompt))

    @property
    def next_tokens(self) -> int:
        """Tokens that must have room for the next step, a whole prompt included."""
        return max(self.prompt_end, self.computed) + 1

    @property
    def max_tokens(self) -> int:
        """Most tokens that can ever be in the context."""
        return self.prompt_end + self.params.max_new_tokens

    def token_at(self, position: int) -> int:
        """Token id at a position of prompt or generation, UNKNOWN where only the device knows it yet."""
        past = position - self.prompt_end
        if past < 0:
            return self.prompt[position - self.context]
        return self.tokens[past] if past < len(self.tokens) else UNKNOWN

    @property
    def tokens_left(self) -> int:
        """Tokens that may still be decided."""
        return self.params.max_new_tokens - self.issued

    @property
    def next_position(self) -> int:
        """Where the token goes that is decided next."""
        return self.prompt_end + self.issued

    def advance(self, rows: int) -> None:
        """``rows`` more rows are committed; the last of a prompt, and each later one, decides a token."""
        self.computed += rows
        if self.state is State.DECODE:
            self.issued += rows
        elif self.state is State.PREFILL and self.computed == self.prompt_end:
            self.move(State.DECODE)
            self.issued += 1

    def take(self, token: int | None, row: NDArray[np.float32]) -> None:
        """Note the next token and the logits that decided it; finish where it ends the request.

        token: None where the logits are not finite (finish_reason error).
        """
        if token is None:
            log.error("request %d ended: its logits are not finite", self.id)
            self.finish("error")
            return
        self._digest.update(row.tobytes())
        self.tokens.append(token)
        self.last_token = self.clock.now()
        if self.first_token is None:
            self.first_token = self.last_token
        if self.on_token is not None:
            self.on_token(token, row)
        if token < 256:
            self._text.append(token)
        if token in self.eos or self._hit_stop():
            self.finish("stop")
        elif len(self.tokens) >= self.params.max_new_tokens:
            self.finish("length")

    def _hit_stop(self) -> bool:
        """Cut the text where a stop text has just been completed."""
        ends = [s for s in self.stops if self._text.endswith(s)]
        if ends:
            del self._text[-max(len(s) for s in ends) :]
        return bool(ends)

    def finish(self, reason: str) -> None:
        """End the request. Memory is the engine's to free."""
        self.move(State.FINISHED)
        self.finish_reason = reason

    @property
    def latencies(self) -> Latencies:
        """What has happened so far, and when."""
        return Latencies(
            arrived=self.arrived,
            admitted=self.admitted,
            first_token=self.first_token,
            last_token=self.last_token,
            waited_steps=self.waited_steps,
            tokens=len(self.tokens),
        )

    def output(self) -> RequestOutput:
        """The output as of now (final once the request has finished)."""
        return RequestOutput(
            id=self.id,
            prompt_tokens=len(self.prompt),
            tokens=list(self.tokens),
            text=self._text.decode("utf-8", errors="replace"),
            finish_reason=self.finish_reason,
            logits_sha256=self._digest.hexdigest(),
            latencies=self.latencies,
        )
