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
from kvpolicy.kernels.resolve import PAD, Resolved, resolve_batch
from kvpolicy.memory.accounting import Reserve
from kvpolicy.memory.arena import Arena, Table
from kvpolicy.memory.hierarchy import Hierarchy
from kvpolicy.memory.hot_cache import HotCache, Load, keep_order
from kvpolicy.memory.layout import Layout, StoreLayout
from kvpolicy.memory.rule import CacheRule
from kvpolicy.memory.segments import Segment
from kvpolicy.memory.tables import StoreTables

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
        key=dataclasses.replace(store.key, per_frame=12),
    )


def truth_of(entries: int) -> Tensor:
    """One value per (entry, layer, column); records of different entries share none."""
    return torch.arange(entries * 12, dtype=torch.float32).view(entries, 2, 6) + 0.5


SEAT = 1


class Cache:
    """One hot cache and its tables, as kernels and the hierarchy use them. map: its slot map."""

    def __init__(self, arena: Arena, layout: StoreLayout, entries: int, name: str) -> None:
        tokens = max(1, entries) * layout.store.tokens_per_entry
        self.tables = StoreTables(arena, layout, 2, tokens)
        row = self.tables.cache.map_frames[SEAT]
        self.map = Table(arena, layout.slot_map, "map", row)
        self.map.resize(entries)
        self.hot = HotCache(arena, self.tables, SEAT, self.map, entries, entries, (1, "B"))
        self.rule = RULES[name]

    def resolve(self, wanted: Tensor, step: int, admit: bool) -> Resolved:
        """Look ``wanted`` up; one row of padding beside it."""
        asked = torch.cat([wanted, torch.tensor([PAD])])[None]
        seats, may = torch.tensor([SEAT]), torch.tensor([admit])
        found = resolve_batch(self.tables.cache, seats, asked, may, self.rule, step)
        return Resolved(found.location[0, :-1], found.missed[0, :-1])

    def slots(self, wanted: Tensor) -> Tensor:
        """Slots by the map; of a full cache, the entries."""
        return wanted if self.hot.full else self.map.paged.get(wanted).long()

    def write(self, locations: Tensor, records: Tensor) -> None:
        view = self.tables.cache.records
        per = view.shape[1]
        view[locations // per, locations % per] = records


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
        self.cache = Cache(self.arena, self.layout, entries, name)
        self.map, self.hot = self.cache.map, self.cache.hot
        self.name = name
        self.entries = entries
        self.committed = min(committed, entries)
        self.truth = truth_of(entries)
        self.step = 10
        self.slot: dict[int, int] = {}
        self.stamp: dict[int, int] = {}
        self.hot.resize(rows, self.committed, self.load)
        self.resized(rows, False, None)

    # --- model ---------------------------------------------------------------------------------

    def load(self, entries: Tensor, locations: Tensor) -> None:
        assert entries.numel() == 0 or int(entries.max()) < self.committed
        self.cache.write(locations, self.truth[entries])

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

    @rule(data=st.data(), admit=st.booleans())
    def resolve(self, data: st.DataObject, admit: bool) -> None:
        self.step += data.draw(st.integers(0, 8))
        entries = range(self.committed)
        wanted = sorted(data.draw(st.sets(st.sampled_from(entries)))) if self.committed else []
        asked = torch.tensor(wanted, dtype=torch.int64)
        missing = [entry for entry in wanted if entry not in self.slot]
        assert self.hot.count_missing(asked) == len(missing)
        found = self.cache.resolve(asked, self.step, admit)
        assert asked[found.missed].tolist() == missing
        kept = found.location >= 0
        assert found.location[kept].unique().numel() == int(kept.sum())
        hits = [entry for entry in wanted if entry in self.slot]
        if admit and not self.hot.full:
            if self.cache.rule.touch:
                self.stamp.update(dict.fromkeys(hits, stamp_of(self.step, hit=True)))
            self.admit(missing, keep=set(wanted))
        assert set(hits) <= self.slot.keys()  # what is wanted is never evicted by its own call
        slots = self.cache.slots(asked)
        assert slots.tolist() == [self.slot.get(entry, -1) for entry in wanted]
        assert torch.equal(found.location[kept], self.hot.locate(slots[kept]))
        loaded = found.missed & kept
        if bool(loaded.any()):
            self.cache.write(found.location[loaded], self.truth[asked[loaded]])

    @rule(count=st.integers(1, 8))
    def append(self, count: int) -> None:
        """Newly committed entries."""
        self.step += 1
        new = list(range(self.committed, min(self.committed + count, self.entries)))
        self.committed += len(new)
        asked = torch.tensor(new, dtype=torch.int64)
        found = self.cache.resolve(asked, self.step, admit=True)
        kept = found.location >= 0
        self.cache.write(found.location[kept], self.truth[asked[kept]])
        if self.hot.full:
            assert bool(kept.all())
            self.slot.update((entry, entry) for entry in new)
            return
        self.admit(new[: self.hot.capacity], keep=set())

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
                self.hot.resize(rows, self.committed, self.load, recent)
            after = (self.hot.capacity, self.hot.full, self.arena.frames.used, self.slots_now())
            assert after == before
            return
        self.hot.resize(rows, self.committed, self.load, recent)
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
        self.hot.seed(asked, self.load, self.step)
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


def cache_with(entries: list[int], capacity: int, committed: int = 30) -> tuple[Cache, Tensor]:
    """A mapped LRU cache over 40 entries that holds these, and the truth."""
    cache = Cache(Arena(40 * FRAME, FRAME, CPU, poison=True), small_frames(), 40, "lru")
    truth = truth_of(40)
    cache.hot.resize(capacity, committed, loader(cache, truth))
    cache.hot.seed(torch.tensor(entries, dtype=torch.int64), loader(cache, truth), step=1)
    return cache, truth


def loader(cache: Cache, truth: Tensor) -> Load:
    return lambda entries, locations: cache.write(locations, truth[entries])


def test_a_look_up_changes_nothing() -> None:
    """admit False: no stamp, no slot, no eviction; missing entries are reported absent."""
    cache, truth = cache_with([3, 5, 8], capacity=3)
    before = cache.hot._meta.paged.prefix(3)
    wanted = torch.tensor([3, 4, 8])
    found = cache.resolve(wanted, 7, admit=False)
    assert cache.slots(wanted).tolist() == [0, -1, 2]
    assert found.missed.tolist() == [False, True, False] and int(found.location[1]) == -1
    assert torch.equal(cache.hot._meta.paged.prefix(3), before)
    cache.hot.check_integrity(30, truth)


def test_no_victim_comes_from_the_union() -> None:
    """A call that wants more than the capacity evicts nothing that it wants; the rest is absent."""
    cache, _ = cache_with([3, 5, 8], capacity=3)
    wanted = torch.tensor([1, 3, 4, 8, 9])
    found = cache.resolve(wanted, 7, admit=True)
    assert cache.slots(wanted).tolist() == [1, 0, -1, 2, -1]  # entry 1 took the slot of 5
    assert (found.location >= 0).tolist() == [True, True, False, True, False]
    assert found.missed.tolist() == [True, False, True, False, True]
    assert cache.hot.count_missing(torch.tensor([5])) == 1


def test_a_cache_without_slots_misses_everything() -> None:
    cache, truth = cache_with([], capacity=0)
    for wanted in (torch.tensor([0, 29]), torch.tensor([30])):
        found = cache.resolve(wanted, 3, admit=True)
        assert bool((found.location == -1).all()) and bool(found.missed.all())
    assert cache.hot.num_frames == 0
    cache.hot.check_integrity(31, truth)


@pytest.mark.parametrize("capacity", [3, 4, 5, 7, 8, 9, 15, 16, 17])
def test_capacities_around_frame_boundaries(capacity: int) -> None:
    """Every slot of a cache of any size holds its record, also after it is resized by one."""
    cache, truth = cache_with(list(range(capacity)), capacity)
    hot = cache.hot
    for rows in (capacity + 1, capacity, capacity - 1):
        hot.resize(rows, 30, loader(cache, truth))
        hot.check_integrity(30, truth)
        assert hot.num_frames == -(-rows // 4) + -(-rows // 5)
    assert hot.count_missing(torch.arange(capacity)) == 1


@pytest.mark.parametrize(
    "damage", ["row", "map", "slot", "doubled", "early", "full row", "capacity", "form"]
)
def test_integrity_check_sees(damage: str) -> None:
    """Each kind of contradiction between rows, map, slots and the kernels' tables is reported."""
    cache, truth = cache_with([3, 5, 8], capacity=4)
    hot = cache.hot
    hot.check_integrity(30, truth)
    committed = 30
    if damage == "row":
        cache.write(hot.locate(torch.tensor([1])), truth[6:7])
    elif damage == "map":
        hot._map.paged.put(torch.tensor([5]), torch.tensor([-1]))
    elif damage == "slot":
        hot._meta.paged.put(torch.tensor([1]), torch.tensor([[-1, 0]]))
    elif damage == "doubled":
        hot._map.paged.put(torch.tensor([6]), torch.tensor([1]))
    elif damage == "early":
        committed = 8
    elif damage == "capacity":
        cache.tables.cache.capacity[SEAT] = 3
    elif damage == "form":
        cache.tables.cache.full[SEAT] = True
    else:
        hot.resize(40, 30, loader(cache, truth))
        hot.check_integrity(30, truth)
        cache.write(hot.locate(torch.tensor([29])), truth[0:1])
    with pytest.raises(IntegrityError):
        hot.check_integrity(committed, truth)


def test_rows_are_compared_by_bits() -> None:
    """A NaN that the model wrote equals itself; a zero of the other sign does not."""
    cache, truth = cache_with([3], capacity=2)
    hot = cache.hot
    odd = truth.clone()
    odd[3, 0, :2] = torch.tensor([float("nan"), 0.0])
    cache.write(hot.locate(torch.tensor([0])), odd[3:4])
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
