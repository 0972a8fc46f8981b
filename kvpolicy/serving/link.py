"""The server's link to its engine: requests go in, tokens come out, a dead engine is replaced."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvpolicy.errors import UserError
from kvpolicy.serving.errors import ApiError, bad_request, overloaded, unavailable
from kvpolicy.serving.process import EngineProcess, Gone
from kvpolicy.serving.settings import ServerSettings

__all__ = ["Choice", "EngineLink", "Job", "Submission"]

log = logging.getLogger(__name__)

# Before an engine that ended is started again: this, doubled each time it ends before it was ready.
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0
# A controller in a file has 20 s to be made (kvpolicy.controllers.process).
REPLY_SECONDS = 30.0
# Requests whose ends say how fast places get free.
RECENT = 32


@dataclass(frozen=True, slots=True)
class Job:
    """One request for the engine. prompt: bytes as text of their code points, or token ids. params: of
    SamplingParams. logprobs: how many of the likeliest tokens to tell beside each, None for nothing."""

    prompt: str | list[int]
    params: Mapping[str, Any]
    logprobs: int | None = None
    fingerprint: bool = False


@dataclass(slots=True, eq=False)
class Choice:
    """What has come of one job and was not read yet, and how it ended.

    logprobs: per token, [logprob, [[token, logprob], ...]]. reason: of the end, or empty. record: of the
    end, see :mod:`kvpolicy.serving.worker`.
    """

    number: int
    group: Submission
    accepted: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[list[Any]] = field(default_factory=list)
    reason: str = ""
    record: dict[str, Any] = field(default_factory=dict)


class Submission:
    """The jobs of one call. error: why all of them ended; set once. arrived: time.perf_counter."""

    def __init__(self, link: EngineLink, streamed: bool) -> None:
        self.choices: list[Choice] = []
        self.streamed = streamed
        self.error: ApiError | None = None
        self.arrived = time.perf_counter()
        self._link = link
        self._changed = asyncio.Event()

    def wake(self) -> None:
        self._changed.set()

    async def change(self) -> None:
        """Wait for something new. ApiError where there will be nothing more."""
        await self._changed.wait()
        self._changed.clear()
        if self.error is not None:
            raise self.error

    async def accepted(self) -> None:
        """Wait until the engine has queued everything. ApiError if it did not."""
        while not all(choice.accepted for choice in self.choices):
            await self.change()
        self.wake()

    @property
    def done(self) -> bool:
        """All has ended by itself. False after an error: :meth:`change` raises it."""
        return self.error is None and all(choice.reason for choice in self.choices)

    def fail(self, error: ApiError) -> None:
        """End all of it."""
        if self.error is None:
            self.error = error
        self._link.drop(self)
        self.wake()

    def close(self) -> None:
        """Cancel what has not ended. A second call does nothing."""
        self._link.drop(self)


class EngineLink:
    """Owns the engine's process.

    order: what a new process is told. on_end: called with each choice that has ended. sample: the last
    one that came.
    """

    def __init__(
        self,
        order: dict[str, Any],
        settings: ServerSettings,
        seats: int,
        on_end: Callable[[Choice], None] = lambda choice: None,
    ) -> None:
        self.settings = settings
        self.seats = seats
        self.about: dict[str, Any] = {}
        self.policy: dict[str, Any] = {}
        self.sample: dict[str, Any] = {}
        self.restarts = 0
        self.why_down = "the engine is starting"
        self._order = order
        self.on_end = on_end
        self._process: EngineProcess | None = None
        self._numbers = itertools.count(1)
        self._choices: dict[int, Choice] = {}
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._running, self._binding = 0, ""
        # When silence began to count, and whether the engine owes a frame: it answers every message.
        self._heard, self._owed = 0.0, False
        self._ends: deque[float] = deque(maxlen=RECENT)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def ready(self) -> bool:
        return self._process is not None

    @property
    def pending(self) -> int:
        """Requests that have not ended."""
        return len(self._choices)

    @property
    def pid(self) -> int | None:
        """Of the engine's process."""
        return None if self._process is None else self._process.process.pid

    # --- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine. UserError if it cannot be had."""
        try:
            await self._begin()
        except Gone as error:
            raise UserError(f"the engine does not start: {error}") from None
        self._tasks = [
            asyncio.create_task(self._serve(), name="engine"),
            asyncio.create_task(self._watch(), name="watchdog"),
        ]

    async def close(self) -> None:
        """Cancel everything and end the engine."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        process, self._process = self._process, None
        self.why_down = "the server is closing"
        self._fail_all(unavailable(self.why_down, "closing"))
        if process is not None:
            await process.end()

    async def _begin(self) -> None:
        process = await EngineProcess.start(self._order)
        self.about = process.ready
        self._running, self._binding = 0, ""
        self._heard, self._owed = time.perf_counter(), False
        self._process, self.why_down = process, ""

    async def _serve(self) -> None:
        """Read from the engine; when it ends, tell everybody and start another."""
        while True:
            process = self._process
            assert process is not None
            with contextlib.suppress(Gone):
                while True:
                    self._take(await process.receive())
            self._process = None
            self.why_down = "the engine ended and is started again"
            self._fail_all(unavailable(self.why_down, "engine_restarting"))
            code = await process.end(1.0)
            log.error("the engine's process ended with exit code %d; it is started again", code)
            self.restarts += 1
            self._order["first_step"] += int(self.sample.get("step", 0))
            self.sample = {}  # the next one may end before its first sample
            await self._begin_again()

    async def _begin_again(self) -> None:
        pause = FIRST_PAUSE
        while True:
            await asyncio.sleep(pause)
            try:
                await self._begin()
                return
            except (Gone, UserError, OSError) as error:
                pause = min(pause * 2, LONGEST_PAUSE)
                self.why_down = f"the engine does not start: {error}"
                log.error("%s; next try in %g s", self.why_down, pause)

    async def _watch(self) -> None:
        """End an engine that has work and says nothing: then it is started again."""
        patience = self.settings.engine_seconds
        while True:
            await asyncio.sleep(min(1.0, patience / 4))
            process, silent = self._process, time.perf_counter() - self._heard
            if process is not None and (self._choices or self._replies) and silent > patience:
                log.error("the engine has said nothing for %.1f s: it is ended", silent)
                self._heard = time.perf_counter()
                process.process.kill()

    def _expect(self) -> None:
        """Before a message goes: an idle engine was silent because it had nothing to say. Calls that are
        dropped and made again do not give a stuck one more time."""
        if not (self._choices or self._replies or self._owed):
            self._heard = time.perf_counter()
        self._owed = True

    def give_up(self) -> None:
        """End everything: the time to drain is over."""
        self._fail_all(unavailable("the server stops and did not wait any longer", "draining"))

    def _fail_all(self, error: ApiError) -> None:
        for group in {choice.group for choice in self._choices.values()}:
            group.fail(error)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(error)
        self._replies.clear()

    # --- requests --------------------------------------------------------------------------------

    def submit(self, jobs: Iterable[Job], streamed: bool) -> Submission:
        """Hand requests to the engine. ApiError: 429 if too many wait, 503 without an engine."""
        jobs = list(jobs)
        process = self._process
        if process is None:
            raise unavailable(self.why_down)
        self._check_room(len(jobs))
        self._expect()
        group = Submission(self, streamed)
        for job in jobs:
            choice = Choice(next(self._numbers), group)
            self._choices[choice.number] = choice
            group.choices.append(choice)
            wants = {"stream": streamed, "logprobs": job.logprobs, "fingerprint": job.fingerprint}
            process.send(["submit", choice.number, job.prompt, dict(job.params), wants])
        return group

    def _check_room(self, count: int) -> None:
        """Where memory binds, those that run are all that can; else every seat can be taken."""
        most = self.seats + self.settings.max_waiting
        if count > most:
            raise bad_request(
                "n", f"n x prompts = {count}: the server holds at most {most} requests"
            )
        able = self._running if self._binding in ("device", "host") else self.seats
        if self.pending and self.pending + count > able + self.settings.max_waiting:
            waiting = max(0, self.pending - able)
            raise overloaded(self._binding, waiting, self._seconds_per_place() * count)

    def _seconds_per_place(self) -> float:
        if len(self._ends) < 2:
            return 1.0
        return (time.perf_counter() - self._ends[0]) / len(self._ends)

    def drop(self, group: Submission) -> None:
        """Forget a call; what runs of it is cancelled."""
        for choice in group.choices:
            if self._choices.pop(choice.number, None) is None:
                continue
            if self._process is not None:
                self._process.send(["cancel", choice.number])
            choice.reason = "cancelled"
            self.on_end(choice)

    # --- policy and reports ----------------------------------------------------------------------

    async def set_policy(self, settings: Mapping[str, Any], origin: str) -> dict[str, Any]:
        """Swap the policy; what changed. UserError, and nothing changed, for a bad one; ApiError
        without an engine."""
        found = await self._ask("policy", dict(settings), origin)
        self.policy |= settings
        self._order["config"] |= settings
        return found

    async def status(self) -> dict[str, Any]:
        """A sample of this moment; ApiError without an engine."""
        self.sample = await self._ask("status")
        return self.sample

    async def _ask(self, what: str, *arguments: Any) -> dict[str, Any]:
        process = self._process
        if process is None:
            raise unavailable(self.why_down)
        self._expect()
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        process.send([what, number, *arguments])
        try:
            async with asyncio.timeout(REPLY_SECONDS):
                found: dict[str, Any] = await reply
                return found
        except TimeoutError:
            raise unavailable(f"no answer from the engine in {REPLY_SECONDS:g} s") from None
        finally:
            self._replies.pop(number, None)

    # --- what comes back -------------------------------------------------------------------------

    def _take(self, frame: dict[str, Any]) -> None:
        now = self._heard = time.perf_counter()
        self._owed = False
        for number in frame.get("accepted", ()):
            if (choice := self._choices.get(number)) is not None:
                choice.accepted = True
                choice.group.wake()
        for number, kind, tier, text in frame.get("refused", ()):
            self._refuse(number, kind, tier, text)
        for number, tokens in frame.get("tokens", ()):
            if (choice := self._choices.get(number)) is not None:
                choice.tokens += tokens
                choice.group.wake()
        for number, *row in frame.get("logprobs", ()):
            if (choice := self._choices.get(number)) is not None:
                choice.logprobs.append(row)
        for number, reason, record in frame.get("ended", ()):
            self._finish(number, reason, record, now)
        for number, error, record in frame.get("replies", ()):
            self._answer(number, error, record)
        if "load" in frame:
            self._running, _, self._binding = frame["load"]
        self.sample = frame.get("sample", self.sample)

    def _refuse(self, number: int, kind: str, tier: str, text: str) -> None:
        choice = self._choices.pop(number, None)
        if choice is not None:
            code = f"{tier}_capacity" if kind == "capacity" else "invalid_value"
            choice.reason = "refused"
            choice.group.fail(bad_request(None, text, code))

    def _finish(self, number: int, reason: str, record: dict[str, Any], now: float) -> None:
        choice = self._choices.pop(number, None)
        if choice is None:
            return
        self._ends.append(now)
        choice.tokens += record.pop("tokens")
        choice.reason, choice.record = reason, record
        self.on_end(choice)
        choice.group.wake()

    def _answer(self, number: int, error: str | None, record: dict[str, Any]) -> None:
        reply = self._replies.get(number)
        if reply is None or reply.done():
            return
        if error is None:
            reply.set_result(record)
        else:
            reply.set_exception(UserError(error))
