"""/metrics: what the engine counts and what the server measures, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvpolicy.serving.link import Choice

__all__ = ["CONTENT_TYPE_LATEST", "ServerMetrics"]

GAUGES = {
    "running": ("requests_running", "Requests on the device"),
    "waiting": ("requests_waiting", "Requests in the engine's queue"),
    "required_bytes": ("device_required_bytes", "Device memory that no controller can take"),
    "optional_bytes": (
        "device_optional_bytes",
        "Hot rows beyond the floor, what controllers share",
    ),
    "free_bytes": ("device_free_bytes", "Device memory for KV that nothing uses"),
    "memory_staging_bytes": ("device_staging_bytes", "Of the required: transient rows"),
    "memory_in_flight_bytes": ("device_in_flight_bytes", "Of the required: rows of this step"),
    "memory_index_keys_bytes": ("device_index_key_bytes", "Of the required: keys of the indexer"),
    "memory_slot_maps_bytes": ("device_slot_map_bytes", "Of the required: which row is where"),
    "memory_host_used_bytes": ("host_used_bytes", "Host memory that requests hold"),
    "memory_host_free_bytes": ("host_free_bytes", "Host memory for KV that nothing holds"),
}
"""Field of a sample -> name and meaning."""

COUNTERS = {
    "step": ("steps", "Engine steps"),
    "decode_steps": ("decode_steps", "Engine steps that decoded"),
    "generated_tokens": ("generated_tokens", "Tokens decided"),
    "finished": ("engine_requests_ended", "Requests that ended, for whatever reason"),
    "preemptions": ("preemptions", "Requests put back to the host"),
    "expired": ("deadlines_missed", "Requests given up at their deadline"),
    "selected_rows": ("selected_rows", "Rows that decoding selected"),
    "unique_rows": ("unique_rows", "Rows that decoding wanted, each once per step"),
    "fetched_rows": ("fetched_rows", "Rows that decoding missed and fetched from the host"),
    "host_to_device_bytes": ("host_to_device_bytes", "Bytes fetched from the host"),
    "device_to_host_bytes": ("device_to_host_bytes", "Bytes written to the host"),
    "request_waves": ("request_waves", "Passes that steps took beyond the first"),
    "release_steps": ("release_steps", "Steps that released hot rows"),
    "shortages": ("shortages", "Times a context could not grow without taking memory back"),
    "busy_seconds": ("busy_seconds", "Wall time inside engine steps"),
    "decisions": ("controller_decisions", "Plans asked of the controller"),
    "projections": ("controller_projections", "Plans altered to fit"),
    "fallbacks": ("controller_fallbacks", "Decisions made by the fallback, the controller failed"),
}
"""Field of a sample -> name and meaning. They start again at 0 with the engine."""

# Seconds, from a fast step on a GPU to a long prompt on a CPU.
_SHORT = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0)
_LONG = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0)


class ServerMetrics:
    """The server's own registry. sample: the engine's last sample; accepted_length is absent from it
    where nothing is drafted. view: (ready, restarts, policy)."""

    def __init__(
        self,
        sample: Callable[[], Mapping[str, Any]],
        view: Callable[[], tuple[bool, int, Mapping[str, Any]]],
    ) -> None:
        self._sample, self._view = sample, view
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.calls = self._counter("http_requests", "Calls by path and status", "path", "status")
        self.ended = self._counter("requests", "Requests (choices) by how they ended", "reason")
        self.rejected = self._counter("rejections", "Calls refused with 429, by what binds", "tier")
        self.swaps = self._counter("policy_swaps", "Swaps of the policy", "origin", "outcome")
        self.lost = self._counter("clients_lost", "Calls whose client left or stalled", "how")
        self.ttft = self._histogram(
            "ttft_seconds", "From the engine's queue to the first token", _LONG
        )
        self.tpot = self._histogram("tpot_seconds", "Time per token after the first", _SHORT)
        self.latency = self._histogram(
            "request_seconds", "From a request's arrival to its end", _LONG
        )
        self.registry.register(self)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"kvpolicy_{name}", about, labels, registry=self.registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"kvpolicy_{name}", about, buckets=buckets, registry=self.registry)

    def note_end(self, choice: Choice) -> None:
        """Count a request that has ended, and how long it took."""
        self.ended.labels(choice.reason).inc()
        self.latency.observe(time.perf_counter() - choice.group.arrived)
        for name, histogram in (("ttft", self.ttft), ("tpot", self.tpot)):
            if (seconds := choice.record.get(name)) is not None:
                histogram.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """What the engine said last."""
        sample = self._sample()
        for key, (name, about) in GAUGES.items():
            if key in sample:
                yield GaugeMetricFamily(f"kvpolicy_{name}", about, value=sample[key])
        for key, (name, about) in COUNTERS.items():
            if key in sample:
                yield CounterMetricFamily(f"kvpolicy_{name}", about, value=sample[key])
        if sample.get("unique_rows"):
            rate = sample["fetched_rows"] / sample["unique_rows"]
            about = "Fetched of unique rows since the engine started"
            yield GaugeMetricFamily("kvpolicy_miss_rate", about, value=rate)
        if sample.get("accepted_length") is not None:
            about = "Tokens per verification, the bonus token counted"
            yield GaugeMetricFamily(
                "kvpolicy_accepted_length", about, value=sample["accepted_length"]
            )
        put_off = CounterMetricFamily(
            "kvpolicy_deferred_admissions",
            "Requests put off, by what bound first",
            labels=["tier"],
        )
        for tier, count in sample.get("deferred", {}).items():
            put_off.add_metric([tier], count)
        yield put_off
        yield from self._engine()

    def _engine(self) -> Iterator[Metric]:
        ready, restarts, policy = self._view()
        yield GaugeMetricFamily("kvpolicy_engine_up", "1 if the engine serves", value=ready)
        yield CounterMetricFamily(
            "kvpolicy_engine_restarts", "Engines that ended and were replaced", value=restarts
        )
        names = ["controller", "eviction"]
        info = GaugeMetricFamily("kvpolicy_policy", "The policy in force", labels=names)
        info.add_metric([str(policy.get(name) or "") for name in names], 1)
        yield info

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)
