"""Eviction rules on one cache's slots: which go, in which order, and what the sweep keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvpolicy.kernels.eviction import RULES, SweepState, stamp_of

SLOTS = st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=1, max_size=40)


def slots_of(slots: list[tuple[int, bool]]) -> tuple[Tensor, Tensor]:
    stamp = torch.tensor([s for s, _ in slots], dtype=torch.int32)
    return stamp, torch.tensor([c for _, c in slots])


@pytest.mark.parametrize("name", sorted(RULES))
@given(slots=SLOTS, count=st.integers(0, 45), hand=st.integers(0, 39), step=st.integers(6, 20))
def test_victims_are_distinct_candidates(
    name: str, slots: list[tuple[int, bool]], count: int, hand: int, step: int
) -> None:
    """As many as asked for, as far as there are candidates; the same again from the same state."""
    stamp, candidate = slots_of(slots)
    before = stamp.clone(), candidate.clone()
    states = [SweepState(hand=hand % len(slots), draws=3) for _ in range(2)]
    first, second = (
        RULES[name].victims(stamp, candidate, count, step, state).tolist() for state in states
    )
    assert first == second and states[0] == states[1]
    assert len(set(first)) == len(first) == min(count, int(candidate.sum()))
    assert all(candidate[slot] for slot in first)
    assert 0 <= states[0].hand < len(slots)
    assert torch.equal(stamp, before[0]) and torch.equal(candidate, before[1])


@pytest.mark.parametrize("name", ["lru", "fifo"])
@given(slots=SLOTS, count=st.integers(0, 45))
def test_lru_and_fifo_take_the_oldest(name: str, slots: list[tuple[int, bool]], count: int) -> None:
    """By stamp, ties to the lowest slot; given out in ascending slot order."""
    stamp, candidate = slots_of(slots)
    order = sorted((s, i) for i, (s, c) in enumerate(slots) if c)
    victims = RULES[name].victims(stamp, candidate, count, 20, SweepState())
    assert victims.tolist() == sorted([i for _, i in order][:count])


@given(
    slots=SLOTS,
    count=st.integers(1, 45),
    hand=st.integers(0, 39),
    step=st.integers(6, 20),
    age=st.integers(1, 9),
)
def test_clock_sweeps_from_the_hand(
    slots: list[tuple[int, bool]], count: int, hand: int, step: int, age: int
) -> None:
    """Lap 1 takes slots unused for ``age`` steps, lap 2 for half of it, lap 3 any, in the order of the sweep;
    the hand stops after the last. A second lap lowers the age, victims within a third of the slots raise it.
    """
    stamp, candidate = slots_of(slots)
    hand %= len(slots)
    lap = [(hand + i) % len(slots) for i in range(len(slots))]
    lap = [slot for slot in lap if slots[slot][1]]
    old = [slot for slot in lap if step - slots[slot][0] // 2 >= age]
    half = [s for s in lap if s not in old and (step - slots[s][0] // 2) * 2 >= age]
    wanted = (old + half + [slot for slot in lap if slot not in old + half])[:count]
    state = SweepState(hand=hand, age=age)
    victims = RULES["clock"].victims(stamp, candidate, count, step, state)
    assert victims.tolist() == wanted
    assert state.hand == ((wanted[-1] + 1) % len(slots) if wanted else hand)
    early = len(old) >= count and ((wanted[-1] - hand) % len(slots) + 1) * 3 < len(slots)
    assert state.age == (max(1, age - 2) if len(old) < count else age + early)
    still = SweepState(hand=hand, age=age)
    assert (
        RULES["clock"].victims(stamp, candidate, count, step, still, tune=False).tolist() == wanted
    )
    assert still.age == age


def test_random_draws_differ_and_cover() -> None:
    """Every slot comes first at times: 4000 draws from 8 slots, within 5 sigma of 500 each."""
    stamp, candidate = torch.zeros(8, dtype=torch.int32), torch.ones(8, dtype=torch.bool)
    state = SweepState()
    first = [
        int(RULES["random"].victims(stamp, candidate, 1, step // 10, state)[0])
        for step in range(4000)
    ]
    counts = np.bincount(first, minlength=8)
    assert counts.min() > 395 and counts.max() < 605
    assert state.draws == 4000


def test_stamps_rank_hits_above_loads_above_the_step_before() -> None:
    stamps = [stamp_of(3, True), stamp_of(4, False), stamp_of(4, True), stamp_of(5, False)]
    assert stamps == sorted(set(stamps))
    touch = {"clock": True, "lru": True, "fifo": False, "random": True}
    assert {name: RULES[name].touch for name in touch} == touch
