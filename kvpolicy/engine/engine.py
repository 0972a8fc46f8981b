"""The engine: decide, admit, compute, commit, emit, one step at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from kvpolicy.config import EngineConfig, SamplingParams
from kvpolicy.controllers import ControllerLike
from kvpolicy.engine.clock import Clock
from kvpolicy.engine.executor import Executor, Launched, Logits
from kvpolicy.engine.handle import RequestHandle, TokenStream
from kvpolicy.engine.loop import LoadView
from kvpolicy.engine.metrics import Metrics, Progress, Sample
from kvpolicy.engine.observer import StepObserver
from kvpolicy.engine.parts import (
    finish,
    load,
    make_control,
    make_memory,
    make_speculator,
    pick_device,
)
from kvpolicy.engine.prompt import Prompt, token_ids
from kvpolicy.engine.reload import RunTimeChanges, changes, read
from kvpolicy.engine.request import OnToken, Request, RequestOutput
from kvpolicy.engine.residents import Residents
from kvpolicy.engine.scheduler import Scheduler
from kvpolicy.engine.verify_schedule import VerifySchedule
from kvpolicy.errors import UserError, reason
from kvpolicy.memory.layout import Layout
from kvpolicy.models.loader import DecodeModel
from kvpolicy.telemetry.record import run_record
from kvpolicy.telemetry.slo import Slo

# An idle wall-clock run wakes this often: an interrupt and the progress display wait no longer.
LONGEST_SLEEP_S = 0.05


class Engine:
    """Decodes requests over the KV hierarchy under one residency controller.

    model: a loaded model instead of the one the config names (for tests and studies).
    Raises UserError for a config that cannot be had here, CapacityError for one that does not fit.
    """

    def __init__(
        self, config: EngineConfig | None = None, model: DecodeModel | None = None
    ) -> None:
        self.config = EngineConfig() if config is None else config
        if not isinstance(self.config, EngineConfig):
            raise UserError(f"config = {config!r}: must be an EngineConfig")
        self.device = pick_device(self.config.device)
        self.model = model or load(self.config, self.device)
        self.speculator = make_speculator(self.config, self.model, self.device)
        ring = self.speculator.ring if self.speculator else None
        self._layout = Layout(self.model.geometry, self.config.kv_dtype, ring)
        self.control = make_control(self.config, self._layout)
        self.memory = make_memory(
            self.config,
            self._layout,
            self.control.rule,
            self.model.backend,
            self.device,
            self.speculator.width if self.speculator else 0,
        )
        if self.speculator is not None:
            schedule, wall = None, self.config.clock == "wall"
            if self.config.verify_length == "scheduled":
                schedule = VerifySchedule(self.memory, self.speculator.width, wall)
            self.speculator.attach(self.memory, schedule)
        self.scheduler = Scheduler(self.config.max_concurrency, self.config.prefill_chunk)
        self.requests: dict[int, Request] = {}
        self.totals = Metrics()
        self.executor = Executor(
            self.model,
            self.memory,
            self.config.max_concurrency,
            self.config.cuda_graphs,
            self.speculator,
        )
        # Where steps are the clock a request ends at the step that decides its last token.
        self._runs_ahead = self.executor.runs_ahead and self.config.clock == "wall"
        self._launched: Launched | None = None
        self.residents = Residents(self.memory, self.scheduler, self.control, self.totals)
        self.observers: list[StepObserver] = []
        self._next_id = 0
        self.clock = Clock(self.config.clock)
        self._closed = False
        self._broken = ""

    @property
    def steps(self) -> int:
        """Engine steps so far, skipped ones included."""
        return self.clock.steps

    # --- requests --------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        context: int = 0,
        on_token: OnToken | None = None,
    ) -> RequestHandle:
        """Queue a request. context: with dummy weights, tokens before the prompt that count as computed:
        pseudo-random rows stand in for theirs (to measure long contexts without reading them). on_token:
        called within a step with each token and the logits that decided it.

        UserError for an empty or wrong prompt, CapacityError (naming the tier) for one that this engine
        could never hold."""
        self._check_open()
        if context and not (context > 0 and getattr(self.model, "dummy", False)):
            raise UserError(f"context = {context!r}: goes with dummy weights, and counts tokens")
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise UserError(f"params = {params!r}: must be SamplingParams")
        request = Request(
            id=self._next_id,
            prompt=token_ids(prompt, self.model, self.config.bos),
            params=params,
            eos=self.model.eos,
            stops=params.stop_bytes(),
            arrived_step=self.steps,
            clock=self.clock,
            context=context,
            on_token=on_token,
        )
        limit = self.model.geometry.max_context
        if request.max_tokens > limit:
            raise UserError(
                f"prompt of {request.prompt_end} tokens + max_new_tokens = {params.max_new_tokens}: "
                f"the model's context is {limit} tokens"
            )
        rows = self.residents.initial_rows(request)
        self.memory.check_fits_alone(request.max_tokens, rows)
        self._next_id += 1
        self.requests[request.id] = request
        self.totals.submit(request)
        self.scheduler.add(request)
        self.control.wake()
        return RequestHandle(request, self.step, self._cancel)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> TokenStream:
        """Submit a request; its tokens as they come. Closing or dropping the stream cancels it."""
        return TokenStream(self.submit(prompt, params))

    def cancel(self, request_id: int) -> bool:
        """End a request now, as its handle's ``cancel`` does. False if there is no such request."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._cancel(request)
        return True

    def _cancel(self, request: Request) -> None:
        if not request.finished:
            request.finish("cancelled")
            self._retire(request)

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_step: Callable[[Engine], None] | None = None,
    ) -> list[RequestOutput]:
        """Decode all prompts to their end, batched; outputs in the order of the prompts.

        params: one for all, or one per prompt. on_step: called after every step (progress).
        """
        if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
            raise UserError(f"prompts = {prompts!r}: must be a list of prompts")
        prompts = list(prompts)
        each: list[SamplingParams | None]
        if params is None or isinstance(params, SamplingParams):
            each = [params] * len(prompts)
        else:
            each = list(params)
        if len(each) != len(prompts):
            raise UserError(f"{len(each)} sampling params for {len(prompts)} prompts")
        handles: list[RequestHandle] = []
        try:
            for prompt, own in zip(prompts, each, strict=True):
                handles.append(self.submit(prompt, own))
            while not all(handle.done for handle in handles):
                self.step()
                if on_step is not None:
                    on_step(self)
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        return [handle.result() for handle in handles]

    def prepare(self, sampled: bool = False, contexts: Sequence[int] = ()) -> None:
        """Capture the CUDA graphs of every batch size now, so that no step has to wait for it (without
        graphs: nothing). sampled: for requests with a temperature too. contexts: tokens that contexts will
        reach (none: the model's limit); graphs are captured for each power of two from 32K on."""
        for runs in (self.executor.decoder, self.executor.verifier):
            if runs is not None:
                for kind in (False, True)[: 1 + sampled]:
                    for most in contexts or (self.model.geometry.max_context,):
                        runs.prepare(most, kind)

    # --- one step --------------------------------------------------------------------------------

    def step(self) -> bool:
        """Decide, admit, compute one row per decoding request and a chunk of prompts, commit, emit.

        Returns False when nothing was left to do. An exception (an interrupt too) ends the engine:
        later steps and submissions are refused, what was made so far stays readable.
        """
        self._check_open()
        try:
            return self._step()
        except BaseException as error:
            # Half a step may have published rows that were never copied: nothing after it is safe.
            self._broken = reason(error)
            raise

    def _step(self) -> bool:
        started = time.perf_counter()
        self._expire()
        decided = self.control.is_due(self.steps)
        if decided and not self._runs_ahead:
            self.control.step(self.memory, self._load())
        self.residents.admit(self.steps)
        self.residents.grow(self.steps)
        if self.speculator is not None:
            self.speculator.limit(self.control.draft_tokens)
            self.residents.grow_for_drafts(self.speculator.cap)
        batch = self.scheduler.batch()
        if not batch and self._launched is None:
            return False
        launched = self.executor.launch(batch, self.steps) if batch else None
        for observer in self.observers if launched is not None else ():
            observer(self.steps, batch)
        self.totals.decode_steps += bool(batch.decode)
        if decided and self._runs_ahead:
            # Behind the launch: the device has two steps to compute while the host decides.
            self.control.step(self.memory, self._load())
            self.memory.send_counts()
        before, self._launched = self._launched, launched
        self._emit(before)
        if not self._runs_ahead:
            self._emit(launched)
            self._launched = None
        self._account(started)
        return True

    def _expire(self) -> None:
        """Cancel what is past its deadline."""
        if not any(request.expires is not None for request in self.requests.values()):
            return
        now = self.clock.now()
        for request in list(self.requests.values()):
            if request.expires is not None and now >= request.expires:
                self.totals.expired += 1
                self._cancel(request)

    def _load(self) -> LoadView:
        return LoadView(
            step=self.steps,
            running=self.scheduler.running,
            waiting=self.scheduler.waiting,
            seats_free=self.scheduler.seats_free,
            queue_bytes=self.residents.queue_bytes(),
            arrivals=self._next_id,
            finished=self.totals.finished,
            preemptions=self.totals.preemptions,
            tokens=self.totals.generated_tokens,
            seconds=0.0 if self.clock.counts_steps else self.totals.busy_seconds,
            late=self._runs_ahead,
            speculation=self.speculator.counts if self.speculator else None,
        )

    def _emit(self, launched: Launched | None) -> None:
        """Give out the tokens of a step, waiting for it."""
        if launched is None:
            return
        for request, token, row in launched.tokens():
            if not request.finished:  # else cancelled, or ended by the token before
                self._give(request, token, row)
        self.totals.waited_seconds += launched.waited

    def _give(self, request: Request, token: int | None, row: Logits) -> None:
        request.take(token, row)
        self.totals.generated_tokens += token is not None
        if request.finished:
            self._retire(request)

    def _retire(self, request: Request) -> None:
        self.scheduler.remove(request)
        self.memory.release(request.id)
        del self.requests[request.id]
        self.control.forget(request.id)
        self.totals.retire(request)

    def _account(self, started: float) -> None:
        self.clock.steps += 1
        self.totals.note_step(self.memory, time.perf_counter() - started)
        if self.config.validate_:
            self.check_integrity()

    def wait(self, seconds: float) -> None:
        """Let time pass without work, on the wall clock: at most so long, and no longer than an interrupt
        may have to wait."""
        time.sleep(min(seconds, LONGEST_SLEEP_S))

    def skip(self, steps: int = 1) -> None:
        """Let time pass without work, where steps are the clock and nothing runs."""
        self.clock.steps += steps

    # --- control and reports ---------------------------------------------------------------------

    def set_controller(self, spec: ControllerLike) -> None:
        """Swap the controller; it decides at the next step. spec: a name or a file with parameters,
        an object with ``decide``, or a function of an observation. UserError leaves the old one in
        place."""
        self.control.set_controller(spec)
        self.memory.set_rule(self.control.rule)
        self.memory.stop_following()
        self.config = self.config.model_copy(update={"controller": spec})

    def reload(self, config: EngineConfig | str | Path) -> RunTimeChanges:
        """Take over the fields of RUN_TIME (controller, control_interval, eviction, admission) of a
        config, or of a YAML file (what it does not name stays), while running. UserError, and nothing
        done, if another field differs."""
        config = config if isinstance(config, EngineConfig) else read(config, self.config)
        found = changes(self.config, config)
        if found.names:
            self.control.apply(found)
            self.memory.set_rule(self.control.rule)
            if "controller" in found.names:
                self.memory.stop_following()
            self.config = config
        return found

    def set_slo(self, slo: Slo | None) -> None:
        """Tell controllers which latencies goodput will count; nothing is enforced."""
        self.control.slo = slo

    def check_integrity(self) -> None:
        """IntegrityError unless all bookkeeping agrees and every device row equals its host copy."""
        self.memory.check_integrity()
        self.residents.check_integrity()

    def progress(self) -> Progress:
        """How far everything submitted so far is."""
        live, totals = self.requests.values(), self.totals
        return Progress(
            prompt_tokens_done=totals.ended_prompt_tokens + sum(r.prompt_done for r in live),
            prompt_tokens_total=totals.prompt_tokens,
            generated_tokens=totals.generated_tokens,
            max_new_tokens_total=totals.max_new_tokens,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            finished=totals.finished,
        )

    def sample(self) -> Sample:
        """The engine at this moment; where the device runs ahead, retrieval as of some steps ago."""
        usage, waiting = self.memory.usage(), self.scheduler.waiting
        retrieval = self.memory.counters.retrieval
        late = self._runs_ahead and bool(self.scheduler.running)
        counted = retrieval.received() if late else retrieval.read()
        decode = counted.decode
        return Sample(
            step=self.steps,
            time=self.clock.now(),
            running=len(self.scheduler.running),
            waiting=len(waiting),
            oldest_wait=self.steps - waiting[0].waiting_since if waiting else 0,
            required_bytes=usage.required,
            optional_bytes=usage.optional,
            free_bytes=usage.free,
            selected_rows=decode.selected_rows,
            unique_rows=decode.unique_rows,
            fetched_rows=decode.fetched_rows,
            host_to_device_bytes=counted.host_to_device_bytes + self.memory.counters.moved_bytes,
            generated_tokens=self.totals.generated_tokens,
            decode_steps=self.totals.decode_steps,
            finished=self.totals.finished,
            preemptions=self.totals.preemptions,
            busy_seconds=self.totals.busy_seconds,
        )

    def metrics(self) -> dict[str, Any]:
        """Everything measured so far, by its documented name."""
        counts = self.speculator.counts if self.speculator else None
        return self.totals.report(
            self.steps, self.memory, self.control, self.model.weight_bytes, counts
        )

    def record(self) -> dict[str, Any]:
        """The run record: config, backend, versions, commit, machine, command, and the rates of the link to
        host memory (None on a CPU)."""
        config = self.config.model_dump(by_alias=True)
        rates = self.memory.link
        link = None if rates is None else rates.as_dict()
        return {**run_record(config, str(self.device), self.model.backend), "link": link}

    # --- life ------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise UserError("the engine is closed")
        if self._broken:
            raise UserError(
                f"the engine stopped in the middle of a step ({self._broken}): make a new one"
            )

    def close(self) -> None:
        """Cancel what runs, wait for the device, and free all memory; metrics stay readable. A second
        call does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            for request in [*self.scheduler.running, *self.scheduler.waiting]:
                self._cancel(request)
        finally:
            self.control.close()
            self._launched = None
            finish(self.device)
            self.executor.close()
            self.memory.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
