"""What happened between two decisions, in the terms of the reward."""

from __future__ import annotations

from typing import Protocol

from kvpolicy.engine.handle import RequestHandle
from kvpolicy.engine.metrics import Sample
from kvpolicy.telemetry.latency import Latencies
from kvpolicy.telemetry.reward import GoodputMeter, Terms
from kvpolicy.telemetry.slo import Slo

__all__ = ["Measuring"]


class _Sampled(Protocol):
    def sample(self) -> Sample: ...


class Measuring:
    """Follows the requests of one episode. slo: what good tokens are."""

    def __init__(self, engine: _Sampled, slo: Slo | None) -> None:
        self._engine, self._meter = engine, GoodputMeter(slo)
        self._open: list[tuple[RequestHandle, float | None]] = []
        self._last = engine.sample()

    def follow(self, handle: RequestHandle, due: float | None) -> None:
        """Count a request. due: when it came, where that was before it was submitted."""
        self._open.append((handle, due))

    def terms(self) -> Terms:
        """What happened since the last call."""
        now, last = self._engine.sample(), self._last
        self._last = now
        found, still, good = [], [], 0
        for handle, due in self._open:
            moments, ended = handle.latencies, handle.done
            if moments.first_token is not None or ended:
                found.append((handle.id, _since(moments, due), ended))
            if not ended:
                still.append((handle, due))
        self._open = still
        good, inside = self._meter.update(found)
        seconds = now.time - last.time
        return Terms(
            seconds=seconds,
            tokens=now.generated_tokens - last.generated_tokens,
            good_tokens=good,
            finished=now.finished - last.finished,
            good_finished=inside,
            link_bytes=now.host_to_device_bytes - last.host_to_device_bytes,
            waiting_seconds=now.waiting * seconds,
            preemptions=now.preemptions - last.preemptions,
        )


def _since(moments: Latencies, due: float | None) -> Latencies:
    if due is None:
        return moments
    return Latencies(
        due,
        moments.admitted,
        moments.first_token,
        moments.last_token,
        moments.waited_steps,
        moments.tokens,
    )
