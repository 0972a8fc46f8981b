"""The hot cache against a dictionary: what is resident, where, and with which record."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from torch import Tensor

from kvpolicy.errors import CapacityError, IntegrityError
from kvpolicy.geometry.presets import TOY
from kvpolicy.kernels.eviction import RULES, stamp_of
from kvpolicy.memory.accounting import Reserve
from kvpolicy.memory.arena import Arena, Table
from kvpolicy.memory.hierarchy import Hierarchy
from kvpolicy.memory.hot_cache import HotCache, keep_order
from kvpolicy.memory.layout import Layout, StoreLayout
from kvpolicy.memory.rule import CacheRule
from kvpolicy.memory.segments import Segment

CPU = torch.device("cpu")
RECORD_BYTES = 48
FRAME = 4 * RECORD_BYTES
BALLAST = "ballast"


def small_frames() -> StoreLayout:
    """Store B of the toy model (records of two rows), 4 records, 5 slots or 7 map entries a frame."""
    store = Layout(TOY, "float32").stores[1]
    assert store.record.bytes == RECORD_BYTES
    return dataclasses.replace(
        store,
        record=dataclasses.replace(store.record, per_frame=4),
        meta=dataclasses.replace(store.meta, per_frame=5),
        slot_map=dataclasses.replace(store.slot_map, per_frame=7),
    )


def truth_of(entries: int) -> Tensor:
    """One value per (entry, layer, column); records of different entries share none."""
    return torch.arange(entries * 12, dtype=torch.float32).view(entries, 2, 6) + 0.5


class HotCacheMachine(RuleBasedStateMachine):
    """``slot`` and ``stamp`` by resident entry are the model.

    Under LRU and FIFO the model predicts every victim; under the other rules it takes them over
    and checks that they were allowed.
    """

    @initialize(
        entries=st.sampled_from([0, 1, 13, 30, 40]),
        committed=st.integers(0, 30),
        rows=st.sampled_from([0, 3, 8, 11, 40]),
        spare=st.integers(0, 9),
        name=st.sampled_from(["lru", "fifo", *sorted(RULES)]),
    )
    def start(self, entries: int, committed: int, rows: int, spare: int, name: str) -> None:
        self.layout = small_frames()
        frames = self.layout.slot_map.frames(entries) + spare
        frames += self.layout.hot_frames(min(rows, entries), rows >= entries)
        self.arena = Arena(frames * FRAME, FRAME, CPU, poison=True)
        self.map = Table(self.arena, self.layout.slot_map, "map")
        self.map.resize(entries)
        self.hot = HotCache(self.arena, self.layout, self.map, entries, RULES[name], (1, "B"))
        self.name = name
        self.entries = entries
        self.committed = min(committed, entries)
        self.truth = truth_of(entries)
        self.step = 10
        self.slot: dict[int, int] = {}
        self.stamp: dict[int, int] = {}
        self.hot.resize(rows, self.committed, self.fetch)
        self.resized(rows, False, None)

    # --- model ---------------------------------------------------------------------------------

    def fetch(self, entries: Tensor) -> Tensor:
        assert entries.numel() == 0 or int(entries.max()) < self.committed
        return self.truth[entries]

    def slots_now(self) -> dict[int, int]:
        """What the cache's own map says."""
        if self.hot.full:
            return {entry: entry for entry in range(self.committed)}
        slots = self.map.paged.get(torch.arange(self.entries)).tolist()
        return {entry: slot for entry, slot in enumerate(slots) if slot >= 0}

    def free_slots(self) -> list[int]:
        taken = set(self.slot.values())
        return [slot for slot in range(self.hot.capacity) if slot not in taken]

    def predict_victims(self, count: int, keep: set[int]) -> list[int] | None:
        """Entries that LRU or FIFO gives up, None where the rule is another one."""
        if self.name not in ("lru", "fifo"):
            return None
        order = sorted((self.stamp[e], self.slot[e], e) for e in self.slot if e not in keep)
        return [entry for _, _, entry in order[:count]]

    def admit(self, incoming: list[int], keep: set[int]) -> int:
        """Update the model for new entries; returns how many the model evicted."""
        free = self.free_slots()
        others = [entry for entry in self.slot if entry not in keep]
        victims = min(max(0, len(incoming) - len(free)), len(others))
        accepted = incoming[: len(free) + victims]
        now = self.slots_now()
        gone = {entry for entry in self.slot if entry not in now}
        assert len(gone) == victims and gone <= set(others)
        predicted = self.predict_victims(victims, keep)
        assert predicted is None or gone == set(predicted)
        given = set(free[: len(accepted)]) | {self.slot[entry] for entry in gone}
        for entry in gone:
            del self.slot[entry], self.stamp[entry]
        assert {now[entry] for entry in accepted} == given
        for entry in accepted:
            self.slot[entry] = now[entry]
            self.stamp[entry] = stamp_of(self.step, hit=False)
        return victims

    # --- operations ----------------------------------------------------------------------------

    @rule(data=st.data(), admits=st.sampled_from(["none", "some", "all"]))
    def resolve(self, data: st.DataObject, admits: str) -> None:
        self.step += data.draw(st.integers(0, 8))
        entries = range(self.committed)
        wanted = sorted(data.draw(st.sets(st.sampled_from(entries)))) if self.committed else []
        asked = torch.tensor(wanted, dtype=torch.int64)
        admit = None
        if admits != "none":
            mask = [admits == "all" or data.draw(st.booleans()) for _ in wanted]
            admit = torch.tensor(mask, dtype=torch.bool)
        missing = [entry for entry in wanted if entry not in self.slot]
        assert self.hot.count_missing(asked) == len(missing)
        found = self.hot.resolve(asked, self.step, admit)
        assert asked[found.missed].tolist() == missing
        kept = found.slot >= 0
        assert found.slot[kept].unique().numel() == int(kept.sum())
        hits = [entry for entry in wanted if entry in self.slot]
        if admit is not None and not self.hot.full:
            if self.hot.rule.touch:
                self.stamp.update(dict.fromkeys(hits, stamp_of(self.step, hit=True)))
            incoming = [e for e in asked[admit].tolist() if e not in self.slot]
            self.admit(incoming, keep=set(wanted))
        assert set(hits) <= self.slot.keys()  # what is wanted is never evicted by its own call
        assert found.slot.tolist() == [self.slot.get(entry, -1) for entry in wanted]
        loaded = found.missed & kept
        if bool(loaded.any()):
            self.hot.write(found.slot[loaded], self.truth[asked[loaded]])

    @rule(count=st.integers(1, 8), evict=st.booleans())
    def append(self, count: int, evict: bool) -> None:
        """Newly committed entries."""
        self.step += 1
        new = list(range(self.committed, min(self.committed + count, self.entries)))
        self.committed += len(new)
        self.hot.append(torch.tensor(new, dtype=torch.int64), self.truth[new], self.step, evict)
        if self.hot.full:
            self.slot.update((entry, entry) for entry in new)
            return
        room = self.hot.capacity if evict else len(self.free_slots())
        self.admit(new[len(new) - min(room, len(new)) :], keep=set())

    @rule(rows=st.integers(0, 44), data=st.data())
    def resize(self, rows: int, data: st.DataObject) -> None:
        before = (self.hot.capacity, self.hot.full, self.arena.frames.used, dict(self.slots_now()))
        recent = None
        if self.committed and data.draw(st.booleans()):
            chosen = sorted(data.draw(st.sets(st.sampled_from(range(self.committed)))))
            recent = torch.tensor(chosen, dtype=torch.int64)
        full = rows >= self.entries
        needed = self.layout.hot_frames(min(rows, self.entries), full) - self.hot.num_frames
        grows = full or not (self.hot.full or rows <= self.hot.capacity)
        if grows and not (full and self.hot.full) and needed > self.arena.frames.free:
            with pytest.raises(CapacityError, match="device memory"):
                self.hot.resize(rows, self.committed, self.fetch, recent)
            after = (self.hot.capacity, self.hot.full, self.arena.frames.used, self.slots_now())
            assert after == before
            return
        self.hot.resize(rows, self.committed, self.fetch, recent)
        self.resized(rows, before[1], recent)

    def resized(self, rows: int, was_full: bool, recent: Tensor | None) -> None:
        if rows >= self.entries:
            assert self.hot.full and self.hot.capacity == self.entries
            self.slot = {entry: entry for entry in range(self.committed)}
            return
        assert not self.hot.full
        if was_full:
            # Metadata may not fit beside the rows: then fewer rows stay, by whole frames.
            assert self.hot.capacity <= rows
            more = self.hot.capacity + self.layout.record.per_frame
            if self.hot.capacity < rows:
                lacking = self.layout.hot_frames(min(more, rows), False) - self.hot.num_frames
                assert lacking > self.arena.frames.free
            kept = [] if recent is None else recent.tolist()[::-1]
            kept = [*kept, *(e for e in range(self.committed)[::-1] if e not in kept)]
            kept = kept[: self.hot.capacity]
            chosen = set() if recent is None else set(recent.tolist())
            self.stamp = {entry: int(entry in chosen) for entry in kept}  # selected ones go last
        else:
            assert self.hot.capacity == rows
            order = sorted(self.slot, key=lambda e: (-self.stamp[e], self.slot[e]))
            self.stamp = {entry: self.stamp[entry] for entry in order[:rows]}
        self.slot = self.slots_now()
        assert self.slot.keys() == self.stamp.keys()

    @precondition(lambda self: not self.hot.full)
    @rule(data=st.data())
    def seed(self, data: st.DataObject) -> None:
        """What a cache holds after the prompt replaces what it held before."""
        most = min(self.hot.capacity, self.committed)
        entries = range(self.committed)
        chosen = data.draw(st.sets(st.sampled_from(entries), max_size=most)) if most else set()
        asked = torch.tensor(sorted(chosen), dtype=torch.int64)
        self.hot.seed(asked, self.truth[asked], self.step)
        self.slot = {entry: slot for slot, entry in enumerate(sorted(chosen))}
        self.stamp = dict.fromkeys(chosen, stamp_of(self.step, hit=False))

    @rule(frames=st.integers(0, 6))
    def press(self, frames: int) -> None:
        """Other owners take frames (as far as there are) or give all of theirs back."""
        if frames:
            self.arena.frames.allocate(min(frames, self.arena.frames.free), BALLAST)
        else:
            held = [f for f, owner in self.arena.frames._owner.items() if owner == BALLAST]
            self.arena.release(held, BALLAST)

    # --- invariants ----------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        self.hot.check_integrity(self.committed, self.truth)
        self.arena.frames.check_integrity()
        assert self.slots_now() == self.slot
        slots = list(self.slot.values())
        assert len(set(slots)) == len(slots)
        assert all(0 <= slot < self.hot.capacity for slot in slots)
        if slots:
            where = self.hot.locate(torch.tensor(slots))
            per = self.layout.record.per_frame
            records = self.arena.view(self.layout.record)[where // per, where % per]
            assert torch.equal(records, self.truth[list(self.slot)])

    @invariant()
    def frames_balance(self) -> None:
        owners = self.arena.frames.owners()
        hot = self.layout.hot_frames(self.hot.capacity, self.hot.full)
        assert owners.get(("hot", 1, "B"), 0) == hot == self.hot.num_frames
        assert self.arena.frames.used == hot + self.map.num_frames + owners.get(BALLAST, 0)

    def teardown(self) -> None:
        if hasattr(self, "hot"):
            for _ in range(2):
                self.hot.release()
                assert ("hot", 1, "B") not in self.arena.frames.owners()


TestHotCacheMachine = HotCacheMachine.TestCase
TestHotCacheMachine.settings = settings(
    max_examples=3 * settings.default.max_examples, stateful_step_count=40
)


# --- one at a time -------------------------------------------------------------------------------


def cache_with(entries: list[int], capacity: int, committed: int = 30) -> tuple[HotCache, Tensor]:
    """A mapped LRU cache over 40 entries that holds these, and the truth."""
    layout = small_frames()
    arena = Arena(40 * FRAME, FRAME, CPU, poison=True)
    slot_map = Table(arena, layout.slot_map, "map")
    slot_map.resize(40)
    hot = HotCache(arena, layout, slot_map, 40, RULES["lru"], (1, "B"))
    truth = truth_of(40)
    hot.resize(capacity, committed, lambda e: truth[e])
    hot.seed(torch.tensor(entries), truth[entries], step=1)
    return hot, truth


def test_a_look_up_changes_nothing() -> None:
    """admit=None: no stamp, no slot, no eviction; missing entries are reported absent."""
    hot, truth = cache_with([3, 5, 8], capacity=3)
    before = hot._meta.paged.prefix(3)
    found = hot.resolve(torch.tensor([3, 4, 8]), 7, admit=None)
    assert found.slot.tolist() == [0, -1, 2]
    assert torch.equal(hot._meta.paged.prefix(3), before)
    hot.check_integrity(30, truth)


def test_no_victim_comes_from_the_union() -> None:
    """A call that wants more than the capacity evicts nothing that it wants; the rest is absent."""
    hot, _ = cache_with([3, 5, 8], capacity=3)
    wanted = torch.tensor([1, 3, 4, 8, 9])
    found = hot.resolve(wanted, 7, torch.ones(5, dtype=torch.bool))
    assert found.slot.tolist() == [1, 0, -1, 2, -1]  # entry 1 took the slot of 5
    assert found.missed.tolist() == [True, False, True, False, True]
    assert hot.count_missing(torch.tensor([5])) == 1


def test_a_cache_without_slots_misses_everything() -> None:
    hot, truth = cache_with([], capacity=0)
    wanted = torch.tensor([0, 29])
    found = hot.resolve(wanted, 3, torch.ones(2, dtype=torch.bool))
    assert found.slot.tolist() == [-1, -1] and bool(found.missed.all())
    hot.append(torch.tensor([30]), truth[30:31], 4, evict=True)
    assert hot.num_frames == 0
    hot.check_integrity(31, truth)


@pytest.mark.parametrize("capacity", [3, 4, 5, 7, 8, 9, 15, 16, 17])
def test_capacities_around_frame_boundaries(capacity: int) -> None:
    """Every slot of a cache of any size holds its record, also after it is resized by one."""
    hot, truth = cache_with(list(range(capacity)), capacity)
    for rows in (capacity + 1, capacity, capacity - 1):
        hot.resize(rows, 30, lambda e: truth[e])
        hot.check_integrity(30, truth)
        assert hot.num_frames == -(-rows // 4) + -(-rows // 5)
    assert hot.count_missing(torch.arange(capacity)) == 1


@pytest.mark.parametrize("damage", ["row", "map", "slot", "doubled", "early", "full row"])
def test_integrity_check_sees(damage: str) -> None:
    """Each kind of contradiction between rows, map and slots is reported."""
    hot, truth = cache_with([3, 5, 8], capacity=4)
    hot.check_integrity(30, truth)
    committed = 30
    if damage == "row":
        hot.write(torch.tensor([1]), truth[6:7])
    elif damage == "map":
        hot._map.paged.put(torch.tensor([5]), torch.tensor([-1]))
    elif damage == "slot":
        hot._meta.paged.put(torch.tensor([1]), torch.tensor([[-1, 0]]))
    elif damage == "doubled":
        hot._map.paged.put(torch.tensor([6]), torch.tensor([1]))
    elif damage == "early":
        committed = 8
    else:
        hot.resize(40, 30, lambda e: truth[e])
        hot.check_integrity(30, truth)
        hot.write(torch.tensor([29]), truth[0:1])
    with pytest.raises(IntegrityError):
        hot.check_integrity(committed, truth)


def test_rows_are_compared_by_bits() -> None:
    """A NaN that the model wrote equals itself; a zero of the other sign does not."""
    hot, truth = cache_with([3], capacity=2)
    odd = truth.clone()
    odd[3, 0, :2] = torch.tensor([float("nan"), 0.0])
    hot.write(torch.tensor([0]), odd[3:4])
    hot.check_integrity(30, odd)
    odd[3, 0, 1] = -0.0
    with pytest.raises(IntegrityError, match="differs from the host"):
        hot.check_integrity(30, odd)


@given(
    committed=st.integers(0, 20),
    recent=st.none() | st.sets(st.integers(0, 25)),
    rows=st.integers(0, 24),
)
def test_keep_order(committed: int, recent: set[int] | None, rows: int) -> None:
    """Recent ones first (newest of them first), then the newest others, ascending, no duplicates."""
    order = [e for e in sorted(recent or (), reverse=True) if e < committed]
    order += [e for e in range(committed)[::-1] if e not in order]
    given_recent = None if recent is None else torch.tensor(sorted(recent), dtype=torch.int64)
    assert keep_order(given_recent, committed, rows, CPU).tolist() == sorted(order[:rows])


# --- the prompt, with a budget taken back in the middle ------------------------------------------


def prompt_step(memory: Hierarchy, start: int, count: int, last: bool, step: int) -> None:
    """One chunk of a prompt of request 1 on the toy geometry, committed whole."""
    segment = Segment(1, 0, count, start, decode=False, last_prompt_row=last)
    one = memory.begin_step([segment], step)
    for store in memory.layout.stores:
        rows = torch.arange(start, start + count)[:, None] + torch.zeros(6)
        for layer in store.store.layers:
            one.write_rows(layer, rows + 100 * layer)
        one.write_keys(store.store.layers[0], rows[:, :4])
    for selector in memory.layout.geometry.selectors:
        visible = one.visible(selector)[:, None]
        entries = torch.arange(selector.topk).expand(count, -1)
        one.select(selector, torch.where(entries < visible, entries, -1))
    memory.commit(one, [count])


@pytest.mark.parametrize("seed", ["selection", "first"])
@pytest.mark.parametrize("rows", [0, 3, 6, 20])
def test_a_full_cache_that_shrinks_during_its_prompt(seed: str, rows: int) -> None:
    """Release in the middle of a prompt, then seeding at its end: map and slots still agree."""
    memory = Hierarchy(
        Layout(TOY, "float32"), 1 << 17, 1 << 16, Reserve(8, 16), 0, CacheRule(seed=seed), CPU, True
    )
    memory.admit(1, 64, (64, 64))
    prompt_step(memory, 0, 16, last=False, step=0)
    memory.set_budgets({1: (rows, rows)})
    memory.check_integrity()
    prompt_step(memory, 16, 16, last=True, step=1)
    memory.check_integrity()
    wanted = {"selection": set(range(4)) | set(range(32 - rows + 4, 32)), "first": set(range(rows))}
    missing = [e for e in range(32) if memory.requests[1].hot[1].count_missing(torch.tensor([e]))]
    if rows >= 4:
        assert set(range(32)) - set(missing) == wanted[seed]
    else:
        assert len(missing) == 32 - rows
