"""A scorecard for anybody's controller: `kvpolicy check` and ``check_controller``."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvpolicy import __version__
from kvpolicy.config import EngineConfig, SamplingParams
from kvpolicy.control.decision import Decision
from kvpolicy.control.observation import Observation
from kvpolicy.control.pool import Pool
from kvpolicy.controllers.base import Controller, cache_rule, initial_rows
from kvpolicy.controllers.decider import Decider
from kvpolicy.controllers.process import SUPPORTED, ProcessController
from kvpolicy.controllers.registry import ControllerLike, is_foreign, make
from kvpolicy.engine.engine import Engine
from kvpolicy.errors import UserError
from kvpolicy.models.loader import DecodeModel
from kvpolicy.testing.states import ordinary, states

__all__ = ["Check", "Scorecard", "check_controller"]

# Seconds that a decision may take here before it counts as none. A run's own deadline is shorter; that
# is what the decision time is held against.
PATIENCE = 1.0
# After so many failures in a row nothing new is learnt.
MOST_FAILURES = 8
# Requests of the loads that decisions are timed under, and how often each load is gone through.
LOADS, REPEATS = (1, 8, 64), 3
# Room for some hot rows of three requests of tiny-dsa, far from all.
TIGHT_MIB = 3.0
NEW_TOKENS = 24
PROMPT_BYTES = (300, 170, 420, 90, 260)


@dataclass(frozen=True, slots=True)
class Check:
    """One line. passed: None where it is only told. figure: the number or the fact."""

    name: str
    passed: bool | None
    figure: str


@dataclass(frozen=True, slots=True)
class Scorecard:
    """What came of it. decision_ms: {"p50", "p99"} under an ordinary load of up to 64 requests.

    projected_share: of decisions of the real run. failures: kind -> how often, in all states.
    """

    controller: str
    checks: tuple[Check, ...]
    decision_ms: dict[str, float]
    projected_share: float
    failures: dict[str, int]
    setting: str

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(check.passed is not False for check in self.checks)

    @property
    def line(self) -> str:
        """One line to quote."""
        judged = [check for check in self.checks if check.passed is not None]
        good = sum(bool(check.passed) for check in judged)
        bad = [check.name for check in judged if not check.passed]
        verdict = "passes" if not bad else f"FAILS ({', '.join(bad)}),"
        return (
            f"{self.controller} {verdict} {good} of {len(judged)} checks of kvpolicy {__version__}: "
            f"{', '.join(check.figure for check in self.checks)} ({self.setting})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**asdict(self), "passed": self.passed, "line": self.line}


def check_controller(
    spec: ControllerLike,
    count: int = 180,
    seed: int = 0,
    deadline_ms: float = 5.0,
    model: DecodeModel | None = None,
) -> Scorecard:
    """Put a controller through hostile states, a real run, and a load against the clock.

    spec: a name or a file with parameters, an object with ``decide``, or a function. It is tried as an
    engine would use it: code that a spec names in a file runs in a process of its own. count: states.
    deadline_ms: what the 99th percentile of the decision time is held against. model: of the real run
    (tiny-dsa on the CPU). Takes some seconds, and is bounded for a controller that never returns.
    UserError for a spec that names no controller.
    """
    name = spec if isinstance(spec, str) else getattr(spec, "__name__", type(spec).__name__)
    tried = [(kind, seen) for kind, seen in states(count, seed)]
    first = _ask(spec, (seen for _, seen in tried))
    failures = Counter(decision.fallback for decision in first if decision.fallback)
    hostile = _hostile(tried, first)
    same = _determinism(spec, first, [seen for _, seen in tried])
    times = _times(spec, seed)
    p50, p99 = (float(x) for x in np.percentile(times, [50, 99])) if times else (np.nan, np.nan)
    exact, decisions, projections, fallbacks, setting = _exactness(spec, model)
    share = projections / decisions if decisions else 0.0
    checks = (
        hostile,
        same,
        exact,
        Check("decision time", bool(p99 <= deadline_ms), f"p99 {p99:.2f} ms"),
        Check("fallbacks", fallbacks == 0, f"{fallbacks} fallbacks in {decisions} decisions"),
        Check("projected", None, f"{share:.1%} projected"),
    )
    return Scorecard(name, checks, {"p50": p50, "p99": p99}, share, dict(failures), setting)


# --- asking --------------------------------------------------------------------------------------


def _made(spec: ControllerLike, like: Observation) -> Controller:
    """A fresh controller: made from the spec, or a copy of the object that was given."""
    if isinstance(spec, str) and SUPPORTED and is_foreign(spec):
        return ProcessController(spec, like.stores, patience=2 * PATIENCE)
    if isinstance(spec, str):
        return make(spec)
    controller = make(spec)
    try:
        return copy.deepcopy(controller)
    except Exception:  # it holds what cannot be copied: then it is asked as it is
        return controller


def _ask(spec: ControllerLike, seen: Iterable[Observation]) -> list[Decision]:
    """Decisions of a fresh controller, fewer where it fails again and again."""
    found: list[Decision] = []
    decider: Decider | None = None
    bad = 0
    try:
        for observation in seen:
            if decider is None:
                controller = _made(spec, observation)
                initial_rows(controller, observation.stores)
                cache_rule(controller)
                decider = Decider(controller, PATIENCE)
            found.append(decider.decide(observation))
            bad = bad + 1 if found[-1].fallback else 0
            if bad == MOST_FAILURES:
                break
    finally:
        if decider is not None:
            decider.close()
    return found


def _fits(decision: Decision) -> bool:
    """Whether budgets that were made of a plan lie within what there is."""
    seen, budgets = decision.observation, decision.projected.budgets
    pool = Pool(seen)
    rows = np.array([budgets[r.request_id] for r in seen.requests], dtype=np.int64)
    room = pool.cost(pool.held) + seen.free_bytes // seen.frame_bytes
    floor = np.full_like(pool.most, seen.floor_rows)
    return pool.cost(rows.reshape(pool.most.shape)) <= max(room, pool.cost(floor))


# --- the checks ----------------------------------------------------------------------------------


def _hostile(tried: list[tuple[str, Observation]], found: list[Decision]) -> Check:
    asked = [(kind, d) for (kind, _), d in zip(tried, found, strict=False)]
    failed = Counter(kind for kind, decision in asked if decision.fallback)
    unfit = sum(not _fits(decision) for decision in found)
    if not failed and not unfit:
        return Check("hostile states", True, f"{len(found)} hostile states")
    first = next((f"{kind}: {d.reason}" for kind, d in asked if d.fallback), "")
    figure = f"{sum(failed.values())} of {len(found)} hostile states failed ({first[:120]})"
    return Check("hostile states", False, figure)


def _determinism(spec: ControllerLike, found: list[Decision], seen: list[Observation]) -> Check:
    """The same observations to another fresh controller; only what both answered can be compared."""
    again = _ask(spec, seen)
    different = [
        a.step
        for a, b in zip(found, again, strict=False)
        if not (a.fallback or b.fallback) and a.projected != b.projected
    ]
    if different or len(found) != len(again):
        return Check("determinism", False, f"{len(different)} plans differ at the second time")
    return Check("determinism", True, "deterministic")


def _times(spec: ControllerLike, seed: int) -> list[float]:
    """Milliseconds of decisions as an engine waits for them, 1 to 64 requests; of each the shortest of
    REPEATS, since what a busy machine adds is not the controller's."""
    times: list[float] = []
    for requests in LOADS:
        load = list(ordinary(seed, requests, 60))
        every = [[d.seconds * 1e3 for d in _ask(spec, load)] for _ in range(REPEATS)]
        # The first ones of a load warm up.
        times += [min(each) for each in zip(*every, strict=False)][3:]
    return times


def _exactness(spec: ControllerLike, model: DecodeModel | None) -> tuple[Check, int, int, int, str]:
    """A short real run with little memory: bit for bit what ``resident`` gives with plenty."""
    try:
        want, _ = _run("resident", model, 64.0)
        got, metrics = _run(spec, model, TIGHT_MIB)
    except UserError as error:
        return Check("exactness", False, str(error)), 0, 0, 0, "not run"
    rows = sum(len(tokens) for tokens, _ in want)
    same = want == got
    verdict = f"exact on {rows} logit rows" if same else "OUTPUTS DIFFER from resident's"
    setting = (
        f"tiny-dsa on a CPU, {TIGHT_MIB:g} MiB of device memory" if model is None else "given model"
    )
    return (
        Check("exactness", same, verdict),
        metrics["controller_decisions"],
        metrics["controller_projections"],
        metrics["controller_fallbacks"],
        setting,
    )


def _run(
    spec: ControllerLike, model: DecodeModel | None, mib: float
) -> tuple[list[tuple[list[int], str]], dict[str, Any]]:
    """Tokens and fingerprints of a few requests, and the metrics."""
    config = EngineConfig(
        device="cpu",
        device_kv_mib=mib,
        host_kv_mib=64.0,
        max_concurrency=3,
        prefill_chunk=64,
        control_interval=4,
        decision_deadline_ms=PATIENCE * 1e3,
        controller="resident",
    )
    prompts = [
        bytes((i * 37 + j * j) % 95 + 32 for j in range(n)) for i, n in enumerate(PROMPT_BYTES)
    ]
    with Engine(config, model=model) as engine:
        engine.set_controller(spec if isinstance(spec, str) else _made(spec, _nothing()))
        outputs = engine.generate(prompts, SamplingParams(max_new_tokens=NEW_TOKENS, seed=1))
        engine.check_integrity()
        return [(o.tokens, o.logits_sha256) for o in outputs], engine.metrics()


def _nothing() -> Observation:
    return next(seen for _, seen in states(1, 0))
