"""Seeded workloads: levels of concurrency, and arrivals drawn from Poisson processes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import count
from typing import Annotated

from pydantic import Field

from kvpolicy.errors import UserError
from kvpolicy.workloads.draws import exponential_times, uniforms
from kvpolicy.workloads.texts import Corpus, load_corpus
from kvpolicy.workloads.uri import MAX_REQUESTS, Length, Parameters, Rate, Span
from kvpolicy.workloads.workload import Arrival, Phase, Workload

__all__ = ["Burst", "Diurnal", "Longmix", "Poisson", "Step"]

Level = Annotated[int, Field(ge=0, le=4096)]

# Of `diurnal`: the rate swings by this part of its mean, so that the peak is nine times the trough.
SWING = 0.8
# Of `longmix`: this part of the requests has a longer prompt.
LONG_SHARE = 0.2
# Of `burst`: when groups come, as parts of the duration.
BURSTS = (0.25, 0.5, 0.75)


class Synthetic(Parameters):
    """Lengths that a small model on a CPU decodes in seconds."""

    prompt_bytes: Length = Span(256, 768)
    output_tokens: Length = Span(64, 64)

    def arrival(self, corpus: Corpus, number: int, time: float) -> Arrival:
        """Request ``number``: its lengths and text depend on the seed and its number alone."""
        prompt, output, place = uniforms(self.seed, number, 3)
        size = self.prompt_size(self.prompt_bytes.at(prompt))
        return Arrival(
            time=time,
            prompt=corpus.piece(place, size),
            max_new_tokens=self.output_size(self.output_tokens.at(output)),
            seed=self.seed,
        )


class Step(Synthetic):
    """A load step: "low" requests kept in the system, then "high", then "low", for "duration" each."""

    low: Level = 4
    high: Level = 16

    def build(self, uri: str, unit: float) -> Workload:
        if self.low > self.high:
            raise UserError(f"low = {self.low}: must not exceed high = {self.high}")
        corpus = load_corpus(self.text)
        levels = (("low", self.low), ("high", self.high), ("low again", self.low))
        phases = (
            Phase(name, i * self.duration * unit, (i + 1) * self.duration * unit, level)
            for i, (name, level) in enumerate(levels)
        )

        def requests() -> Iterator[Arrival]:
            return (self.arrival(corpus, number, 0.0) for number in count())

        return Workload(uri, tuple(phases), requests, closed=True)


class Poisson(Synthetic):
    """Independent arrivals, "rate" a second (or a step) on average, for "duration"."""

    rate: Rate

    def build(self, uri: str, unit: float) -> Workload:
        return self._open(uri, unit, (("steady", 1.0),))

    def times(self) -> Iterable[float]:
        """Arrival times in [0, duration), ascending, in units of the clock."""
        return (time for time, _ in exponential_times(self.seed, self.rate, self.duration))

    def _open(self, uri: str, unit: float, parts: Iterable[tuple[str, float]]) -> Workload:
        """parts: the phases by name, each with its end as a part of the duration."""
        if self.rate * self.duration > MAX_REQUESTS:
            raise UserError(
                f"rate = {self.rate:g}, duration = {self.duration:g}: more than {MAX_REQUESTS} requests"
            )
        corpus, length = load_corpus(self.text), self.duration * unit
        phases, start = [], 0.0
        for name, part in parts:
            phases.append(Phase(name, start, part * length))
            start = part * length

        def requests() -> Iterator[Arrival]:
            numbered = enumerate(self.times())
            return (self.arrival(corpus, number, time * unit) for number, time in numbered)

        return Workload(uri, tuple(phases), requests, closed=False)


class Burst(Poisson):
    """Poisson arrivals at "rate", and "high" requests at once after each quarter of "duration"."""

    high: Level = 8

    def build(self, uri: str, unit: float) -> Workload:
        names = ("calm", *(f"burst {i + 1}" for i in range(len(BURSTS))))
        return self._open(uri, unit, zip(names, (*BURSTS, 1.0), strict=True))

    def times(self) -> Iterable[float]:
        bursts = (part * self.duration for part in BURSTS for _ in range(self.high))
        return merge(super().times(), bursts)


class Diurnal(Poisson):
    """A day: Poisson arrivals whose rate swings from 0.2 x "rate" to 1.8 x "rate" and back."""

    def build(self, uri: str, unit: float) -> Workload:
        return self._open(uri, unit, (("night", 0.25), ("day", 0.75), ("night again", 1.0)))

    def rate_at(self, time: float) -> float:
        """Arrivals per unit of the clock at a moment of the day."""
        return self.rate * (1 - SWING * math.cos(2 * math.pi * time / self.duration))

    def times(self) -> Iterable[float]:
        peak = self.rate * (1 + SWING)  # drawn at the peak's rate, then thinned
        drawn = exponential_times(self.seed, peak, self.duration)
        return (time for time, mark in drawn if mark * peak < self.rate_at(time))


class Longmix(Poisson):
    """Poisson arrivals, one prompt in five "long" (8) times as long as "prompt_bytes" says."""

    long: int = Field(default=8, ge=1, le=4096)

    def arrival(self, corpus: Corpus, number: int, time: float) -> Arrival:
        prompt, output, place, kind = uniforms(self.seed, number, 4)
        factor = self.long if kind < LONG_SHARE else 1
        size = self.prompt_size(self.prompt_bytes.at(prompt) * factor)
        return Arrival(
            time=time,
            prompt=corpus.piece(place, size),
            max_new_tokens=self.output_size(self.output_tokens.at(output)),
            seed=self.seed,
        )
