"""A server as what a workload's runner drives: it has what that asks of an engine.

So a load over HTTP keeps to the same times and levels as one inside a process, and is reported in the
same words. Latencies are the client's; samples of the engine are what GET /v1/policy says.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from kvpolicy.config import SamplingParams
from kvpolicy.engine.clock import Clock
from kvpolicy.engine.metrics import Sample
from kvpolicy.engine.request import RequestOutput
from kvpolicy.errors import KvPolicyError, UserError
from kvpolicy.serving.client import Client, Reply
from kvpolicy.telemetry.latency import Latencies

__all__ = ["RemoteEngine"]

log = logging.getLogger(__name__)

# Between two samples of the server.
POLL_SECONDS = 0.25
# A turn of the loop ends when a request does, or after this.
TURN_SECONDS = 0.01
# An idle load wakes this often, for an interrupt and its samples.
LONGEST_WAIT = 0.05
# For the server's name and its samples; it waits 30 s for its engine itself.
ANSWER_SECONDS = 40.0
# A request is given up when nothing of its answer came for this long; the longest is in the queue.
SILENT_SECONDS = 600.0
# After a refusal that does not say when to come back.
BACK_OFF = 1.0
_SAMPLE = [field.name for field in fields(Sample)]


class _Failed(Exception):
    """A request was not answered. kind: its status, or what happened; after: seconds to stay away."""

    def __init__(self, kind: str, after: float = 0.0) -> None:
        super().__init__(kind)
        self.kind = kind
        self.after = after


class RemoteHandle:
    """One request at the server."""

    def __init__(self, number: int, prompt: bytes, params: SamplingParams) -> None:
        self.id = number
        self.done = False
        self.reason = ""
        self.tokens: list[int] = []
        self.text: list[str] = []
        self.digest = ""
        self.arrived = time.perf_counter()
        self.first: float | None = None
        self.last: float | None = None
        self.prompt, self.params = prompt, params

    def take(self, event: dict[str, Any]) -> None:
        """Note one event of the stream."""
        if "error" in event:
            raise _Failed(str(event["error"].get("code")))
        choice = event["choices"][0]
        if new := choice.get("token_ids"):
            self.tokens += new
            self.last = time.perf_counter()
            if self.first is None:
                self.first = self.last
        self.text.append(choice["text"])
        self.reason = choice["finish_reason"] or self.reason
        self.digest = choice.get("logits_sha256", self.digest)

    def result(self) -> RequestOutput:
        """As an engine's, with the client's latencies; ``error`` for one that was not answered."""
        return RequestOutput(
            id=self.id,
            prompt_tokens=len(self.prompt),
            tokens=self.tokens,
            text="".join(self.text),
            finish_reason=self.reason,
            logits_sha256=self.digest,
            latencies=Latencies(self.arrived, None, self.first, self.last, None, len(self.tokens)),
        )


class RemoteEngine:
    """Requests to the server at an address, on an event loop that runs while :meth:`step` does.

    model: the name of the server's. errors: requests that were not answered, by status or
    what happened. policy: what GET /v1/policy said last, empty if it may not be seen. Close it.
    """

    def __init__(self, client: Client, policy_client: Client) -> None:
        self.clock = Clock("wall")
        self.errors: Counter[str] = Counter()
        self.policy: dict[str, Any] = {}
        self.generated = 0
        self._client, self._policy_client = client, policy_client
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._live: set[asyncio.Task[None]] = set()
        self._count = 0
        self._sample = Sample(*[0] * len(_SAMPLE))
        self._poller: asyncio.Task[None] | None = None
        try:
            self.model = self._loop.run_until_complete(self._greet())
        except (OSError, EOFError, ValueError) as error:
            self.close()
            where = f"http://{client.host}:{client.port}"
            text = str(error) or f"no answer in {ANSWER_SECONDS:g} s"
            raise UserError(f"{where}: {text}") from None
        except BaseException:
            self.close()
            raise
        self._poller = self._loop.create_task(self._poll())

    async def _greet(self) -> str:
        """The name of the server's model, and a first sample."""
        async with asyncio.timeout(ANSWER_SECONDS):
            status, found = await self._client.json("GET", "/v1/models")
        if status != 200:
            raise UserError(f"the server answers {status}: {found.get('error', {}).get('message')}")
        await self._poll_once()
        return str(found["data"][0]["id"])

    # --- what a runner asks of an engine ---------------------------------------------------------

    @property
    def steps(self) -> int:
        """The server's engine steps, as last heard."""
        return self._sample.step

    def prepare(self, sampled: bool = False, contexts: Sequence[int] = ()) -> None:
        """Nothing: the server is prepared."""

    def submit(self, prompt: bytes, params: SamplingParams) -> RemoteHandle:
        """Send a request at the next turn."""
        handle = RemoteHandle(self._count, prompt, params)
        self._count += 1
        task = self._loop.create_task(self._request(handle))
        self._live.add(task)
        task.add_done_callback(self._live.discard)
        return handle

    def step(self) -> bool:
        """Let a moment pass, or the time until a request ends. False if there is none."""
        if not self._live:
            return False
        self._loop.run_until_complete(self._turn())
        return True

    def wait(self, seconds: float) -> None:
        """Let a moment pass with nothing to do, ``seconds`` at most."""
        self._loop.run_until_complete(asyncio.sleep(min(seconds, LONGEST_WAIT)))

    async def _turn(self) -> None:
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await self._changed.wait()
        except TimeoutError:
            return
        self._changed.clear()

    def sample(self) -> Sample:
        """The server's engine as last heard."""
        return self._sample

    def close(self) -> None:
        """Cancel what runs and close the connections."""
        tasks = [*self._live, *([] if self._poller is None else [self._poller])]
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(_all_ended(tasks))
        self._client.close()
        self._policy_client.close()
        self._loop.run_until_complete(asyncio.sleep(0))  # transports close at the next turn
        self._loop.close()

    # --- on the loop -----------------------------------------------------------------------------

    async def _request(self, handle: RemoteHandle) -> None:
        try:
            limit = asyncio.timeout(SILENT_SECONDS)
            try:
                async with limit:
                    await self._answer(handle, limit)
            except TimeoutError:
                if not limit.expired():  # the network's own
                    raise
                raise _Failed(f"nothing for {SILENT_SECONDS:g} s", BACK_OFF) from None
            if not handle.reason:
                raise _Failed("cut off")
        except (_Failed, OSError, EOFError, ValueError) as error:
            kind = error.kind if isinstance(error, _Failed) else type(error).__name__
            self.errors[kind] += 1
            handle.reason = "error"
            log.debug("request %d: %s", handle.id, kind)
            # It keeps its place meanwhile, else a load that keeps a level would hammer the server.
            await asyncio.sleep(error.after if isinstance(error, _Failed) else BACK_OFF)
        finally:
            handle.done = True
            self.generated += len(handle.tokens)
            self._changed.set()

    async def _answer(self, handle: RemoteHandle, limit: asyncio.Timeout) -> None:
        """limit: put off with each event."""
        reply = await self._client.ask("POST", "/v1/completions", self._body(handle))
        try:
            if reply.status != 200:
                raise await _refusal(reply)
            async for event in reply.events():
                handle.take(json.loads(event))
                limit.reschedule(self._loop.time() + SILENT_SECONDS)
        finally:
            self._client.done(reply)

    def _body(self, handle: RemoteHandle) -> dict[str, Any]:
        params = handle.params
        try:
            prompt: Any = handle.prompt.decode()
        except UnicodeDecodeError:
            prompt = list(handle.prompt)
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "seed": params.seed,
            "stop": [str(stop) for stop in params.stop],
            "stream": True,
            "return_token_ids": True,
            "fingerprint": True,
        }

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                await self._poll_once()
            except (OSError, EOFError, ValueError, KvPolicyError) as error:
                log.debug("no sample: %r", error)

    async def _poll_once(self) -> None:
        """Take a sample. Where the server shows none, what the client knows stands for it."""
        async with asyncio.timeout(ANSWER_SECONDS):
            status, found = await self._policy_client.json("GET", "/v1/policy")
        now = self.clock.now()
        if status == 200:
            self.policy = found
            values = {**{name: found["sample"][name] for name in _SAMPLE}, "time": now}
        else:
            values = {name: 0 for name in _SAMPLE} | {
                "step": self._sample.step + 1,
                "time": now,
                "running": len(self._live),
                "generated_tokens": self.generated,
            }
        self._sample = Sample(**values)


async def _all_ended(tasks: list[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


async def _refusal(reply: Reply) -> _Failed:
    raw = await reply.read()
    after = reply.headers.get("retry-after", "")
    log.debug("refused: %.300r", raw)
    return _Failed(str(reply.status), float(after) if after.isdigit() else BACK_OFF)
