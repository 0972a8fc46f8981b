"""What a policy is judged by, in training and on the leaderboard alike: goodput, and alternatives by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass

from kvpolicy.errors import unknown_name
from kvpolicy.telemetry.latency import Latencies
from kvpolicy.telemetry.slo import Slo

__all__ = ["REWARDS", "Baseline", "GoodputMeter", "Terms", "reward_named"]


@dataclass(frozen=True, slots=True)
class Terms:
    """What happened in a stretch of time. Every reward is made of these.

    seconds: how long it was, by the engine's clock. tokens: generated. good_tokens: of requests inside
    the bounds (see GoodputMeter). finished, good_finished: requests that ended, those of them inside.
    link_bytes: copied from the host. waiting_seconds: time that requests waited for memory, summed.
    preemptions: requests put back.
    """

    seconds: float
    tokens: int
    good_tokens: int
    finished: int
    good_finished: int
    link_bytes: int
    waiting_seconds: float
    preemptions: int

    def to_dict(self) -> dict[str, float]:
        """By name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Baseline:
    """What an episode is measured against. name: whose numbers these are. tokens_per_s: its goodput;
    seconds: length of the episode; bytes_per_token: what it copied from the host."""

    name: str
    tokens_per_s: float
    seconds: float
    bytes_per_token: float = 1.0

    @property
    def tokens(self) -> float:
        """Good tokens of the whole episode."""
        return max(self.tokens_per_s * self.seconds, 1e-9)


def goodput(terms: Terms, baseline: Baseline) -> float:
    """Good tokens over those of the baseline in the whole episode: rewards of an episode sum to its goodput
    in units of the baseline's."""
    return terms.good_tokens / baseline.tokens


def throughput(terms: Terms, baseline: Baseline) -> float:
    """The same of all tokens, late or not."""
    return terms.tokens / baseline.tokens


def link_bytes(terms: Terms, baseline: Baseline) -> float:
    """Bytes from the host, negative, in units of what the baseline copies for a whole episode."""
    return -terms.link_bytes / max(baseline.bytes_per_token * baseline.tokens, 1e-9)


def latency(terms: Terms, baseline: Baseline) -> float:
    """Goodput less the time that requests waited for memory, in units of the episode's length."""
    return goodput(terms, baseline) - terms.waiting_seconds / max(baseline.seconds, 1e-9)


REWARDS: Mapping[str, Callable[[Terms, Baseline], float]] = {
    "goodput": goodput,
    "throughput": throughput,
    "bytes": link_bytes,
    "latency": latency,
}
"""Rewards by name; the leaderboard's is ``goodput``."""


def reward_named(name: str) -> Callable[[Terms, Baseline], float]:
    """A reward. UserError for an unknown name."""
    if name not in REWARDS:
        raise unknown_name("reward", name, REWARDS)
    return REWARDS[name]


class GoodputMeter:
    """Counts good tokens as they come, so that the counts of an episode sum to its goodput.

    A request's tokens count while it is inside the bounds. If it falls out, all that was counted of it is
    taken back; if it comes back inside, it counts again.
    """

    def __init__(self, slo: Slo | None) -> None:
        self.slo = slo
        self._counted: dict[int, int] = {}

    def update(self, requests: Iterable[tuple[int, Latencies, bool]]) -> tuple[int, int]:
        """(id, moments, ended) of requests that run or have just ended; each ends once. Returns good tokens
        since the last call (negative where some are taken back), and how many ended inside the bounds."""
        change = inside = 0
        for number, moments, ended in requests:
            good = self.slo is None or self.slo.holds(moments)
            now = moments.tokens if good else 0
            change += now - self._counted.get(number, 0)
            if ended:
                self._counted.pop(number, None)
                inside += good
            else:
                self._counted[number] = now
        return change, inside
