"""What the engine measures, under the names that reports use."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from kvpolicy.engine.loop import ControlLoop
from kvpolicy.engine.request import Request
from kvpolicy.engine.speculation import Counts
from kvpolicy.memory.hierarchy import Hierarchy
from kvpolicy.telemetry.latency import percentiles_ms

# Latencies kept: percentiles speak of the last requests.
LATENCIES = 100_000


def _latencies() -> deque[float]:
    return deque(maxlen=LATENCIES)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the engine is with everything submitted so far. Counts of tokens and of requests."""

    prompt_tokens_done: int
    prompt_tokens_total: int
    generated_tokens: int
    max_new_tokens_total: int
    running: int
    waiting: int
    finished: int


@dataclass(frozen=True, slots=True)
class Sample:
    """The engine at one moment, for timelines. Rows, bytes, tokens and counts are totals since the
    start; differences of two samples are what happened between them. time: seconds of the engine's
    clock. *_bytes of the device: as they are now. busy_seconds: wall time inside steps.
    """

    step: int
    time: float
    running: int
    waiting: int
    oldest_wait: int
    required_bytes: int
    optional_bytes: int
    free_bytes: int
    selected_rows: int
    unique_rows: int
    fetched_rows: int
    host_to_device_bytes: int
    generated_tokens: int
    decode_steps: int
    finished: int
    preemptions: int
    busy_seconds: float


@dataclass(slots=True)
class Metrics:
    """Running totals. busy_seconds: wall time inside steps, of which the host waited for the device for
    waited_seconds.

    deferred: requests put off at least once, by the tier that bound first. reduced_admissions:
    requests that started with fewer hot rows than the controller asks for, since nothing else ran.
    preemptions: requests put back to the host. expired: cancelled at their deadline. longest_wait:
    most steps that a request waited to be admitted. tpot, ttft: seconds, of the last requests that
    ended; *_count: how many there were ever.
    """

    prompt_tokens: int = 0
    ended_prompt_tokens: int = 0
    max_new_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    reduced_admissions: int = 0
    expired: int = 0
    longest_wait: int = 0
    preemptions: int = 0
    decode_steps: int = 0
    busy_seconds: float = 0.0
    waited_seconds: float = 0.0
    optional_byte_steps: int = 0
    required_peak: int = 0
    ring_peak: int = 0
    deferred: dict[str, int] = field(default_factory=dict)
    tpot: deque[float] = field(default_factory=_latencies)
    ttft: deque[float] = field(default_factory=_latencies)
    tpot_count: int = 0
    ttft_count: int = 0
    _last_deferred: int = -1

    def submit(self, request: Request) -> None:
        """Count a new request."""
        self.prompt_tokens += len(request.prompt)
        self.max_new_tokens += request.params.max_new_tokens

    def defer(self, request: Request, tier: str) -> None:
        """Count a request that has to wait for memory, once."""
        if request.id > self._last_deferred:
            self._last_deferred = request.id
            self.deferred[tier] = self.deferred.get(tier, 0) + 1

    def retire(self, request: Request) -> None:
        """Count a request that has ended, and its latencies."""
        self.finished += 1
        self.longest_wait = max(self.longest_wait, request.longest_wait)
        self.ended_prompt_tokens += request.prompt_done
        if request.first_token is None or request.last_token is None:
            return
        self.ttft.append(request.first_token - request.arrived)
        self.ttft_count += 1
        if len(request.tokens) > 1:
            span = request.last_token - request.first_token
            self.tpot.append(span / (len(request.tokens) - 1))
            self.tpot_count += 1

    def note_step(self, memory: Hierarchy, seconds: float) -> None:
        """Note one step's wall time and memory split."""
        self.busy_seconds += seconds
        optional = memory.optional_bytes()
        self.optional_byte_steps += optional
        used = memory.arena.frames.used * memory.arena.frame_bytes
        rings = memory.arena.frames.held_for("ring") * memory.arena.frame_bytes
        self.ring_peak = max(self.ring_peak, rings)
        self.required_peak = max(self.required_peak, used - optional)

    def report(
        self,
        steps: int,
        memory: Hierarchy,
        control: ControlLoop,
        weight_bytes: int,
        speculation: Counts | None = None,
    ) -> dict[str, Any]:
        """JSON-ready. Rates speak of decode; prompt retrieval is under ``prefill``."""
        counted = memory.counters.retrieval.read()
        decode, prefill = counted.decode, counted.prefill
        usage = memory.usage()
        seconds = self.busy_seconds
        return {
            "selected_rows": decode.selected_rows,
            "unique_rows": decode.unique_rows,
            "fetched_rows": decode.fetched_rows,
            "staged_rows": decode.staged_rows,
            "refetched_rows": decode.refetched_rows,
            "miss_rate": decode.miss_rate,
            "miss_rate_selected": decode.miss_rate_selected,
            "host_to_device_bytes": decode.host_to_device_bytes,
            "device_to_host_bytes": memory.counters.device_to_host_bytes,
            "device_kv_bytes_peak": memory.arena.frames.peak * memory.arena.frame_bytes,
            "required_bytes": self.required_peak,
            "optional_bytes_mean": self.optional_byte_steps / steps if steps else 0.0,
            "staging_bytes": usage.staging,
            "ring_bytes": self.ring_peak,
            "weight_bytes": weight_bytes,
            "release_steps": memory.counters.release_steps,
            "request_waves": memory.counters.request_waves,
            "steps": steps,
            "generated_tokens": self.generated_tokens,
            "tokens_per_s": self.generated_tokens / seconds if seconds else 0.0,
            "goodput_tokens_per_s": None,
            "tpot_ms": percentiles_ms(self.tpot),
            "ttft_ms": percentiles_ms(self.ttft),
            "accepted_length": speculation.accepted_length if speculation else None,
            "speculation": speculation.report() if speculation else None,
            "controller_decisions": control.decisions,
            "controller_projections": control.projections,
            "controller_fallbacks": control.fallbacks,
            "preemptions": self.preemptions,
            "deferred_admissions": dict(self.deferred),
            "reduced_admissions": self.reduced_admissions,
            "expired": self.expired,
            "longest_wait_steps": self.longest_wait,
            "shortages": memory.counters.shortages,
            "forced_release_bytes": memory.counters.forced_frames * memory.arena.frame_bytes,
            "prefill": {
                "selected_rows": prefill.selected_rows,
                "unique_rows": prefill.unique_rows,
                "fetched_rows": prefill.fetched_rows,
                "host_to_device_bytes": prefill.host_to_device_bytes,
            },
            "moved_bytes": memory.counters.moved_bytes,
        }
