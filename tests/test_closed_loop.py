"""A load step in a closed loop without a model: what the controllers do to memory and to waits."""

from __future__ import annotations

import pytest
from closed_loop import GROWTH, SHARED, ClosedLoop, Phase

FRAMES = 2048


@pytest.fixture(scope="module")
def loops() -> dict[str, ClosedLoop]:
    return {}


@pytest.fixture(scope="module")
def phases(loops: dict[str, ClosedLoop]) -> dict[str, tuple[Phase, Phase, Phase]]:
    """Per controller: low load, after a step up, and low again (with the queue served between)."""
    found = {}
    for spec in ("adaptive", "adaptive:split=equal", "hybrid", "hisparse", "resident"):
        loop = loops[spec] = ClosedLoop(spec, FRAMES)
        low, high = loop.run(3, 800), loop.run(24, 1200)
        loop.run(3, 1000)
        found[spec] = (low, high, loop.run(3, 500))
    return found


Phases = dict[str, tuple[Phase, Phase, Phase]]


def rate(phase: Phase) -> float:
    return phase.missed / phase.selected


def test_plans_need_no_projection(phases: Phases, loops: dict[str, ClosedLoop]) -> None:
    assert loops["adaptive"].projections == loops["adaptive"].preemptions == 0


def test_low_load_is_all_but_resident(phases: Phases) -> None:
    """At most 1 % of the selected rows missed, before the step and after it."""
    for spec in ("adaptive", "adaptive:split=equal"):
        assert rate(phases[spec][0]) <= 0.01
        assert rate(phases[spec][2]) <= 0.01
    assert rate(phases["hisparse"][0]) > 0.1


def test_little_memory_is_idle_while_it_is_wanted(phases: Phases) -> None:
    """Under 1 % of the pool on average; over 2 % only in the step of an admission, which leaves
    everyone room to grow once, and the next decision gives that out."""
    for phase in phases["adaptive"]:
        assert phase.idle <= 0.01 * max(phase.tight_steps, 1)
        assert phase.idle_steps <= len(phase.waits)
    for spec in ("hisparse", "hybrid"):
        assert phases[spec][1].idle_steps > 0.9 * phases[spec][1].tight_steps


def test_admission_waits_no_longer_than_under_hisparse(phases: Phases) -> None:
    """Nor does the step up find fewer requests running."""
    adaptive, hisparse = phases["adaptive"][1], phases["hisparse"][1]
    assert max(adaptive.waits) <= max(hisparse.waits)
    assert sum(adaptive.waits) / len(adaptive.waits) <= sum(hisparse.waits) / len(hisparse.waits)
    assert adaptive.running >= hisparse.running
    resident = phases["resident"][1]
    assert sum(adaptive.waits) / len(adaptive.waits) < sum(resident.waits) / len(resident.waits) / 2


def test_high_load_misses_less_than_hisparse_with_more_running(phases: Phases) -> None:
    assert rate(phases["adaptive"][1]) < rate(phases["hisparse"][1])


def test_a_step_up_is_served_in_the_step_in_which_it_comes() -> None:
    """Three long contexts fill the memory; ten more come, and what fits of them starts at once."""
    loop = ClosedLoop("adaptive", 1024)
    loop.run(3, 400)
    before = len(loop.running)
    loop.run(13, 1)
    assert len(loop.running) > before
    growth = GROWTH * len(loop.running)
    head = loop.need(loop.waiting[0]) + growth
    assert loop.free < head, "the first that waits finds no room"
    least = sum(3 + 1 + 3 + 1 + 11 + 1 + 6 + 1 + r.required() for r in loop.running)
    assert least + head > 0.97 * (loop.frames - SHARED), "nor would it if all were at the minimum"


def test_the_marginal_split_saves_misses(phases: Phases) -> None:
    """On the measured curves of four layer groups, at the same load and admissions."""
    marginal, equal = phases["adaptive"][1], phases["adaptive:split=equal"][1]
    assert rate(marginal) < 0.98 * rate(equal)


def test_no_minimum_starts_everyone_and_pays_in_misses() -> None:
    """Below 1 x top-k: nobody waits, and several times the rows are fetched for each token."""
    loop = ClosedLoop("adaptive:min_rows=0", FRAMES)
    loop.run(3, 300)
    free = loop.run(24, 800)
    held = ClosedLoop("adaptive", FRAMES)
    held.run(3, 300)
    bound = held.run(24, 800)
    assert max(free.waits) < max(bound.waits)
    assert rate(free) > 2 * rate(bound)
