"""How far the twin is from the machine: the same loads and controllers, live and in the twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvpolicy.episodes.scenarios import find
from kvpolicy.episodes.serving import Served, serve
from kvpolicy.episodes.twin import make_twin
from kvpolicy.twin.cost import CostModel
from kvpolicy.workloads import registry

__all__ = ["Gap", "ScenarioGap", "gaps", "replayed"]

# Rates this close are a tie: no ranking is read into them.
TIE = 0.01


@dataclass(frozen=True)
class Gap:
    """One controller. Rates are tokens per second, live and in the twin."""

    controller: str
    live: float
    twin: float
    live_goodput: float
    twin_goodput: float
    live_miss_rate: float
    twin_miss_rate: float

    @property
    def throughput(self) -> float:
        """Twin over live, less 1."""
        return self.twin / self.live - 1 if self.live else 0.0

    @property
    def reward(self) -> float:
        """The same of goodput; 0 where both are 0."""
        if not self.live_goodput:
            return 0.0 if not self.twin_goodput else float("inf")
        return self.twin_goodput / self.live_goodput - 1

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "controller": self.controller,
            "live_tokens_per_s": self.live,
            "twin_tokens_per_s": self.twin,
            "throughput_gap": self.throughput,
            "live_goodput": self.live_goodput,
            "twin_goodput": self.twin_goodput,
            "reward_gap": self.reward,
            "live_miss_rate": self.live_miss_rate,
            "twin_miss_rate": self.twin_miss_rate,
        }


@dataclass(frozen=True)
class ScenarioGap:
    """All controllers of one scenario."""

    scenario: str
    gaps: tuple[Gap, ...]

    @property
    def worst(self) -> float:
        """Largest gap in throughput, absolute."""
        return max((abs(gap.throughput) for gap in self.gaps), default=0.0)

    def order(self, of: str) -> list[str]:
        """Controllers from the best on, by an attribute of Gap."""
        return [
            g.controller for g in sorted(self.gaps, key=lambda g: (-getattr(g, of), g.controller))
        ]

    def agrees(self, live: str, twin: str) -> bool:
        """Whether no two controllers that differ by more than TIE in both change places."""
        for one in self.gaps:
            for other in self.gaps:
                a, b = getattr(one, live), getattr(other, live)
                x, y = getattr(one, twin), getattr(other, twin)
                if a > b * (1 + TIE) and y > x * (1 + TIE):
                    return False
        return True

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "scenario": self.scenario,
            "worst_throughput_gap": self.worst,
            "same_ranking_by_throughput": self.agrees("live", "twin"),
            "same_ranking_by_goodput": self.agrees("live_goodput", "twin_goodput"),
            "live_order": self.order("live_goodput"),
            "twin_order": self.order("twin_goodput"),
            "controllers": [gap.to_dict() for gap in self.gaps],
        }


def replayed(run: Served, recording: str | None, cost: str | CostModel | None) -> Served:
    """The twin of a live run: its load, under its controller."""
    scenario = find(run.scenario)
    engine = make_twin(scenario, run.controller, recording, cost, run.first)
    try:
        return serve(engine, scenario, run.controller, registry.make(run.uri))
    finally:
        engine.close()


def gaps(
    runs: Sequence[Served], recording: str | None = None, cost: str | CostModel | None = None
) -> list[ScenarioGap]:
    """Live runs against their twins, scenario by scenario."""
    found: dict[str, list[Gap]] = {}
    for run in runs:
        twin, bounds = replayed(run, recording, cost), find(run.scenario).bounds
        found.setdefault(run.scenario, []).append(
            Gap(
                run.controller,
                run.tokens_per_s,
                twin.tokens_per_s,
                run.goodput(bounds),
                twin.goodput(bounds),
                run.miss_rate,
                twin.miss_rate,
            )
        )
    return [ScenarioGap(name, tuple(each)) for name, each in found.items()]
