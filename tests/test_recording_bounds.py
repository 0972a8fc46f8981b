"""Bounds in hindsight against brute force, and against policies that they must not exceed."""

from __future__ import annotations

from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded import prompts, recorded
from toy_model import ToyModel

from kvpolicy.errors import UserError
from kvpolicy.recording import Recording
from kvpolicy.recording.bounds import Pool, belady, keep_soonest
from kvpolicy.recording.caches import RULES
from kvpolicy.recording.lanes import FULL, Lane
from kvpolicy.recording.oracle import CLAIRVOYANT, SPLITS, Oracle
from kvpolicy.recording.replay import replay
from kvpolicy.recording.splits import budgets_by, equal_rows, lru_curve, steepest_first

START = 3
"""Entries of the prompt in the small cases."""


def lane_of(
    wanted: list[list[int]], budgets: list[int], weight: int = 1, first: int = 0, store: int = 0
) -> Lane:
    """A lane of a few steps; an entry comes with every step. first: the step its prompt ends in."""
    n = len(wanted)
    rows = [np.array(sorted(w), dtype=np.int64) for w in wanted]
    return Lane(
        request=0,
        store=store,
        weight=weight,
        at=np.arange(first + 1, first + 1 + n),
        back=np.zeros(n, dtype=bool),
        seats=np.zeros(n + 1, dtype=np.int64),
        calls=[[row] for row in rows],
        wanted=rows,
        recent=rows,
        committed=np.arange(START, START + n + 1),
        seed=np.array([0], dtype=np.int64),
        seeded_at=first,
        budgets=np.array(budgets, dtype=np.int64),
        prior=np.empty(0, dtype=np.int64),
    )


@st.composite
def small_lanes(draw: st.DrawFn, most: int = 5, budget: int = 4) -> Lane:
    """What could be wanted at each step, and a budget that moves."""
    n = draw(st.integers(1, most))
    wanted = [draw(st.sets(st.integers(0, START + i - 1), max_size=3)) for i in range(n)]
    budgets = draw(st.lists(st.integers(0, budget), min_size=n + 1, max_size=n + 1))
    return lane_of([list(w) for w in wanted], budgets)


def fewest(lane: Lane) -> int:
    """Brute force: every cache content that is possible at every step."""
    n = len(lane.at)

    @cache
    def cost(step: int, held: frozenset[int]) -> int:
        if step == n:
            return 0
        wanted = frozenset(lane.wanted[step].tolist())
        new = frozenset(range(lane.committed[step], lane.committed[step + 1]))
        after = held | wanted | new
        room = int(min(lane.budgets[step + 1], lane.budgets[min(step + 2, n)]))
        choices = combinations(sorted(after), min(room, len(after)))
        return len(wanted - held) + min(cost(step + 1, frozenset(c)) for c in choices)

    room = int(min(lane.budgets[0], lane.budgets[1]))
    return min(cost(0, frozenset(c)) for c in combinations(range(START), min(room, START)))


@given(small_lanes())
def test_belady_is_the_minimum(lane: Lane) -> None:
    assert belady(lane, lane.budgets).missed.sum() == fewest(lane)


@given(small_lanes(), st.sampled_from(sorted(RULES)))
def test_no_rule_beats_it(lane: Lane, rule: str) -> None:
    missed = replay(lane, lane.budgets, RULES[rule], np.arange(20)).missed
    assert belady(lane, lane.budgets).missed.sum() <= missed.sum()


def test_a_full_cache_misses_nothing_and_its_growth_is_counted() -> None:
    wanted = [[0, 1, 2]] * 5
    outcome = belady(lane_of(wanted, [FULL] * 6), np.array([FULL] * 6))
    assert (outcome.missed.sum(), outcome.promoted) == (0, 0)
    budgets = np.array([1, 1, FULL, FULL, 2, 2])
    outcome = belady(lane_of(wanted, [0] * 6), budgets)
    assert outcome.promoted == START + 1  # it grew before its second step
    assert outcome.missed.tolist() == [2, 0, 0, 1, 1]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(0, 20))
def test_the_cut_takes_the_far_end(kept: list[int], room: int) -> None:
    cut = np.array(kept)
    keep_soonest(cut, room)
    assert cut.sum() == min(room, sum(kept[:-1])) and cut[-1] == 0
    flat = [i for i, n in enumerate(kept[:-1]) for _ in range(n)]
    assert [i for i, n in enumerate(cut.tolist()) for _ in range(n)] == flat[:room]


# --- the pool -------------------------------------------------------------------------------------


def fewest_shared(a: Lane, b: Lane, room: list[int]) -> int:
    """Brute force over the contents of two lanes in one memory of rows, all of weight 1."""
    steps = len(room)

    def wants(step: int) -> frozenset[tuple[int, int]]:
        return frozenset(
            (n, int(e))
            for n, lane in enumerate((a, b))
            for i, at in enumerate(lane.at.tolist())
            if at == step
            for e in lane.wanted[i]
        )

    def comes(step: int) -> frozenset[tuple[int, int]]:
        new = set()
        for n, lane in enumerate((a, b)):
            if step == lane.seeded_at:
                new |= {(n, e) for e in range(START)}
            for i, at in enumerate(lane.at.tolist()):
                if at == step:
                    new |= {(n, e) for e in range(lane.committed[i], lane.committed[i + 1])}
        return frozenset(new)

    @cache
    def cost(step: int, held: frozenset[tuple[int, int]]) -> int:
        if step == steps:
            return 0
        after = sorted(held | wants(step) | comes(step))
        most = min(room[step], room[min(step + 1, steps - 1)], len(after))
        return len(wants(step) - held) + min(
            cost(step + 1, frozenset(c)) for c in combinations(after, most)
        )

    return cost(0, frozenset())


@given(
    small_lanes(3),
    small_lanes(3),
    st.integers(0, 2),
    st.lists(st.integers(0, 5), min_size=6, max_size=6),
)
def test_the_pool_is_the_minimum_of_all_splits(
    a: Lane, b: Lane, later: int, room: list[int]
) -> None:
    moved = [w.tolist() for w in b.wanted]
    b = lane_of(moved, [0] * (len(moved) + 1), first=later)
    assert Pool([a, b], 6).misses(np.array(room)).sum() == fewest_shared(a, b, room)


def test_records_weigh_their_layers() -> None:
    """Of a record of three rows two fit: it is held in part, and one row is fetched."""
    lane = lane_of([[0], [0]], [0, 0, 0], weight=3)
    assert Pool([lane], 3).misses(np.array([2, 2, 2])).tolist() == [0, 1, 1]


# --- splits ---------------------------------------------------------------------------------------


def test_equal_rows_and_what_one_cannot_use() -> None:
    lanes = [lane_of([[0]] * n, [0] * (n + 1), w) for n, w in ((1, 1), (9, 1), (9, 2))]
    assert [lane.most for lane in lanes] == [4, 12, 12]
    split = equal_rows(lanes)
    assert split([0, 1, 2], 8).tolist() == [2, 2, 2]
    assert split([0, 1, 2], 31).tolist() == [4, 9, 9]
    assert split([1, 2], 1000).tolist() == [12, 12]
    assert split([1], 5).tolist() == [5]


def test_a_curve_by_hand() -> None:
    """Entries 1 and 2 in turn: two slots would do but for the new row that enters at every step."""
    lane = lane_of([[1], [2], [1], [2], [1]], [0] * 6)
    curve = lru_curve(lane)
    # Stack before each step, top first: the seed's 0 with 2 and 1 below it as one group, then 3 | 1,
    # 4 | 2 | 3 | 1, 5 | 1 | 4 | 2, 6 | 2 | 5 | 1: the last three uses are at depth 4.
    total = np.cumsum(np.repeat(curve.slope, curve.width))
    assert total[-1] * 5 == pytest.approx(5)
    assert curve.width.sum() <= lane.most
    assert (np.diff(curve.slope) < 0).all()
    assert total[3] * 5 == pytest.approx(5)  # four slots hold all of them
    assert total[0] * 5 < 2


def test_the_curve_tells_what_a_replay_misses(recording: Recording) -> None:
    """Of all lanes together, at budgets that hold a selection. Its hull is a little below."""
    oracle = Oracle(recording)
    for slots in (8, 12, 20):
        told = missed = 0.0
        for lane in oracle.lanes:
            curve = lru_curve(lane)
            taken = np.clip(slots - (np.cumsum(curve.width) - curve.width), 0, curve.width)
            wanted = sum(map(len, lane.wanted))
            told += wanted - (taken * curve.slope).sum() * len(lane.at)
            budgets = np.full(len(lane.at) + 1, slots)
            missed += replay(lane, budgets, RULES["lru"], oracle.steps).missed.sum()
        assert told == pytest.approx(missed, rel=0.15), slots


def test_memory_goes_where_it_saves_most() -> None:
    busy = lane_of([[0], [1]] * 6, [0] * 13)
    idle = lane_of([[2]] * 12, [0] * 13)
    lanes = [busy, idle]
    split = steepest_first(lanes, [lru_curve(lane) for lane in lanes])
    assert split([0, 1], 0).tolist() == [0, 0]
    for rows in range(12):
        assert split([0, 1], rows).sum() <= rows
    assert split([0, 1], 4).tolist()[1] >= 1


def test_budgets_never_exceed_the_memory() -> None:
    lanes = [lane_of([[0]] * 7, [0] * 8, 1 + i, first=2 * i) for i in range(3)]
    room = np.array([9, 30, 4, 17, 8, 8, 60, 3, 11, 40, 40, 40, 7])
    for interval in (1, 4):
        budgets = budgets_by(equal_rows(lanes), lanes, room, interval)
        for step in range(len(room)):
            used = 0
            for lane, own in zip(lanes, budgets, strict=True):
                at = np.append(lane.seeded_at, lane.at)
                here = own[at == step]
                used += int(np.minimum(here, lane.most).sum()) * lane.weight
            assert used <= room[step]


# --- the oracle of a recording --------------------------------------------------------------------


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    path = tmp_path_factory.mktemp("oracle") / "a.npz"
    return recorded(ToyModel(), path, prompts(5), 40, controller="static:device_buffer_rows=6")


def test_the_bound_is_below_everything(recording: Recording) -> None:
    oracle = Oracle(recording)
    least = oracle.bound()
    for split in SPLITS:
        best = oracle.row("belady", split)
        assert least.moved <= best.moved
        for rule in RULES if split != CLAIRVOYANT else ():
            assert best.fetched <= oracle.row(rule, split).fetched
    assert oracle.row("lru", "recorded").fetched > oracle.row("belady", "recorded").fetched


@pytest.mark.parametrize("rule", ["clock", "belady"])
def test_who_knows_the_load_promotes_only_what_pays(rule: str) -> None:
    """In the shipped load step, caches that the best split fills when requests leave are copied whole and
    then hardly missed: kept one slot short of full they move less."""
    oracle = Oracle(Recording("tiny-dsa-step"))
    best, knows = oracle.row(rule, "best"), oracle.row(rule, CLAIRVOYANT)
    assert oracle.bound().moved <= knows.moved < best.moved
    assert knows.promoted < best.promoted and knows.fetched >= best.fetched


def test_another_memory(recording: Recording) -> None:
    """Less memory, more misses, down to what the load itself takes."""
    recorded_bytes = int(recording.record["config"]["device_kv_mib"] * (1 << 20))
    spare = int(recording.steps["room"].min())
    sizes = [recorded_bytes - spare + extra for extra in (0, 300, 2000, 10_000)]
    found = [Oracle(recording, size).bound().moved for size in sizes]
    assert found == sorted(found, reverse=True) and found[0] > found[-1]
    with pytest.raises(UserError, match="the recorded load needs at least"):
        Oracle(recording, sizes[0] - 100).bound()


def test_a_recording_without_decode_steps(tmp_path: Path) -> None:
    recording = recorded(ToyModel(), tmp_path / "a.npz", prompts(1), tokens=1)
    with pytest.raises(UserError, match="no request in it has decoded"):
        Oracle(recording)
