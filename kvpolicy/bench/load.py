"""An engine with so many requests in the middle of decoding, and the memory that this takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvpolicy.bench.timing import wait
from kvpolicy.config import EngineConfig, SamplingParams
from kvpolicy.engine.engine import Engine
from kvpolicy.engine.request import State
from kvpolicy.memory.accounting import (
    Reserve,
    host_bytes,
    hot_frames,
    inflight_frames,
    request_frames,
    staging_frames,
)
from kvpolicy.memory.layout import Layout
from kvpolicy.memory.request import GROWTH_TOKENS
from kvpolicy.models.loader import DecodeModel
from kvpolicy.workloads.texts import default_corpus

MIB = 1 << 20
# Memory beyond what the accounting needs: the watermark of admission.
MARGIN = 1.05
# Steps without another admission after which no more are waited for.
PATIENCE = 64
# Where prompts begin in the texts, as shares of them: far from each other for any number of requests.
GOLDEN = 0.6180339887498949

OnStep = Callable[[Engine], None]


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that decode at a time: each has a prompt of so many tokens, ``reading`` steps are at most
    needed for all prompts, ``warm`` steps are not measured, ``steps`` are. context: tokens before the prompt
    that nobody computes (dummy weights)."""

    prompt: int
    reading: int
    warm: int
    steps: int
    context: int = 0

    @property
    def new_tokens(self) -> int:
        """Tokens that not even the first request reaches while anything is measured."""
        return self.reading + PATIENCE + self.warm + 2 * self.steps

    @property
    def tokens(self) -> int:
        return self.context + self.prompt + self.new_tokens


def with_memory(
    config: EngineConfig, model: DecodeModel, load: Load, requests: int, share: float
) -> EngineConfig:
    """The config with device memory for all requests whose hot rows are ``share`` of their histories, and
    host memory for all of them."""
    layout = Layout(model.geometry, config.kv_dtype)
    seats = config.max_concurrency
    staging = config.staging_rows or seats * layout.topk
    reserve = Reserve(staging, seats + config.prefill_chunk, seats)
    rows = tuple(store.store.entries(load.tokens) for store in layout.stores)
    history = hot_frames(layout, rows, load.tokens)
    each = request_frames(layout, load.tokens) + share * history
    frames = staging_frames(layout, reserve) + inflight_frames(layout, reserve) + requests * each
    return config.model_copy(
        update={
            "device_kv_mib": MARGIN * frames * layout.frame_bytes / MIB,
            "host_kv_mib": MARGIN * requests * host_bytes(layout, load.tokens) / MIB + 1,
        }
    )


def fill(engine: Engine, load: Load, requests: int, on_step: OnStep | None = None) -> int:
    """Submit the requests and go on until all that are admitted decode, then take the steps that are not
    measured (the first of them captures a graph). Returns how many run: where memory is short, the others
    wait."""
    corpus, params = default_corpus(), SamplingParams(max_new_tokens=load.new_tokens)
    for i in range(requests):
        prompt = corpus.piece((i * GOLDEN) % 1.0, load.prompt)
        # Contexts grow in lots: not all in the same step.
        context = load.context - i % min(GROWTH_TOKENS, max(1, load.context // 2))
        engine.submit(prompt, params, context=max(0, context))
    still, before = 0, -1
    while still < PATIENCE:
        engine.step()
        if on_step is not None:
            on_step(engine)
        running = engine.scheduler.running
        reading = any(request.state is State.PREFILL for request in running)
        if not reading and len(running) == requests:
            break
        still = 0 if reading or len(running) != before else still + 1
        before = len(running)
    for _ in range(load.warm):
        engine.step()
    wait(engine.device)
    return len(engine.scheduler.running)
