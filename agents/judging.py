"""Judging controllers: held-out loads on the twin (or the engine), by the reward's own metric."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvpolicy.control.observation import Observation
from kvpolicy.control.plan import Plan
from kvpolicy.controllers import Controller, make
from kvpolicy.episodes.scenarios import Scenario, find
from kvpolicy.episodes.serving import Served, serve
from kvpolicy.episodes.twin import make_twin
from kvpolicy.errors import UserError
from kvpolicy.learned.controller import Learned
from kvpolicy.telemetry.latency import percentiles_ms

__all__ = ["Played", "Row", "artifact_hash", "confidence", "judge", "play", "win_rate"]

RESAMPLES = 10_000


@dataclass(frozen=True)
class Played:
    """One episode. score: goodput over the scenario's baseline, as the rewards of an episode sum up.
    goodput, tokens_per_s: tokens per second. miss_rate: fetched over selected rows. link_bytes: from the
    host. ttft_ms, tpot_ms: p99, None without any. decision_us: median and p99 of ``decide`` on this machine.
    """

    seed: int
    score: float
    goodput: float
    tokens_per_s: float
    miss_rate: float
    link_bytes: float
    ttft_ms: float | None
    tpot_ms: float | None
    decision_us: tuple[float, float]
    decisions: int
    fallbacks: int


@dataclass(frozen=True)
class Row:
    """A controller on a scenario: what a leaderboard keeps. low, high: 95 % of the mean's bootstrap.
    sha256: of its policy artifact, if it has one."""

    controller: str
    scenario: str
    split: str
    live: bool
    cost: str
    sha256: str | None
    mean: float
    low: float
    high: float
    episodes: tuple[Played, ...]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Row:
        """As :meth:`to_dict` gave it. UserError for anything else."""
        try:
            episodes = tuple(
                Played(**{**each, "decision_us": tuple(each["decision_us"])})
                for each in values["episodes"]
            )
            return cls(**{**values, "episodes": episodes})
        except (KeyError, TypeError) as error:
            raise UserError(f"leaderboard row: {error}") from None


class _Timed:
    """A controller whose decisions are timed; everything else it has is its own."""

    def __init__(self, inner: Controller) -> None:
        self.inner = inner
        self.seconds: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def decide(self, observation: Observation) -> Plan:
        start = time.perf_counter()
        try:
            return self.inner.decide(observation)
        finally:
            self.seconds.append(time.perf_counter() - start)


def play(scenario: Scenario, controller: str, split: str, seed: int, live: bool = False) -> Played:
    """One episode: the load that ``seed`` draws from the split, under a fresh controller."""
    timed = _Timed(make(controller))
    load = scenario.load(split, np.random.default_rng(seed))
    served = _serve_live(scenario, timed, load) if live else _serve(scenario, timed, load)
    goodput = served.goodput(scenario.bounds)
    ttft = [v for r in served.requests if (v := r.ttft) is not None]
    tpot = [v for r in served.requests if (v := r.tpot) is not None]
    p50, tail = np.percentile(timed.seconds or [0.0], [50, 99]) * 1e6
    return Played(
        seed=seed,
        score=goodput / scenario.baseline(load).tokens_per_s,
        goodput=goodput,
        tokens_per_s=served.tokens_per_s,
        miss_rate=served.miss_rate,
        link_bytes=served.counts["host_to_device_bytes"],
        ttft_ms=percentiles_ms(ttft)["p99"],
        tpot_ms=percentiles_ms(tpot)["p99"],
        decision_us=(round(float(p50), 1), round(float(tail), 1)),
        decisions=int(served.counts["controller_decisions"]),
        fallbacks=int(served.counts["controller_fallbacks"]),
    )


def _serve(scenario: Scenario, controller: Any, load: Any) -> Served:
    engine = make_twin(scenario, controller)
    try:
        return serve(engine, scenario, controller, load)
    finally:
        engine.close()


def _serve_live(scenario: Scenario, controller: Any, load: Any) -> Served:
    from kvpolicy.engine.engine import Engine

    engine = Engine(scenario.config(controller=controller))
    try:
        return serve(engine, scenario, controller, load)
    finally:
        engine.close()


def judge(
    controllers: Sequence[str],
    scenarios: Sequence[str],
    split: str,
    seeds: Sequence[int],
    live: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """Every controller on every scenario with every seed: loads are the same for all controllers."""
    chosen = [find(name) for name in scenarios]
    hashes = {name: artifact_hash(name) for name in controllers}  # a wrong spec is refused here
    rows = []
    for scenario in chosen:
        for name in controllers:
            played = []
            for seed in seeds:
                played.append(play(scenario, name, split, seed, live))
                say(f"{scenario.name}, seed {seed}: {name} {played[-1].score:.4f}")
            rows.append(row_of(name, scenario, split, live, hashes[name], played))
    return rows


def row_of(
    controller: str,
    scenario: Scenario,
    split: str,
    live: bool,
    sha256: str | None,
    played: Sequence[Played],
) -> Row:
    """Episodes summed up."""
    scores = [each.score for each in played]
    low, high = confidence(scores)
    cost = "live" if live else scenario.own.cost
    mean = float(np.mean(scores))
    return Row(controller, scenario.name, split, live, cost, sha256, mean, low, high, tuple(played))


def artifact_hash(controller: str) -> str | None:
    """SHA-256 of a controller's policy artifact, None if it has none. UserError for a wrong spec."""
    made = make(controller)
    return made.artifact.spec.sha256 if isinstance(made, Learned) else None


def confidence(scores: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean by the percentile bootstrap (Efron 1979), seeded: 10,000 resamples. A single
    score says nothing about its spread: both ends are it."""
    values = np.asarray(scores, dtype=np.float64)
    draw = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.percentile(values[draw].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def win_rate(row: Row, other: Row) -> float:
    """Share of common seeds in which ``row`` has the better score, a tie counting half."""
    theirs = {each.seed: each.score for each in other.episodes}
    pairs = [(each.score, theirs[each.seed]) for each in row.episodes if each.seed in theirs]
    if not pairs:
        return float("nan")
    return float(np.mean([0.5 if a == b else float(a > b) for a, b in pairs]))
