"""An episode on the deterministic twin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from kvpolicy.config import SamplingParams
from kvpolicy.control.decision import Decision
from kvpolicy.control.observation import Observation
from kvpolicy.controllers import ControllerLike
from kvpolicy.engine.engine import Engine
from kvpolicy.engine.handle import RequestHandle
from kvpolicy.episodes.fluid import FluidEpisodes
from kvpolicy.episodes.measuring import Measuring
from kvpolicy.episodes.scenarios import FAMILIES, Scenario
from kvpolicy.memory.layout import Layout
from kvpolicy.recording import Recording
from kvpolicy.telemetry.reward import Terms
from kvpolicy.twin.cost import CostModel, load_cost
from kvpolicy.twin.engine import TwinEngine, refuse_drafter
from kvpolicy.twin.streams import Streams
from kvpolicy.twin.tables import MissTable, miss_table
from kvpolicy.workloads.runner import Runner
from kvpolicy.workloads.workload import Arrival, Workload

__all__ = ["Outcome", "TwinEpisode", "make_fluid", "make_twin", "submit_to"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an episode gives between two decisions. observation: of the decision that is due, None where the
    episode has ended. decision: the last one, as applied. steps: engine steps. ended: why, or empty;
    failed: it ended because something broke.
    """

    observation: Observation | None
    terms: Terms
    steps: int
    decision: Decision | None = None
    ended: str = ""
    failed: bool = False


@lru_cache(maxsize=8)
def _streams(recording: str, family: str, context: int | None) -> Streams:
    return Streams(Recording(recording), FAMILIES[family].geometry(), context)


@lru_cache(maxsize=8)
def _layout(family: str, kv_dtype: str) -> Layout:
    return Layout(FAMILIES[family].geometry(), kv_dtype)


def make_twin(
    scenario: Scenario,
    controller: ControllerLike,
    recording: str | None = None,
    cost: str | CostModel | None = None,
    first: int = 0,
    **changes: Any,
) -> TwinEngine:
    """The twin of a scenario's engine. recording, cost: instead of its family's. first: number of
    the first request. UserError for what does
    not fit together."""
    family = scenario.own
    config = scenario.config(**{"controller": controller, "clock": "wall", **changes})
    model = cost if isinstance(cost, CostModel) else load_cost(cost or family.cost)
    return TwinEngine(
        config,
        _layout(family.name, config.kv_dtype),
        _streams(recording or family.recording, family.name, family.context),
        model,
        runs_ahead=True,
        most_tokens=scenario.most_tokens,
        first=first,
    )


@lru_cache(maxsize=8)
def _table(recording: str, family: str, context: int | None) -> MissTable:
    return miss_table(_streams(recording, family, context), FAMILIES[family].geometry())


def make_fluid(
    scenario: Scenario,
    count: int,
    draw: Callable[[int], Workload],
    recording: str | None = None,
    cost: str | None = None,
    **changes: Any,
) -> FluidEpisodes:
    """Episodes of the fast fidelity; recording, cost: as of :func:`make_twin`. draw: the next load of
    an episode. UserError for a drafter."""
    family = scenario.own
    config = scenario.config(**changes)
    refuse_drafter(config)
    return FluidEpisodes(
        scenario,
        _layout(family.name, config.kv_dtype),
        _table(recording or family.recording, family.name, family.context),
        load_cost(cost or family.cost),
        count,
        draw,
        **changes,
    )


def submit_to(
    engine: Any, read: int | None, arrival: Arrival, params: SamplingParams
) -> RequestHandle:
    """Give an arrival to an engine: its whole prompt to read, or the last ``read`` tokens behind a context
    that nobody computed."""
    if read is None:
        return cast(RequestHandle, engine.submit(arrival.prompt, params))
    context = max(len(arrival.prompt) - read, 0)
    return cast(RequestHandle, engine.submit(arrival.prompt[context:], params, context))


class TwinEpisode:
    """One load on one twin, from its start to its end (nothing is drained: the load's time is the
    episode's). Made anew for each episode."""

    def __init__(self, engine: TwinEngine, scenario: Scenario, load: Workload) -> None:
        self.engine, self._load = engine, load
        engine.set_slo(scenario.bounds)
        self._measuring = Measuring(engine, scenario.bounds)
        read = scenario.own.read

        def submit(arrival: Arrival, params: SamplingParams) -> RequestHandle:
            return submit_to(engine, read, arrival, params)

        self._runner = Runner(cast(Engine, engine), load, every=1 << 30, submit=submit)
        self._runner.start()
        self._followed = 0
        self._steps = 0
        self._pending: Observation | None = None

    def begin(self) -> Outcome:
        """On to the first decision."""
        return self._go_on(None)

    def advance(self) -> Outcome:
        """Apply what the engine's controller decides now, and on to the next decision."""
        observation = self._pending
        if observation is None:
            raise RuntimeError("no decision is due: the episode has ended")
        self.engine.act(observation)
        decision = self.engine.control.log[-1]
        self._runner.worked(self.engine.finish())
        return self._go_on(decision)

    def _go_on(self, decision: Decision | None) -> Outcome:
        runner, engine = self._runner, self.engine
        observation = None
        while runner.ready():
            if runner.now >= self._load.end - 1e-9:
                break
            observation = engine.begin()
            if observation is not None:
                break
            runner.worked(engine.finish())
        self._pending = observation
        for handle in runner.handles[self._followed :]:
            self._measuring.follow(handle, runner.due.get(handle.id))
        self._followed = len(runner.handles)
        steps, self._steps = engine.steps - self._steps, engine.steps
        ended = "" if observation is not None else "the load is over"
        return Outcome(observation, self._measuring.terms(), steps, decision, ended)

    def close(self) -> None:
        """Let go of the engine."""
        self.engine.close()
