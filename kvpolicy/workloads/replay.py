"""Workloads from traces: the trace's times and lengths, brought to the size of a small model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from kvpolicy.errors import UserError
from kvpolicy.workloads.draws import uniforms
from kvpolicy.workloads.texts import load_corpus
from kvpolicy.workloads.traces import Trace, load_trace
from kvpolicy.workloads.uri import MAX_REQUESTS, Parameters, Rate
from kvpolicy.workloads.workload import Arrival, Phase, Workload

__all__ = ["Replay"]


class Replay(Parameters):
    """Requests of a trace.

    rate: the trace's first ``rate x duration`` requests, their times stretched so that they fill
    the duration; ``trace``: the requests of the trace's first ``duration``, at their own times (a
    second of the trace is a second of the clock). prompt_bytes, output_tokens: instead of
    the trace's lengths, and not scaled. begin: part of the trace's requests that is left out first.
    """

    begin: Annotated[float, Field(ge=0, lt=1)] = 0.0
    rate: Rate | Literal["trace"]

    def build(self, name: str, uri: str, unit: float) -> Workload:
        trace = self._cut(load_trace(name))
        times = self._times(trace, unit)
        corpus = load_corpus(self.text)

        def requests() -> Iterator[Arrival]:
            lengths = zip(trace.inputs, trace.outputs, strict=True)
            for number, (time, (given, made)) in enumerate(zip(times, lengths, strict=False)):
                place, prompt, output = uniforms(self.seed, number, 3)
                size = self.prompt_bytes and self.prompt_bytes.at(prompt)
                tokens = self.output_tokens and self.output_tokens.at(output)
                yield Arrival(
                    time=float(time),
                    prompt=corpus.piece(place, size or self.prompt_size(given)),
                    max_new_tokens=tokens or self.output_size(made),
                    seed=self.seed,
                )

        phase = Phase("trace", 0.0, self.duration * unit)
        return Workload(uri, (phase,), requests, closed=False)

    def _cut(self, trace: Trace) -> Trace:
        """The trace from ``begin`` on, its first request at 0."""
        first = int(self.begin * len(trace))
        if not first:
            return trace
        return replace(
            trace,
            times=trace.times[first:] - trace.times[first],
            inputs=trace.inputs[first:],
            outputs=trace.outputs[first:],
        )

    def _times(self, trace: Trace, unit: float) -> NDArray[np.float64]:
        """Arrival times in seconds of the clock, ascending, inside the duration."""
        length = self.duration * unit
        if self.rate == "trace":
            return trace.times[trace.times < length]
        wanted = self.rate * self.duration
        if not 1 <= wanted <= MAX_REQUESTS:
            raise UserError(
                f"rate = {self.rate:g}, duration = {self.duration:g}: must make 1 to "
                f"{MAX_REQUESTS} requests"
            )
        taken = min(round(wanted), len(trace))
        times = trace.times[:taken]
        if taken < len(trace):  # the request after these would come when the duration is over
            span = float(trace.times[taken])
        else:
            span = float(times[-1]) * wanted / max(taken - 1, 1)
        stretched = times * (length / span) if span > 0 else times
        return np.minimum(stretched, np.nextafter(length, 0.0))
