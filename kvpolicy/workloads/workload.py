"""What a workload is: requests that arrive at given times, or a number of them kept in the system."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice

from kvpolicy.telemetry.timeline import Phase

__all__ = ["Arrival", "Phase", "Workload"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. time: seconds of the engine's clock from the start (0 where the load is a level).

    seed: of its sampling.
    """

    time: float
    prompt: bytes
    max_new_tokens: int
    seed: int


@dataclass(frozen=True)
class Workload:
    """A reproducible stream of requests.

    uri: what it was made from, every default written out. phases: cover the time from 0 to the end,
    in order. requests: a new iterator over the same requests at every call, ordered by time, perhaps
    endless where ``closed``. closed: requests come as others end, so that as many are in the system
    as the phase's level says; else each comes at its time.
    """

    uri: str
    phases: tuple[Phase, ...]
    requests: Callable[[], Iterator[Arrival]]
    closed: bool

    @property
    def end(self) -> float:
        """Seconds from the start until nothing arrives any more."""
        return self.phases[-1].end

    @property
    def peak(self) -> int | None:
        """The highest level of a closed workload."""
        return max((phase.level or 0 for phase in self.phases), default=0) if self.closed else None

    def at_level(self, level: int, count: int) -> Workload:
        """The first ``count`` requests again (round and round if there are fewer), ``level`` at a
        time: a closed workload of one phase that ends with the last of them."""

        def requests() -> Iterator[Arrival]:
            again = cycle(self.requests()) if not self.closed else self.requests()
            return (replace(arrival, time=0.0) for arrival in islice(again, count))

        phase = Phase(f"level {level}", 0.0, float("inf"), level)
        return Workload(self.uri, (phase,), requests, closed=True)
