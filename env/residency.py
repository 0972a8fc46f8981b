"""What both environments share: spaces, encoder, reward and info. Subclasses bring the episode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from kvpolicy.control.actions import make_actions
from kvpolicy.control.encoder import DEFAULT_GROUPS, Encoder, Vector
from kvpolicy.control.plan import Plan
from kvpolicy.env.spaces import action_space, check_arguments, observation_space
from kvpolicy.episodes.agent import Agent
from kvpolicy.episodes.picture import picture
from kvpolicy.episodes.scenarios import find
from kvpolicy.episodes.twin import Outcome
from kvpolicy.errors import UserError
from kvpolicy.telemetry.reward import reward_named
from kvpolicy.workloads.workload import Workload

__all__ = ["ResidencyEnv"]

# Requests with a place of their own in `per_request` actions and observations, unless `requests` says more.
PLACES = 16


class Episode(Protocol):
    """One load on one engine, decision by decision."""

    def begin(self) -> Outcome: ...
    def advance(self) -> Outcome: ...
    def close(self) -> None: ...


class ResidencyEnv(gymnasium.Env[Vector, Any], ABC):
    """One episode is one load; one step is what lies between two decisions of the control loop.

    ## Action Space
    By ``action=``. Whatever is asked for is projected onto what fits: there is no illegal action.

    | Name                                   | Space               | Component       | Range   | Meaning                                  |
    |----------------------------------------|---------------------|-----------------|---------|------------------------------------------|
    | global                                 | Box(3), float32     | 0 retained      | -1 to 1 | share of spare memory that holds history |
    |                                        |                     | 1 reserve       | -1 to 1 | kept free for arrivals, to 25 % of all   |
    |                                        |                     | 2 skew          | -1 to 1 | stores alike, or by measured misses      |
    | discrete                               | Discrete(18)        | level           | 0 to 17 | nine shares, without and with a reserve  |
    | per_request, per_store                 | Box(N), float32     | target of each  | -1 to 1 | nothing to all rows, x^3 of them         |
    | per_request_levels, per_store_levels   | MultiDiscrete(10^N) | level of each   | 0 to 9  | 0 to 16 x top-k, everything              |

    N is ``requests`` (the oldest first; places that nobody has mean nothing) or the model's stores. Only the
    last two have ``action_masks()``.

    ## Observation Space
    Box(0, 1, float32), by ``groups=``; of these six (all, by default) numbers are squashed values v:

    | Num | Observation     | Unit of v                                                | Range |
    |-----|-----------------|----------------------------------------------------------|------------------------------------|
    | 0   | running         | share of the seats                                       | 0 to 1: v, at most 1 |
    | 1   | waiting         | requests                                                 | 0 to 1: log(1 + v) / log(1 + 1024) |
    | 2   | oldest_wait     | steps                                                    | 0 to 1: log(1 + v) / log(1 + 4096) |
    | 3   | arrivals        | requests since the last decision                         | 0 to 1: v / (v + 4) |
    | 4   | finished        | requests since the last decision                         | 0 to 1: v / (v + 4) |
    | 5   | queue_head      | share of the pool that the first waiting request needs   | 0 to 1: v, at most 1 |
    | 6   | queue           | share of the pool that waiting requests with a seat need | 0 to 1: v, at most 1 |
    | 7   | shortages       | times since the last decision                            | 0 to 1: v / (v + 1) |
    | 8   | preemptions     | requests since the last decision                         | 0 to 1: v / (v + 1) |
    | 9   | required        | share of the pool                                        | 0 to 1: v, at most 1 |
    | 10  | optional        | share of the pool                                        | 0 to 1: v, at most 1 |
    | 11  | free            | share of the pool                                        | 0 to 1: v, at most 1 |
    | 12  | resident        | share of all committed rows that have room on the device | 0 to 1: v, at most 1 |
    | 13  | full            | share of hot caches that are fully resident              | 0 to 1: v, at most 1 |
    | 14  | demand          | what full residency of all who run takes, in pools       | 0 to 1: v / (v + 1) |
    | 15  | miss_rate       | fetched rows per selected row                            | 0 to 1: v, at most 1 |
    | 16  | miss_rate_worst | the same of the request that has most                    | 0 to 1: v, at most 1 |
    | 17  | fetched         | rows per generated token                                 | 0 to 1: log(1 + v) / log(1 + 2^20) |
    | 18  | link            | bytes per step                                           | 0 to 1: log(1 + v) / log(1 + 2^34) |
    | 19  | step            | milliseconds per step                                    | 0 to 1: log(1 + v) / log(1 + 1000) |
    | 20  | tpot            | time per token in units of its bound, 0 without one      | 0 to 1: v / (v + 1) |
    | 21  | ttft            | the oldest wait in units of its bound, 0 without one     | 0 to 1: v / (v + 1) |
    | 22  | accepted        | tokens per decoding request and step                     | 0 to 1: v / (v + 1) |
    | 23  | context         | tokens, mean of who runs                                 | 0 to 1: log(1 + v) / log(1 + 2^20) |
    | 24  | context_most    | tokens, longest                                          | 0 to 1: log(1 + v) / log(1 + 2^20) |
    | 25  | left            | share of their final length that is still to come        | 0 to 1: v, at most 1 |
    | 26  | age             | steps on the device, mean                                | 0 to 1: log(1 + v) / log(1 + 4096) |
    | 27  | generated       | tokens, mean                                             | 0 to 1: log(1 + v) / log(1 + 4096) |
    | 28  | reading         | share of who runs that still reads its prompt            | 0 to 1: v, at most 1 |

    ``stores`` adds three numbers for each store, ``requests`` six for each of the first ``requests``.

    ## Rewards
    By ``reward=``, a name of ``kvpolicy.telemetry.reward.REWARDS``. ``goodput``: tokens of requests inside the
    latency bounds, in units of the baseline's in a whole episode (``info["baseline"]`` at reset says whose), so
    that rewards of an episode sum to its goodput over the baseline's. Terms: ``info["terms"]``.

    ## Starting State
    An idle engine and a load drawn from the split, at its first decision.

    ## Episode End
    Truncated when the load's time is over, or after ``max_steps``; terminated when the engine failed. Why:
    ``info["ended"]``.

    ## Arguments
    scenario: a registered name. split: ``train``, ``validation`` or ``test``. action: an action space.
    groups: observation groups. reward: see above. requests: places in ``per_request`` spaces. max_steps: 0
    for no limit. engine: changes to the scenario's engine (fields of ``EngineConfig``). UserError for what there
    is none of.

    ## Version History
    v0: the first.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}  # noqa: RUF012

    def __init__(
        self,
        scenario: str = "burst",
        split: str = "train",
        action: str = "global",
        groups: Sequence[str] | None = None,
        reward: str = "goodput",
        requests: int = PLACES,
        max_steps: int = 0,
        engine: Mapping[str, Any] | None = None,
        render_mode: str | None = None,
    ) -> None:
        check_arguments(scenario, requests, max_steps, engine)
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise UserError(f"render_mode = {render_mode!r}: must be ansi, rgb_array or None")
        self.render_mode = render_mode
        self.scenario, self.split = find(scenario), split
        self.changes = dict(engine or {})
        stores = len(self.scenario.own.geometry().stores)
        self.actions = make_actions(action, requests, stores)
        chosen = tuple(DEFAULT_GROUPS if groups is None else groups)
        self.encoder = Encoder(
            chosen,
            stores if "stores" in chosen else 0,
            requests if "requests" in chosen else 0,
        )
        self.reward_name, self._reward = reward, reward_named(reward)
        self.max_steps = max_steps
        self.scenario.load(split, np.random.default_rng(0))  # a wrong split is refused here
        self.observation_space: spaces.Space[Any] = observation_space(self.encoder)
        self.action_space = action_space(self.actions)
        if self.actions.kind == "multi_discrete":
            self.action_masks = self._action_masks
        self.agent = Agent(self.actions.wants_curves or self.encoder.wants_curves)
        self._episode: Episode | None = None
        self._outcome: Outcome | None = None
        self._taken = 0

    @abstractmethod
    def _start(self, load: Workload) -> Episode:
        """A new episode under ``self.agent``."""

    # --- Gymnasium -------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Vector, dict[str, Any]]:
        """A new load, drawn from the split. Loads without a single decision are drawn again."""
        super().reset(seed=seed)
        for _ in range(16):
            self._leave()
            load = self.scenario.load(self.split, self.np_random)
            self.baseline = self.scenario.baseline(load)
            self.np_random.integers(1 << 31)  # unused: later loads stay those that trainings had
            self._episode = self._start(load)
            self._outcome = self._episode.begin()
            self._taken = 0
            if self._outcome.observation is not None:
                break
            if self._outcome.failed:
                raise UserError(f"the episode could not begin: {self._outcome.ended}")
        else:
            raise UserError(f"scenario {self.scenario.name!r}: no load of 16 had a decision in it")
        return self._observe(self._outcome), self._about(load)

    def _about(self, load: Workload) -> dict[str, Any]:
        """What a reset tells of the episode."""
        return {
            "scenario": self.scenario.name,
            "split": self.split,
            "workload": load.uri,
            "baseline_tokens_per_s": self.baseline.tokens_per_s,
            "baseline": self.baseline.name,
        }

    def step(self, action: Any) -> tuple[Vector, float, bool, bool, dict[str, Any]]:
        """Decide, and serve until the next decision is due."""
        if self._episode is None or self._outcome is None or self._outcome.observation is None:
            raise gymnasium.error.ResetNeeded("step() without an episode: call reset()")
        self.agent.plan = self.actions.decode(action, self._outcome.observation)
        outcome = self._outcome = self._episode.advance()
        self._taken += 1
        reward = self._reward(outcome.terms, self.baseline)
        over = bool(outcome.ended) and not outcome.failed
        late = bool(self.max_steps) and self._taken >= self.max_steps
        return (
            self._observe(outcome),
            float(reward),
            bool(outcome.failed),
            bool(over or (late and not outcome.failed)),
            self._info(outcome, late),
        )

    def render(self) -> str | NDArray[np.uint8] | None:
        """``ansi``: one line, who runs, who waits, where the memory is. ``rgb_array``: uint8 [32, 256,
        3], the
        pool from left to right: required, history, free."""
        if self.render_mode is None or self._outcome is None:
            return None
        o = self._outcome.observation
        if self.render_mode == "rgb_array":
            pool = 1 if o is None else max(o.pool_bytes, 1)
            return (
                picture(0, 0)
                if o is None
                else picture(o.required_bytes / pool, o.optional_bytes / pool)
            )
        if o is None:
            return f"the episode has ended: {self._outcome.ended}"
        pool = max(o.pool_bytes, 1)
        return (
            f"step {o.step}: {len(o.requests)} running, {o.waiting} waiting; memory required "
            f"{o.required_bytes / pool:.0%}, history {o.optional_bytes / pool:.0%}, free "
            f"{o.free_bytes / pool:.0%}"
        )

    def close(self) -> None:
        """Let go of the engine. A second call does nothing."""
        self._leave()

    # --- inside ----------------------------------------------------------------------------------

    def _leave(self) -> None:
        episode, self._episode, self._outcome = self._episode, None, None
        if episode is not None:
            episode.close()

    def _observe(self, outcome: Outcome) -> Vector:
        if outcome.observation is None:
            return np.zeros(self.encoder.size, dtype=np.float32)
        return self.encoder.encode(outcome.observation)

    def _info(self, outcome: Outcome, late: bool) -> dict[str, Any]:
        decision = outcome.decision
        info: dict[str, Any] = {
            "steps": outcome.steps,
            "seconds": outcome.terms.seconds,
            "terms": outcome.terms.to_dict(),
            "ended": outcome.ended or ("max_steps" if late else ""),
        }
        if decision is not None:
            info["plan"] = plan_as_dict(decision.plan)
            info["projected"] = {
                "budgets": dict(decision.projected.budgets),
                "changed": decision.projected.changed,
                "reason": decision.projected.reason,
            }
            info["fallback"] = decision.fallback
        return info

    def _action_masks(self) -> np.ndarray[Any, Any]:
        """Which levels mean something at the decision that is due: bool, all components one after another."""
        if self._outcome is None or self._outcome.observation is None:
            raise gymnasium.error.ResetNeeded("action_masks() without a decision that is due")
        masks = self.actions.masks(self._outcome.observation)
        assert masks is not None
        return masks


def plan_as_dict(plan: Plan) -> dict[str, Any]:
    """What an action asked for: rows by request (inf: everything), and bytes kept free."""
    return {
        "targets": dict(plan.targets),
        "default": plan.default,
        "reserve_bytes": plan.reserve_bytes,
    }
