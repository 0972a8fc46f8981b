"""Registered scenarios: a load, an engine and latency bounds, in splits that share no request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvpolicy.config import EngineConfig
from kvpolicy.errors import UserError, unknown_name
from kvpolicy.geometry.dsa import whole_groups
from kvpolicy.geometry.geometry import Geometry
from kvpolicy.geometry.presets import preset
from kvpolicy.telemetry.reward import Baseline
from kvpolicy.telemetry.slo import Slo, parse_slo
from kvpolicy.workloads import registry
from kvpolicy.workloads.uri import parse_uri
from kvpolicy.workloads.workload import Workload

__all__ = ["FAMILIES", "SCENARIOS", "SPLITS", "Family", "Scenario", "find", "scenario_names"]

SPLITS: Mapping[str, tuple[float, float]] = {
    "train": (0.0, 0.7),
    "validation": (0.7, 0.85),
    "test": (0.85, 1.0),
}
"""Split -> its part of a trace, from and to. Synthetic loads have seeds of their own in each split."""

# Seeds of a split: as many episodes as anybody trains.
SEEDS = 1 << 20


@dataclass(frozen=True)
class Family:
    """The engine of several scenarios. engine: its config. recording: what requests of the twin select.
    context: over how many entries that is stretched, None for requests as they were recorded. cost: the
    twin's calibration. dummy contexts: arrivals come with their prompt computed, but for ``read`` tokens.
    """

    name: str
    about: str
    engine: Mapping[str, Any]
    recording: str
    context: int | None
    cost: str
    read: int | None = None

    def geometry(self) -> Geometry:
        """Of its model."""
        whole = preset(str(self.engine["model"]))
        layers = self.engine.get("layers")
        return whole if layers is None else whole_groups(whole, int(layers))


@dataclass(frozen=True)
class Scenario:
    """A load on a family's engine. workload: a URI without a seed, its time on the wall clock; closed
    or open.
    slo: bounds as of ``--slo``. engine: what differs from the family's. most_tokens: longest request.
    goodput: tokens per second of the policy it is measured against, None for the tokens that its load asks
    for; of: which policy that is.
    """

    name: str
    about: str
    family: str
    workload: str
    slo: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    most_tokens: int = 0
    goodput: float | None = None
    of: str = ""

    def baseline(self, load: Workload) -> Baseline:
        """What an episode's reward is measured in: the stated policy's goodput; else that of a policy which
        serves all that arrives in time, or, where a level is kept, one token per request and TPOT bound."""
        if self.goodput is not None:
            return Baseline(self.of, self.goodput, load.end)
        if load.closed:
            each = self.bounds.tpot or 1.0
            held = sum((p.level or 0) * (p.end - p.start) for p in load.phases) / load.end
            return Baseline("everyone at the bound", held / each, load.end)
        asked = sum(arrival.max_new_tokens for arrival in load.requests())
        return Baseline("all that arrives", asked / load.end, load.end)

    @property
    def bounds(self) -> Slo:
        """The latency bounds."""
        return parse_slo(self.slo)

    @property
    def own(self) -> Family:
        """Its family."""
        return FAMILIES[self.family]

    @property
    def contexts(self) -> tuple[int, ...]:
        """Lengths to prepare graphs for: what contexts begin at and what they reach, where that is long."""
        start = self.own.context
        if start is None:
            return ()
        found = [1 << (start - 1).bit_length()]
        while found[-1] < self.most_tokens:
            found.append(2 * found[-1])
        return tuple(min(each, self.most_tokens) for each in found)

    def config(self, **changes: Any) -> EngineConfig:
        """The engine's config, with changes. UserError for what cannot be."""
        values = {**self.own.engine, **self.engine, **changes}
        if values.get("dummy_weights") and "selection" not in values:
            values["selection"] = f"{self.own.recording}:context={self.own.context}"
        return EngineConfig(**values)

    def load(self, split: str, random: np.random.Generator, clock: str = "wall") -> Workload:
        """An episode's load, drawn from a split. UserError for an unknown split."""
        if split not in SPLITS:
            raise unknown_name("split", split, SPLITS)
        number = list(SPLITS).index(split)
        seed = number * SEEDS + int(random.integers(SEEDS))
        uri = self.workload
        if parse_uri(uri).scheme == "trace":
            low, high = SPLITS[split]
            # The last twentieth of a split is not begun in: an episode must end inside it.
            begin = low + (high - low) * 0.95 * float(random.random())
            uri += f"&begin={begin:.6f}"
        return registry.make(f"{uri}&seed={seed}", clock)


FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family(
            "tiny",
            "tiny-dsa, its own selections; on a GPU a miss costs next to nothing",
            {
                "model": "tiny-dsa",
                "controller": "adaptive",
                "device_kv_mib": 48.0,
                "host_kv_mib": 1024.0,
                "max_concurrency": 16,
                "prefill_chunk": 512,
            },
            recording="tiny-dsa-step",
            context=None,
            cost="estimate",
        ),
        Family(
            "glm-5.3-slice",
            "16 of GLM-5.3's layers, dummy weights, tiny-dsa's selections stretched to its top-k",
            {
                "model": "glm-5.3",
                "dummy_weights": True,
                "layers": 16,
                "vocab": 1024,
                "dtype": "bfloat16",
                "kv_dtype": "fp8",
                "controller": "adaptive",
                "device_kv_mib": 2048.0,
                "host_kv_mib": 24576.0,
                "max_concurrency": 32,
                "prefill_chunk": 64,
            },
            recording="tiny-dsa-step",
            context=49152,
            cost="estimate",
            read=1,
        ),
    )
}

_TINY = "text=heldout&prompt_bytes=3000-8000&output_tokens=100"
_SLICE = "text=heldout&prompt_bytes=49300-57000&output_tokens=100-300"
_BOUNDS = "tpot_ms=20,ttft_ms=1000"

SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "load-step",
            "3 requests kept in the system, then 24, then 3",
            "glm-5.3-slice",
            f"synthetic:step?low=3&high=24&duration=2&{_SLICE}",
            _BOUNDS,
            most_tokens=57344,
        ),
        Scenario(
            "burst",
            "a steady trickle, and three bursts of 12 requests",
            "glm-5.3-slice",
            f"synthetic:burst?rate=4&high=12&duration=6&{_SLICE}",
            _BOUNDS,
            most_tokens=57344,
        ),
        Scenario(
            "pressure",
            "steady arrivals in two thirds of the memory",
            "glm-5.3-slice",
            f"synthetic:poisson?rate=6&duration=6&{_SLICE}",
            _BOUNDS,
            {"device_kv_mib": 1344.0},
            most_tokens=57344,
        ),
        Scenario(
            "long-mix",
            "one request in five is twice as long",
            "glm-5.3-slice",
            f"synthetic:longmix?rate=5&duration=6&long=2&{_SLICE}",
            _BOUNDS,
            most_tokens=114688,
        ),
        Scenario(
            "diurnal",
            "arrivals that swell and fade",
            "glm-5.3-slice",
            f"synthetic:diurnal?rate=6&duration=6&{_SLICE}",
            _BOUNDS,
            most_tokens=57344,
        ),
        Scenario(
            "azure",
            "arrivals of Azure's chat trace",
            "glm-5.3-slice",
            f"trace:azure-conv?rate=6&duration=6&{_SLICE}",
            _BOUNDS,
            most_tokens=57344,
        ),
        Scenario(
            "tiny",
            "tiny-dsa: a few short requests, for a CPU",
            "tiny",
            "synthetic:step?low=2&high=4&duration=4&text=heldout&prompt_bytes=200-400&output_tokens=48",
            "tpot_ms=200,ttft_ms=5000",
            {"device_kv_mib": 16.0, "max_concurrency": 4, "prefill_chunk": 64},
        ),
        Scenario(
            "tiny-burst",
            "tiny-dsa: a steady trickle, and three bursts of 8 requests",
            "tiny",
            f"synthetic:burst?rate=4&high=8&duration=8&{_TINY}",
            "tpot_ms=20,ttft_ms=1000",
        ),
        Scenario(
            "tiny-pressure",
            "tiny-dsa: steady arrivals in little memory",
            "tiny",
            f"synthetic:poisson?rate=10&duration=8&{_TINY}",
            "tpot_ms=20,ttft_ms=1000",
            {"device_kv_mib": 32.0},
        ),
    )
}
"""Scenarios by name."""


def scenario_names() -> list[str]:
    """Every registered scenario."""
    return list(SCENARIOS)


def find(name: str) -> Scenario:
    """A scenario. UserError for an unknown name."""
    if name not in SCENARIOS:
        raise unknown_name("scenario", name, SCENARIOS)
    scenario = SCENARIOS[name]
    if scenario.own.context is not None and not scenario.most_tokens:
        raise UserError(
            f"scenario {name!r}: most_tokens must be given where selections are stretched"
        )
    return scenario
