"""A scenario under one controller from start to end, on the engine or on its twin: the same numbers
of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from kvpolicy.config import SamplingParams
from kvpolicy.engine.engine import Engine
from kvpolicy.engine.handle import RequestHandle
from kvpolicy.episodes.scenarios import Scenario
from kvpolicy.episodes.twin import submit_to
from kvpolicy.telemetry.latency import Latencies
from kvpolicy.telemetry.slo import Slo, goodput
from kvpolicy.twin.engine import TwinEngine
from kvpolicy.twin.records import Window, WorkLog
from kvpolicy.workloads.runner import Runner
from kvpolicy.workloads.workload import Arrival, Workload

__all__ = ["Served", "serve"]


@dataclass(frozen=True)
class Served:
    """What became of a load. requests: moments of each, seconds from the start. seconds: of the load.
    counts: what happened, by metric's name. windows: of live runs, see WorkLog. first: number of the first
    request, which decides what stretched selections it replays."""

    scenario: str
    controller: str
    uri: str
    seconds: float
    requests: tuple[Latencies, ...]
    counts: Mapping[str, float]
    windows: tuple[Window, ...] = field(default=(), repr=False)
    first: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Tokens generated in the load's time, per second of it."""
        return sum(r.tokens_between(0.0, self.seconds) for r in self.requests) / self.seconds

    def goodput(self, slo: Slo) -> float:
        """The same of requests inside the bounds; those that have not ended are judged as they are."""
        return goodput(self.requests, slo, 0.0, self.seconds) or 0.0

    @property
    def miss_rate(self) -> float:
        """Fetched rows over selected rows."""
        return self.counts["fetched_rows"] / max(self.counts["selected_rows"], 1)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "scenario": self.scenario,
            "controller": self.controller,
            "uri": self.uri,
            "seconds": self.seconds,
            "requests": [list(asdict(r).values()) for r in self.requests],
            "counts": dict(self.counts),
            "windows": [window.to_list() for window in self.windows],
            "first": self.first,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Served:
        """As :meth:`to_dict` gave it."""
        return cls(
            values["scenario"],
            values["controller"],
            values["uri"],
            values["seconds"],
            tuple(Latencies(*each) for each in values["requests"]),
            values["counts"],
            tuple(Window.from_list(each) for each in values["windows"]),
            values["first"],
        )


_COUNTED = (
    "selected_rows",
    "fetched_rows",
    "host_to_device_bytes",
    "generated_tokens",
    "preemptions",
)


def serve(
    engine: Engine | TwinEngine, scenario: Scenario, controller: str, load: Workload
) -> Served:
    """Serve a load under a controller, which the engine is given; at the load's end what is left is
    cancelled.
    The engine may serve another one afterwards."""
    engine.set_controller(controller)
    engine.set_slo(scenario.bounds)
    live = engine if isinstance(engine, Engine) else None
    read = scenario.own.read

    def submit(arrival: Arrival, params: SamplingParams) -> RequestHandle:
        return submit_to(engine, read, arrival, params)

    runner = Runner(
        cast(Engine, engine), load, every=1 << 30, submit=submit, contexts=scenario.contexts
    )
    before = _counts(engine)
    log = None if live is None else WorkLog(live)
    runner.start()
    if log is not None:
        log.begin()
    try:
        while runner.ready() and runner.now < load.end:
            done = engine.step()
            if log is not None and not done:
                log.cut()
            runner.worked(done)
            if log is not None:
                log.note() if done else log.begin()
        if log is not None:
            log.cut()
    finally:
        if log is not None:
            log.leave()
    after, origin = _counts(engine), runner.timeline.origin
    requests = tuple(_moments(h.latencies, runner.due.get(h.id), origin) for h in runner.handles)
    for handle in runner.handles:
        handle.cancel()
    counts = {name: after[name] - before[name] for name in after}
    windows = () if log is None else tuple(log.windows)
    first = runner.handles[0].id if runner.handles else 0
    return Served(scenario.name, controller, load.uri, load.end, requests, counts, windows, first)


def _counts(engine: Engine | TwinEngine) -> dict[str, float]:
    if isinstance(engine, Engine):
        engine.memory.counted()  # waits for the device
    metrics = engine.metrics()
    names = (*_COUNTED, "controller_decisions", "controller_fallbacks", "steps")
    return {name: float(metrics[name]) for name in names}


def _moments(moments: Latencies, due: float | None, origin: float) -> Latencies:
    def since(value: float | None) -> float | None:
        return None if value is None else value - origin

    arrived = moments.arrived if due is None else due
    return Latencies(
        arrived - origin,
        since(moments.admitted),
        since(moments.first_token),
        since(moments.last_token),
        moments.waited_steps,
        moments.tokens,
    )
