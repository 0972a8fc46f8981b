"""Retrieve and publish of a decode step: the reference by its promises, the kernels by the reference."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from cache_tables import CPU, Seat, Shape, arena_of, contents
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_memory import (
    Sizes,
    copy_store,
    flying_records,
    hosts_records,
    make_store,
    records_at,
)
from torch import Tensor

from kvpolicy.kernels.eviction import CLOCK_SPARE_STEPS, RULES, EvictionRule
from kvpolicy.kernels.publish import publish
from kvpolicy.kernels.retrieve import DecodeRows, StoreMemory, first_appearances, retrieve

MIXED = [
    Seat(40, 9),
    Seat(13, 13, full=True),
    Seat(30, 0),
    Seat(35, 33),
    Seat(50, 16),
    Seat(27, 1),
]
STATE = ("used", "hand", "draws", "age")


@dataclasses.dataclass
class Load:
    """Random decode steps over a store: what each seat has committed, and the call that comes next."""

    seats: list[Seat]
    q: int
    k: int
    tokens: int
    rng: np.random.Generator
    committed: list[int]

    def rows(self, step: int) -> DecodeRows:
        """Some of the seats that have room for q more tokens, and padded pieces between them."""
        may = [s for s in range(len(self.seats)) if self.room(s) >= self.q]
        asked = [s if self.rng.random() < 0.8 else -1 for s in self.rng.permutation(may).tolist()]
        asked += [-1] * int(self.rng.integers(0, 2))
        own = [self.committed[s] if s >= 0 else 7 for s in asked]
        return DecodeRows(
            seat=torch.tensor(asked, dtype=torch.int64),
            committed=torch.tensor(own, dtype=torch.int64),
            step=torch.tensor([step]),
            admit=torch.from_numpy(self.rng.random(len(asked)) < 0.85),
            q=self.q,
        )

    def room(self, seat: int) -> int:
        return self.seats[seat].entries * self.tokens - self.committed[seat]

    def chosen(self, rows: DecodeRows) -> Tensor:
        """Ascending entries of each row, the entries that the step completes among them; -1 after."""
        found = torch.full((len(rows.seat) * self.q, self.k), -1)
        for piece, seat in enumerate(rows.seat.tolist()):
            for j in range(self.q):
                visible = (self.committed[seat] + j + 1) // self.tokens if seat >= 0 else 5
                count = int(self.rng.integers(0, min(visible, self.k) + 1))
                own = np.sort(self.rng.permutation(visible)[:count])
                found[piece * self.q + j, :count] = torch.from_numpy(own)
        return found


def make_load(
    seed: int, q: int = 1, k: int = 6, tokens: int = 1, seats: list[Seat] = MIXED
) -> tuple[Load, Tensor, StoreMemory]:
    rng = np.random.default_rng(seed)
    pieces = len(seats) + 1
    arena, store = make_store(seats, Sizes(pieces * q * k, pieces * q, tokens), rng)
    committed = [int(rng.integers(0, max(1, s.entries * tokens // 2))) for s in seats]
    return Load(seats, q, k, tokens, rng, committed), arena, store


def fill_full(store: StoreMemory, load: Load) -> None:
    """Full caches hold what the host holds."""
    for seat, kind in enumerate(load.seats):
        if kind.full:
            entries = torch.arange(kind.entries)
            state = store.cache.records
            per = state.shape[1]
            frames = store.cache.row_frames[seat]
            where = frames[entries // per] * per + entries % per
            flat = hosts_records(store, seat, entries).view(state.dtype)
            state[where // per, where % per] = flat.view(-1, *state.shape[2:])


def check_retrieved(
    store: StoreMemory, load: Load, rows: DecodeRows, chosen: Tensor, location: Tensor
) -> None:
    """Every selected record is where it is said to be, bit for bit; elsewhere ABSENT."""
    assert location.dtype == torch.int32 and location.shape == chosen.shape
    for row in range(chosen.shape[0]):
        piece, seat = row // load.q, int(rows.seat[row // load.q])
        there = chosen[row] >= 0 if seat >= 0 else torch.zeros(load.k, dtype=torch.bool)
        assert bool((location[row][~there] == -1).all())
        entries, where = chosen[row][there], location[row][there].long()
        if not entries.numel():
            continue
        old = entries < load.committed[seat] // load.tokens
        assert torch.equal(records_at(store, where[old]), hosts_records(store, seat, entries[old]))
        index = entries * load.tokens + load.tokens - 1 - load.committed[seat] + piece * load.q
        assert torch.equal(records_at(store, where[~old]), flying_records(store, index[~old]))


@given(
    seed=st.integers(0, 2**32 - 1),
    q=st.sampled_from([1, 1, 3]),
    tokens=st.sampled_from([1, 1, 2]),
    name=st.sampled_from(sorted(RULES)),
)
def test_every_selected_record_is_there_and_new_ones_are_durable(
    seed: int, q: int, tokens: int, name: str
) -> None:
    """Several steps of retrieve and publish over all kinds of caches, with padded pieces."""
    load, _, store = make_load(seed, q, tokens=tokens)
    fill_full(store, load)
    for step in range(6):
        rows = load.rows(step)
        chosen = load.chosen(rows)
        hits = {
            s: set(contents(store.cache, s, load.seats[s].entries))
            for s in rows.seat.tolist()
            if s >= 0 and not load.seats[s].full
        }
        before = store.counts.clone()
        location = retrieve(store, rows, chosen, RULES[name])
        check_retrieved(store, load, rows, chosen, location)
        check_counts(store, load, rows, chosen, hits, before)
        accepted = torch.from_numpy(load.rng.integers(0, q + 1, len(rows.seat)))
        flying = [
            flying_records(store, torch.arange(q) + i * q).clone() for i in range(len(rows.seat))
        ]
        publish(store, rows, accepted, RULES[name], bool(load.rng.random() < 0.7))
        check_published(store, load, rows, accepted, flying)


def check_counts(
    store: StoreMemory,
    load: Load,
    rows: DecodeRows,
    chosen: Tensor,
    hits: dict[int, set[int]],
    before: Tensor,
) -> None:
    """Selected, unique and fetched rows of every seat; staged ones are those that did not stay."""
    added = store.counts - before
    for seat in range(len(load.seats)):
        if seat not in rows.seat.tolist():
            assert not added[seat].any()
            continue
        piece = rows.seat.tolist().index(seat)
        own = chosen[piece * load.q : (piece + 1) * load.q].flatten().tolist()
        old = [e for e in own if 0 <= e < load.committed[seat] // load.tokens]
        missing = set(old) - hits.get(seat, set(old))
        now = (
            set()
            if load.seats[seat].full
            else set(contents(store.cache, seat, load.seats[seat].entries))
        )
        size = store.host.element_size() * store.cache.records[0, 0].numel()
        rest = [len(old), len(set(old)), len(missing), len(missing - now), 0]
        expected = [count * store.layers for count in rest] + [len(missing) * size]
        assert added[seat].tolist() == expected


def check_published(
    store: StoreMemory, load: Load, rows: DecodeRows, accepted: Tensor, flying: list[Tensor]
) -> None:
    """Complete entries are on the host, in full caches, and (if they are in a mapped one) right there."""
    for piece, seat in enumerate(rows.seat.tolist()):
        if seat < 0:
            continue
        tokens = load.committed[seat]
        load.committed[seat] += int(accepted[piece])
        entries = torch.arange(tokens // load.tokens, load.committed[seat] // load.tokens)
        rows_of = entries * load.tokens + load.tokens - 1 - tokens
        assert torch.equal(hosts_records(store, seat, entries), flying[piece][rows_of])
        keys = store.keys[
            store.key_frames[seat][entries // store.keys.shape[1]], entries % store.keys.shape[1]
        ]
        width = keys.shape[1]
        at = int(store.key_base[seat]) + entries[:, None] * width + torch.arange(width)
        assert torch.equal(store.host[at], keys.view(torch.int32))
        if load.seats[seat].full:
            continue
        held = contents(store.cache, seat, load.seats[seat].entries)
        assert max(held, default=0) < max(load.committed[seat] // load.tokens, 1)
        per, frames = store.cache.records.shape[1], store.cache.row_frames[seat]
        for entry, slot in held.items():
            where = frames[slot // per] * per + slot % per
            found = records_at(store, where[None])
            assert torch.equal(found, hosts_records(store, seat, torch.tensor([entry])))
        assert sorted(held.values()) == list(range(int(store.cache.used[seat])))


def test_a_later_layer_fetches_again_and_changes_nothing() -> None:
    """first = False: missing records are staged and counted as refetched, caches stay as they were."""
    load, _, store = make_load(3)
    rows = load.rows(1)
    chosen = load.chosen(rows)
    state = [getattr(store.cache, name).clone() for name in ("maps", "meta", *STATE)]
    before = store.counts.clone()
    fill_full(store, load)
    location = retrieve(store, rows, chosen, RULES["clock"], first=False)
    check_retrieved(store, load, rows, chosen, location)
    for name, old in zip(STATE, state[2:], strict=True):
        assert torch.equal(getattr(store.cache, name), old)
    added = store.counts - before
    assert not added[:, :4].any() and int(added[:, 4].sum()) > 0


def test_staging_that_may_overflow_is_refused() -> None:
    load, _, store = make_load(0)
    rows = load.rows(1)
    small = dataclasses.replace(store, staging_rows=len(rows.seat) * load.k - 1)
    with pytest.raises(ValueError, match=r"staging_rows = .* pieces of 6 entries need"):
        retrieve(small, rows, load.chosen(rows), RULES["clock"])


def test_first_appearances() -> None:
    distinct, which = first_appearances(torch.tensor([7, 3, 7, 9, 3, 1]))
    assert distinct.tolist() == [7, 3, 9, 1] and which.tolist() == [0, 1, 0, 2, 1, 3]


# --- kernels ---------------------------------------------------------------------------------------

pytest.importorskip("triton")


def assert_same(one: StoreMemory, other: StoreMemory) -> None:
    """All memory of both: arena, host pool, numbers of seats, counters; arrivals are zero."""
    assert torch.equal(arena_of(one.cache), arena_of(other.cache).to(CPU))
    assert torch.equal(one.host, other.host.to(CPU))
    assert torch.equal(one.counts, other.counts.to(CPU))
    assert not bool(other.arrivals.any())
    for name in STATE:
        assert torch.equal(getattr(one.cache, name), getattr(other.cache, name).to(CPU)), name


def moved(rows: DecodeRows, device: torch.device) -> DecodeRows:
    changes = {
        f.name: getattr(rows, f.name).to(device) for f in dataclasses.fields(rows) if f.name != "q"
    }
    return dataclasses.replace(rows, **changes)


@pytest.fixture
def kernels() -> ModuleType:
    """Imported late: without triton it does not load."""
    from kvpolicy.kernels.triton import retrieve

    return retrieve


def same_steps(
    kernels: Any, device: torch.device, load: Load, made: tuple[Tensor, StoreMemory],
    rule: EvictionRule, shape: Any, steps: int, growing: bool = False,
) -> None:  # fmt: skip
    """Steps on both, everything compared after each. growing: caches begin with a third of their slots and
    get others between the steps, by a number on the device."""
    from kvpolicy.kernels.triton.publish import publish as publish_triton

    arena, store = made
    fill_full(store, load)
    most = store.cache.capacity.clone()
    if growing:
        store.cache.capacity.floor_divide_(3)
    _, other = copy_store(arena, store, device)
    step = 0
    for _ in range(steps):
        step += int(load.rng.choice([0, 1, 1, CLOCK_SPARE_STEPS]))
        if growing:
            more = store.cache.capacity + torch.from_numpy(load.rng.integers(0, 4, len(most)))
            store.cache.capacity.copy_(torch.minimum(more, most))
            other.cache.capacity.copy_(store.cache.capacity)
        rows = load.rows(step)
        chosen = load.chosen(rows)
        chosen = chosen.int() if load.rng.random() < 0.5 else chosen
        first = bool(load.rng.random() < 0.8)
        expected = retrieve(store, rows, chosen, rule, first)
        on = moved(rows, device)
        found = kernels.retrieve(other, on, chosen.to(device), rule, first, shape=shape)
        assert torch.equal(found.to(CPU), expected)
        assert_same(store, other)
        accepted = torch.from_numpy(load.rng.integers(0, load.q + 1, len(rows.seat)))
        evict = bool(load.rng.random() < 0.7)
        publish(store, rows, accepted, rule, evict)
        publish_triton(other, on, accepted.to(device), rule, evict)
        assert_same(store, other)
        for piece, seat in enumerate(rows.seat.tolist()):
            if seat >= 0:
                load.committed[seat] += int(accepted[piece])


@pytest.mark.parametrize(
    ("name", "parts", "fused"),
    [*[(n, 1, False) for n in sorted(RULES)], ("clock", 4, False), ("fifo", 4, True), ("clock", 2, True)],
)  # fmt: skip
def test_kernels_equal_the_reference(
    name: str, parts: int, fused: bool, device: torch.device, kernels: ModuleType
) -> None:
    """Bit for bit in the whole arena, the host pool, every number; padded and repeated steps too."""
    load, arena, store = make_load(10 * parts, k=20)
    shape = kernels.Shape(parts, 16, 4, 2, 2, fused=fused, tile=16)
    same_steps(kernels, device, load, (arena, store), RULES[name], shape, 7)
    assert int(store.cache.draws.sum()) > 0


KINDS = st.tuples(st.integers(1, 40), st.integers(0, 14), st.integers(0, 4)).map(
    lambda s: Seat(s[0], s[0], full=True) if s[2] == 0 else Seat(s[0], min(s[0], s[1]))
)


@given(
    seats=st.lists(KINDS, min_size=1, max_size=3),
    seed=st.integers(0, 2**32 - 1),
    q=st.sampled_from([1, 1, 2]),
    parts=st.sampled_from([1, 2]),
    name=st.sampled_from(sorted(RULES)),
)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_caches_that_grow(
    seats: list[Seat], seed: int, q: int, parts: int, name: str, device: torch.device, kernels: Any
) -> None:
    """Unequal capacities, some of them 0, that change between steps; kernels equal the reference."""
    load, arena, store = make_load(seed, q, 5, seats=seats)
    shape = kernels.Shape(parts, 16, 4, 2, 2, tile=16)
    same_steps(kernels, device, load, (arena, store), RULES[name], shape, 3, growing=True)


@pytest.mark.parametrize("name", sorted(RULES))
def test_unions_equal_the_reference(
    name: str, device: torch.device, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows a piece, which overlap: the same, with one or two tokens an entry."""
    from kvpolicy.kernels.triton import union

    monkeypatch.setattr(union, "BLOCK", 16)
    load, arena, store = make_load(0, q=3, k=20, tokens=2 if name == "clock" else 1)
    shape = kernels.Shape(1, 16, 4, 2, 2)
    same_steps(kernels, device, load, (arena, store), RULES[name], shape, 5)
    assert int(store.cache.draws.sum()) > 0


class WindowLoad(Load):
    """Rows select from the newest part of their history, so that most of it is in the caches."""

    def chosen(self, rows: DecodeRows) -> Tensor:
        found = torch.full((len(rows.seat), self.k), -1, dtype=torch.int32)
        for piece, seat in enumerate(rows.seat.tolist()):
            visible = self.committed[seat] + 1 if seat >= 0 else 5
            span = min(visible, 2 * max(self.seats[seat].capacity, 2000))
            count = int(self.rng.integers(0, min(span, self.k) + 1))
            own = np.sort(self.rng.permutation(span)[:count]) + visible - span
            found[piece, :count] = torch.from_numpy(own)
        return found


@pytest.mark.gpu
@pytest.mark.parametrize(
    "cut",
    [(1, 1024, 8, 32, 4), (8, 256, 4, 132, 4), (4, 512, 4, 32, 2), (8, 256, 4, 132, 4, 4, True)],
)
def test_true_sizes(cut: tuple[int, ...], device: torch.device, kernels: ModuleType) -> None:
    """Top-k 2048 of 60,000 entries, caches to 33,000 slots, records of 656 bytes."""
    kinds = [(60_000, 33_000), (30_000, 4096), (30_000, 4095), (20_000, 20_000), (30_000, 2048)]
    seats = [Seat(entries, slots, full=entries == slots) for entries, slots in kinds]
    rng = np.random.default_rng(len(cut))
    shape = Shape(rows=49, maps=8192, meta=4096, layers=1, width=164, frame_bytes=1 << 15)
    arena, store = make_store(seats, Sizes(6 * 2048, 8), rng, shape)
    committed = [seat.entries - 100 for seat in seats]
    load = WindowLoad(seats, 1, 2048, 1, rng, committed)
    same_steps(kernels, device, load, (arena, store), RULES["clock"], kernels.Shape(*cut), 20)
    assert int(store.cache.draws.min()) >= 0 and int(store.cache.draws.sum()) > 10
