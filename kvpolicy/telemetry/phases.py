"""What a run was like in each phase of its workload."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvpolicy.telemetry.latency import ROUNDING_S, Latencies, percentiles_ms
from kvpolicy.telemetry.slo import Slo, goodput
from kvpolicy.telemetry.timeline import Mark, Timeline

DRAIN = "drain"
"""The phase after the last: nothing arrives, what is in the system ends."""


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """One phase. Counts and rates are of the phase alone; times in seconds of the engine's clock.

    start, end: from the start of the run. arrived, ended: requests. tpot_ms, slo_share: of the
    requests that ended in the phase; ttft_ms, longest_wait_*: of those that arrived in it.
    goodput_tokens_per_s: the phase's tokens of requests inside the bounds, whenever these end.
    *_mean, idle_share (free over all device memory): over its samples. rise_steps: steps until
    everything that a rise of the level brought was admitted. step_ms: wall time per decode step.
    """

    name: str
    level: int | None
    start: float
    end: float
    steps: int
    arrived: int
    ended: int
    miss_rate: float | None
    miss_rate_selected: float | None
    fetched_rows: int
    host_to_device_bytes: int
    generated_tokens: int
    tokens_per_s: float | None
    goodput_tokens_per_s: float | None
    slo_share: float | None
    tpot_ms: dict[str, float | None]
    ttft_ms: dict[str, float | None]
    step_ms: float | None
    running_mean: float
    waiting_mean: float
    required_bytes_mean: float
    optional_bytes_mean: float
    idle_share: float
    longest_wait_steps: int | None
    longest_wait_s: float | None
    rise_steps: int | None
    preemptions: int

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Window:
    """The samples from ``first`` to ``stop`` of a timeline, both included."""

    timeline: Timeline
    first: int
    stop: int

    def at(self, name: str, sample: int) -> float:
        return float(self.timeline.column(name)[sample])

    def gained(self, name: str) -> float:
        return self.at(name, self.stop) - self.at(name, self.first)

    def share(self, part: str, whole: str) -> float | None:
        return _share(self.gained(part), self.gained(whole))

    def mean(self, name: str) -> float:
        """The first sample shows the state that the phase found, the later ones what it made of it."""
        inside = slice(min(self.first + 1, self.stop), self.stop + 1)
        return float(self.timeline.column(name)[inside].mean())


def phase_reports(
    timeline: Timeline, requests: Sequence[Latencies], slo: Slo | None
) -> list[PhaseReport]:
    """One report per phase of the timeline, the drain included.

    requests: of the run, in the order they were submitted.
    """
    marks = timeline.marks
    time = timeline.column("time")
    stops = [*(mark.sample for mark in marks[1:]), len(timeline) - 1]
    # A phase begins when it is due, its first sample is taken when the step of that moment is over.
    due = [timeline.origin + mark.phase.start - ROUNDING_S for mark in marks]
    reports = []
    for mark, stop, begin, over in zip(marks, stops, due, [*due[1:], math.inf], strict=True):
        start, end = float(time[mark.sample]), float(time[stop])
        until = math.inf if mark is marks[-1] else end
        requests_of = _Requests(
            arrived=[r for r in requests if begin <= r.arrived < over],
            ended=[r for r in requests if start <= (r.last_token or -math.inf) < until],
            rise_steps=_rise(mark, requests),
            goodput=goodput(requests, slo, start, end),
        )
        reports.append(_report(_Window(timeline, mark.sample, stop), mark, requests_of, slo))
    return reports


@dataclass(frozen=True, slots=True)
class _Requests:
    """What the requests say about one phase."""

    arrived: Sequence[Latencies]
    ended: Sequence[Latencies]
    rise_steps: int | None
    goodput: float | None


def _report(
    window: _Window,
    mark: Mark,
    requests: _Requests,
    slo: Slo | None,
) -> PhaseReport:
    arrived, ended = requests.arrived, requests.ended
    seconds, origin = window.gained("time"), window.timeline.origin
    free = window.mean("free_bytes")
    used = window.mean("required_bytes") + window.mean("optional_bytes")
    busy, decode_steps = window.gained("busy_seconds"), window.gained("decode_steps")
    return PhaseReport(
        name=mark.phase.name,
        level=mark.phase.level,
        start=window.at("time", window.first) - origin,
        end=window.at("time", window.stop) - origin,
        steps=int(window.gained("step")),
        arrived=len(arrived),
        ended=len(ended),
        miss_rate=window.share("fetched_rows", "unique_rows"),
        miss_rate_selected=window.share("fetched_rows", "selected_rows"),
        fetched_rows=int(window.gained("fetched_rows")),
        host_to_device_bytes=int(window.gained("host_to_device_bytes")),
        generated_tokens=int(window.gained("generated_tokens")),
        tokens_per_s=_share(window.gained("generated_tokens"), seconds),
        goodput_tokens_per_s=requests.goodput,
        slo_share=None if slo is None else _share(sum(map(slo.holds, ended)), len(ended)),
        tpot_ms=percentiles_ms([r.tpot for r in ended if r.tpot is not None]),
        ttft_ms=percentiles_ms([r.ttft for r in arrived if r.ttft is not None]),
        step_ms=_share(busy * 1e3, decode_steps),
        running_mean=window.mean("running"),
        waiting_mean=window.mean("waiting"),
        required_bytes_mean=window.mean("required_bytes"),
        optional_bytes_mean=window.mean("optional_bytes"),
        idle_share=free / max(free + used, 1.0),  # a server may not show its memory
        longest_wait_steps=max((r.waited_steps or 0 for r in arrived), default=None),
        longest_wait_s=max((r.wait or 0.0 for r in arrived), default=None),
        rise_steps=requests.rise_steps,
        preemptions=int(window.gained("preemptions")),
    )


def _rise(mark: Mark, requests: Sequence[Latencies]) -> int | None:
    """The longest wait, in steps, of what a rise brought; None without one or if some never started."""
    waits = [requests[i].waited_steps for i in mark.rise]
    known = [steps for steps in waits if steps is not None]
    return max(known) if known and len(known) == len(waits) else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
