"""The batched resolve against dictionaries, and the registry of eviction rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from cache_tables import CPU, Seat, arena_of, contents, copy_tables, make_tables, random_call
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvpolicy.kernels.eviction import (
    CLOCK_LAZY,
    CLOCK_SPARE_STEPS,
    RULES,
    EvictionRule,
    Key,
    SweepState,
)
from kvpolicy.kernels.resolve import PAD, CacheTables, resolve_batch

MASK = (1 << 64) - 1


@dataclass
class Model:
    """One mapped cache as dictionaries: entry -> slot, and the stamp of each slot."""

    capacity: int
    slot: dict[int, int] = field(default_factory=dict)
    stamp: dict[int, int] = field(default_factory=dict)
    hand: int = 0
    draws: int = 0
    age: int = CLOCK_SPARE_STEPS

    def key(self, name: str, slot: int, step: int) -> tuple[int, ...]:
        """The order of victims, told another way than by the rules' own integers."""
        if name == "clock":
            unused = step - self.stamp[slot] // 2
            lap = 0 if unused >= self.age else 1 if unused >= self.age / 2 else 2
            return lap, (slot - self.hand) % self.capacity
        if name == "random":
            mixed = ((slot + 1) * 2654435761) ^ (step * 40503 + self.draws * 2246822519)
            return ((((mixed ^ (mixed >> 15)) * 2246822519) & MASK) & 0x7FFFFFFF,)
        return (self.stamp[slot],)

    def resolve(
        self, name: str, seat: int, wanted: list[int], step: int, admit: bool
    ) -> tuple[list[int], list[bool]]:
        """Slots (-1: to be staged) and misses of ``wanted``."""
        missed = [entry not in self.slot for entry in wanted]
        if admit and self.capacity:
            hits = {self.slot[entry] for entry in wanted if entry in self.slot}
            if name == "clock" and not any(missed) and (step + seat) % CLOCK_LAZY:
                return [self.slot[entry] for entry in wanted], missed
            if name != "fifo":
                self.stamp.update(dict.fromkeys(hits, 2 * step + 1))
                hits |= {slot for slot, stamp in self.stamp.items() if stamp == 2 * step + 1}
            incoming = [entry for entry in wanted if entry not in self.slot]
            taken = set(self.slot.values())
            room = [slot for slot in range(self.capacity) if slot not in taken][: len(incoming)]
            if len(room) < len(incoming):
                room += self.victims(name, len(incoming) - len(room), step, taken - hits)
            for entry, slot in zip(incoming, room, strict=False):
                self.slot[entry], self.stamp[slot] = slot, 2 * step
        return [self.slot.get(entry, -1) for entry in wanted], missed

    def victims(self, name: str, count: int, step: int, candidates: set[int]) -> list[int]:
        self.draws += 1
        order = sorted(candidates, key=lambda slot: (self.key(name, slot, step), slot))[:count]
        if name == "clock":
            self.tune(order, count, step)
        if order:
            self.hand = (order[-1] + 1) % self.capacity
        self.slot = {entry: slot for entry, slot in self.slot.items() if slot not in order}
        return order if name == "clock" else sorted(order)

    def tune(self, order: list[int], count: int, step: int) -> None:
        """A second lap lowers the age, victims within a third of the cache raise it."""
        laps = [self.key("clock", slot, step) for slot in order]
        if len(order) < count or any(lap for lap, _ in laps):
            self.age = max(1, self.age - 2)
        elif max(ahead for _, ahead in laps) + 1 < self.capacity / 3:
            self.age += 1


SEATS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 14), st.integers(0, 4)).map(
        lambda s: Seat(s[0], s[0], full=True) if s[2] == 0 else Seat(s[0], min(s[0], s[1]))
    ),
    min_size=1,
    max_size=4,
)


def location_of(tables: CacheTables, seat: int, slot: int) -> int:
    per = tables.records.shape[1]
    return int(tables.row_frames[seat, slot // per]) * per + slot % per


def check_state(tables: CacheTables, seats: list[Seat], models: list[Model]) -> None:
    """Maps, metadata and sweeps are those of the models."""
    for seat, (kind, model) in enumerate(zip(seats, models, strict=True)):
        if kind.full:
            continue
        assert contents(tables, seat, kind.entries) == model.slot
        state = tables.state(seat)
        slots = torch.arange(state.used)  # beyond them lies whatever lay there
        holder = {slot: entry for entry, slot in model.slot.items()}
        assert state.entry_of.get(slots).tolist() == [holder[s] for s in slots.tolist()]
        assert state.stamp.get(slots).tolist() == [model.stamp[s] for s in slots.tolist()]
        assert state.sweep == SweepState(model.hand, model.draws, model.age)
        assert state.used == len(model.slot)


def check_rest(before: Tensor, tables: CacheTables, seats: list[Seat]) -> None:
    """Of the whole arena only maps and metadata of mapped caches changed."""
    arena, old = copy_tables(before, tables, CPU)
    for seat, kind in enumerate(seats):
        if not kind.full:
            now, then = tables.state(seat), old.state(seat)
            entries, slots = torch.arange(kind.entries), torch.arange(kind.capacity)
            then.slot_of.put(entries, now.slot_of.get(entries))
            then.entry_of.put(slots, now.entry_of.get(slots))
            then.stamp.put(slots, now.stamp.get(slots))
    assert torch.equal(arena, arena_of(tables))


@pytest.mark.parametrize("name", ["clock", "lru", "fifo", "random"])
@given(seats=SEATS, seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 8))
def test_resolve_batch_against_dictionaries(
    name: str, seats: list[Seat], seed: int, steps: int
) -> None:
    """Several selections, some of them in one step; every location, miss, map, slot and stamp."""
    rng = np.random.default_rng(seed)
    arena, tables = make_tables(seats, rng)
    before = arena.clone()
    models = [Model(s.capacity, stamp=dict.fromkeys(range(s.capacity), 0)) for s in seats]
    step = 0
    for _ in range(steps):
        step += int(rng.choice([0, 1, 1, CLOCK_SPARE_STEPS]))
        call = random_call(rng, seats, step)
        found = resolve_batch(tables, rule=RULES[name], **call)
        places = zip(call["seats"].tolist(), call["admit"].tolist(), strict=True)
        for piece, (seat, admit) in enumerate(places):
            entries = [e for e in call["wanted"][piece].tolist() if e != PAD]
            if seats[seat].full:
                slots, missed = entries, [False] * len(entries)
            else:
                slots, missed = models[seat].resolve(name, seat, entries, step, admit)
            rest = call["wanted"].shape[1] - len(entries)
            where = [-1 if slot < 0 else location_of(tables, seat, slot) for slot in slots]
            assert found.location[piece].tolist() == where + [-1] * rest
            assert found.missed[piece].tolist() == missed + [False] * rest
        check_state(tables, seats, models)
    check_rest(before, tables, seats)


# --- rules ---------------------------------------------------------------------------------------


def mru_key(stamp: Tensor, step: int, hand: int, draws: int) -> Tensor:
    return -stamp.long()


@pytest.fixture
def registered() -> Iterator[EvictionRule]:
    """A rule of somebody else: the row used last goes first."""
    RULES["mru"] = EvictionRule("mru", touch=True, key=mru_key)
    yield RULES["mru"]
    del RULES["mru"]


def test_a_registered_rule_chooses(registered: EvictionRule) -> None:
    state = SweepState(hand=7, draws=1)
    stamp = torch.tensor([3, 9, 9, 5], dtype=torch.int32)
    candidate = torch.tensor([True, True, True, False])
    assert registered.victims(stamp, candidate, 1, 10, state).tolist() == [1]
    assert state == SweepState(hand=2, draws=2)
    assert registered.victims(stamp, candidate, 9, 10, state).tolist() == [0, 1, 2]


def test_a_sweep_needs_stamps_and_laziness_a_step() -> None:
    with pytest.raises(ValueError, match=r"'still': a sweep .* needs touch = True"):
        EvictionRule("still", touch=False, key=None)
    with pytest.raises(ValueError, match="'never': lazy = 0: must be 1 or more"):
        EvictionRule("never", touch=True, key=None, lazy=0)


@pytest.mark.parametrize("key", [lambda stamp, *_: stamp, lambda stamp, *_: stamp.long()[:1]])
def test_a_key_of_another_type_is_refused(key: Key) -> None:
    rule = EvictionRule("odd", touch=True, key=key)
    stamp = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(TypeError, match="eviction rule 'odd': its key is"):
        rule.victims(stamp, stamp == 0, 1, 10, SweepState())
