"""Replays of recorded selections: equal to what the engine counted, and to plain simulations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quick_model import QuickModel
from recorded import prompts, recorded
from toy_model import ToyModel

from kvpolicy.errors import UserError
from kvpolicy.recording import Recording
from kvpolicy.recording.caches import RULES, SlotCache, keep_order, rule_named
from kvpolicy.recording.lanes import FULL, lanes
from kvpolicy.recording.oracle import Oracle

CONTROLLERS = (
    "hisparse:device_buffer_rows=12",
    "static:device_buffer_rows=9",
    "resident",
    "hybrid",
)


@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize("model", [QuickModel, ToyModel])
@pytest.mark.parametrize("eviction", ["lru", "clock", "fifo", "random"])
def test_a_replay_misses_what_the_engine_missed(
    tmp_path: Path, controller: str, model: Any, eviction: str
) -> None:
    """To the row: same slots, stamps, hands, seeds and admissions, with selectors that share a store."""
    recording = recorded(
        model(), tmp_path / "a.npz", prompts(4), controller=controller, eviction=eviction
    )
    metrics = recording.record["metrics"]
    oracle = Oracle(recording)
    row = oracle.row(eviction, "recorded")
    assert metrics["shortages"] == 0  # else a budget is set twice between two steps
    assert row.fetched == metrics["fetched_rows"]
    assert row.fetched > 0 or controller in ("resident", "hybrid")
    assert sum(row.by_store) == row.fetched == row.by_step.sum()


def test_budgets_that_move(tmp_path: Path) -> None:
    """A controller that resizes, fills and empties caches at every decision."""

    class Moody:
        def __init__(self) -> None:
            self.turn = 0

        def decide(self, observation: Any) -> Any:
            from kvpolicy import Plan

            self.turn += 1
            sizes = (8, 30, 1000, 12, 2000, 0, 17)
            targets = {
                r.request_id: sizes[(self.turn + r.request_id) % len(sizes)]
                for r in observation.requests
            }
            return Plan(targets=targets)

    recording = recorded(
        QuickModel(), tmp_path / "a.npz", prompts(4), 60, controller=Moody(), control_interval=5
    )
    seen = np.concatenate([lane.budgets for lane in lanes(recording)])
    assert (seen >= FULL).any() and len(np.unique(seen)) > 4
    row = Oracle(recording).row("clock", "recorded")
    assert row.fetched == recording.record["metrics"]["fetched_rows"] > 0
    assert row.promoted > 0


def test_preempted_requests(tmp_path: Path) -> None:
    recording = recorded(
        QuickModel(),
        tmp_path / "a.npz",
        prompts(4),
        controller="static:device_buffer_rows=10",
        preempt_every=5,
    )
    assert recording.record["metrics"]["preemptions"] > 3
    row = Oracle(recording).row("clock", "recorded")
    assert row.fetched == recording.record["metrics"]["fetched_rows"]


@given(
    st.sampled_from(["lru", "fifo"]),
    st.integers(1, 6),
    st.lists(st.sets(st.integers(0, 11), min_size=1, max_size=4), max_size=25),
)
def test_against_a_list(rule: str, capacity: int, steps: list[set[int]]) -> None:
    """LRU and FIFO as one would write them on a list, ties by slot left out: one entry at a time."""
    cache, order = SlotCache(RULES[rule], 12), list[int]()
    cache.resize(capacity)
    for step, wanted in enumerate(sorted(each)[:1] for each in steps):
        entry = wanted[0]
        missed = cache.resolve(np.array(wanted), step)
        assert missed.tolist() == ([] if entry in order else [entry])
        if entry in order and rule == "lru":
            order.remove(entry)
            order.append(entry)
        elif entry not in order:
            order = [*order, entry][-capacity:]
        assert sorted(cache.held.tolist()) == sorted(order)


def test_rows_that_cannot_stay_pass_through() -> None:
    cache = SlotCache(RULES["lru"], 10)
    cache.resize(2)
    assert cache.resolve(np.array([1, 2, 3]), 0).tolist() == [1, 2, 3]
    assert cache.held.tolist() == [1, 2]
    assert cache.resolve(np.array([1, 2, 5]), 1).tolist() == [5]  # both are wanted: 5 finds no room
    cache.offer(np.array([7]), 2, evict=False)
    assert cache.held.tolist() == [1, 2]


def test_a_shrink_keeps_what_was_used_last() -> None:
    cache = SlotCache(RULES["lru"], 10)
    cache.resize(4)
    for step, entry in enumerate([4, 7, 1, 9, 7]):
        cache.resolve(np.array([entry]), step)
    cache.resize(2)
    assert sorted(cache.held.tolist()) == [7, 9]
    cache.resize(3)
    assert cache.resolve(np.array([7, 8, 9]), 9).tolist() == [8]


def test_what_a_cache_is_seeded_with() -> None:
    assert keep_order(np.array([1, 3, 5]), 8, 2).tolist() == [3, 5]
    assert keep_order(np.array([1, 3, 5]), 8, 5).tolist() == [1, 3, 5, 6, 7]
    assert keep_order(None, 3, 5).tolist() == [0, 1, 2]


def test_rules_by_name() -> None:
    with pytest.raises(UserError, match="did you mean 'lru'"):
        rule_named("lrv")


def test_the_shipped_recording() -> None:
    """It is read, small, and replays to the row what the engine counted when it was made."""
    recording = Recording("tiny-dsa-step")
    assert recording.path.stat().st_size < 1 << 18
    metrics = recording.record["metrics"]
    oracle = Oracle(recording)
    assert oracle.row("clock", "recorded").fetched == metrics["fetched_rows"]
    assert oracle.wanted == metrics["unique_rows"]
