"""One accounting: what is promised, what is allocated, and what is reported are the same bytes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpolicy.errors import CapacityError
from kvpolicy.geometry.presets import PRESETS, TOY
from kvpolicy.memory import accounting
from kvpolicy.memory.accounting import Reserve
from kvpolicy.memory.hierarchy import Hierarchy
from kvpolicy.memory.host_pool import HostPool
from kvpolicy.memory.layout import Layout
from kvpolicy.memory.rule import CacheRule

CPU = torch.device("cpu")
GEOMETRIES = {
    "tiny-dsa": PRESETS["tiny-dsa"],
    "toy-shared": TOY,
    "glm-5.3[:4]": PRESETS["glm-5.3"].slice(4),
}
LAYOUTS = {
    (name, dtype): Layout(geometry, dtype)
    for name, geometry in GEOMETRIES.items()
    for dtype in ("float32", "bf16")
}
KINDS = st.sampled_from(sorted(LAYOUTS))
HALF = settings(max_examples=max(1, settings.default.max_examples // 2))


def hierarchy(
    layout: Layout, frames: int, host_bytes: int, floor: int = 0, inflight: int = 4, slack: int = 0
) -> Hierarchy:
    """``frames`` frames beside what staging and in-flight rows take."""
    reserve = Reserve(layout.topk, inflight)
    shared = accounting.staging_frames(layout, reserve) + accounting.inflight_frames(
        layout, reserve
    )
    device_bytes = (shared + frames) * layout.frame_bytes + slack
    return Hierarchy(layout, device_bytes, host_bytes, reserve, floor, CacheRule(), CPU)


def boundary_tokens(layout: Layout) -> list[int]:
    """Token counts at which some table of some store is one below, at and above whole frames."""
    tokens = {1, 2, 3}
    for store in layout.stores:
        per = store.store.tokens_per_entry
        for item in (store.record, store.key, store.slot_map, store.meta):
            for frames in (1, 2):
                around = [frames * item.per_frame + offset for offset in (-1, 0, 1)]
                tokens.update(max(1, per * entries) for entries in around)
                tokens.update(max(1, per * entries - 1) for entries in around)
    return sorted(t for t in tokens if t <= min(6000, layout.geometry.max_context))


def owned(memory: Hierarchy, kinds: Iterable[str], request: int | None = None) -> int:
    """Frames that the allocator really handed out under these names."""
    total = 0
    for owner, count in memory.arena.frames.owners().items():
        assert isinstance(owner, tuple)
        if owner[0] in kinds and (request is None or owner[1] == request):
            total += count
    return total


def check_usage(memory: Hierarchy) -> None:
    """The report is the allocator's, adds up to the pool, and splits as it says."""
    usage, size = memory.usage(), memory.layout.frame_bytes
    assert usage.staging == owned(memory, ["staging"]) * size
    assert usage.in_flight == owned(memory, ["in-flight"]) * size
    assert usage.index_keys == owned(memory, ["keys"]) * size
    assert usage.slot_maps == owned(memory, ["map"]) * size
    assert usage.pinned == owned(memory, ["pinned"]) * size
    assert usage.hot_floor + usage.optional == owned(memory, ["hot"]) * size
    assert usage.optional == memory.optional_bytes()
    assert min(usage.hot_floor, usage.optional) >= 0
    parts = (usage.staging, usage.in_flight, usage.index_keys, usage.slot_maps, usage.pinned)
    assert usage.used == sum(parts) + usage.hot_floor + usage.optional
    assert usage.required == usage.used - usage.optional
    assert usage.used + usage.free == memory.arena.frames.num_frames * size
    assert usage.used == memory.arena.frames.used * size
    assert usage.host_used + usage.host_free == memory.host.extents.capacity


@HALF
@given(kind=KINDS, data=st.data(), floor=st.sampled_from([0, 1, 5, 13, 100]))
def test_accounting_equals_allocated_bytes(
    kind: tuple[str, str], data: st.DataObject, floor: int
) -> None:
    """Every admitted request takes the frames and host bytes that accounting says, none other."""
    layout = LAYOUTS[kind]
    memory = hierarchy(
        layout, 400, 24 << 20, floor, inflight=data.draw(st.integers(1, 40)),
        slack=data.draw(st.integers(0, layout.frame_bytes - 1)),
    )  # fmt: skip
    fixed = memory.arena.frames.used
    assert owned(memory, ["staging"]) == accounting.staging_frames(layout, memory.reserve)
    assert owned(memory, ["in-flight"]) == accounting.inflight_frames(layout, memory.reserve)
    assert fixed == owned(memory, ["staging", "in-flight"])
    most = min(700, layout.geometry.max_context)
    tokens = st.one_of(st.sampled_from(boundary_tokens(layout)), st.integers(1, most))
    rows = st.one_of(st.integers(-1, 40), st.integers(0, 1 << 40))
    host_used = 0
    admitted = []
    for number in range(data.draw(st.integers(1, 4))):
        count = data.draw(tokens)
        wanted = tuple(data.draw(rows) for _ in layout.stores)
        before = memory.arena.frames.used
        need = memory.frames_of(count, wanted)
        try:
            memory.admit(number, count, wanted)
        except CapacityError as error:
            assert (error.tier == "device") == (need > memory.arena.frames.free)
            assert memory.arena.frames.used == before and number not in memory.requests
            continue
        admitted.append(number)
        floored = tuple(max(value, floor) for value in wanted)
        hot = accounting.hot_frames(layout, floored, count)
        required = accounting.request_frames(layout, count)
        assert owned(memory, ["keys", "map", "pinned"], number) == required
        assert owned(memory, ["hot"], number) == hot
        assert memory.arena.frames.used - before == need == required + hot
        host_used += accounting.host_bytes(layout, count)
        assert host_used <= memory.usage().host_used < host_used + 64 * len(admitted)
        check_usage(memory)
    memory.check_integrity()
    for number in data.draw(st.permutations(admitted)):
        for _ in range(2):  # the second one is harmless
            memory.release(number)
            check_usage(memory)
        assert owned(memory, ["keys", "map", "pinned", "hot"], number) == 0
    assert memory.arena.frames.used == fixed
    assert memory.usage().host_used == 0 and memory.host.extents.largest == 24 << 20
    memory.check_integrity()


@pytest.mark.parametrize("kind", sorted(LAYOUTS), ids="-".join)
def test_frames_at_every_boundary(kind: tuple[str, str]) -> None:
    """One token below, at and above whole frames of every table, nothing and everything resident."""
    layout = LAYOUTS[kind]
    memory = hierarchy(layout, 1200, 64 << 20)
    fixed = memory.arena.frames.used
    for tokens in boundary_tokens(layout):
        for rows in (0, 1 << 40):
            wanted = (rows,) * len(layout.stores)
            memory.admit(1, tokens, wanted)
            assert memory.arena.frames.used - fixed == memory.frames_of(tokens, wanted)
            naive = sum(-(-p.rows // p.record.per_frame) for p in layout.pinned)
            for store in layout.stores:
                entries = tokens // store.store.tokens_per_entry
                items = [store.key, store.slot_map, *([store.record] if rows else [])]
                naive += sum(-(-entries // item.per_frame) for item in items)
            assert memory.arena.frames.used - fixed == naive
            memory.release(1)


@HALF
@given(
    kind=KINDS,
    data=st.data(),
    short=st.sampled_from(["neither", "device", "host", "both"]),
    missing=st.integers(1, 3),
)
def test_admission_is_all_or_nothing_and_names_the_tier(
    kind: tuple[str, str], data: st.DataObject, short: str, missing: int
) -> None:
    """One frame or one cache line short, on an empty engine: refused before and at admission."""
    layout = LAYOUTS[kind]
    least = max(store.store.tokens_per_entry for store in layout.stores)
    tokens = data.draw(st.integers(least, min(500, layout.geometry.max_context)))
    rows = tuple(data.draw(st.integers(0, 600)) for _ in layout.stores)
    frames = accounting.request_frames(layout, tokens) + accounting.hot_frames(layout, rows, tokens)
    host = accounting.host_bytes(layout, tokens)
    frames -= min(missing, frames) if short in ("device", "both") else 0
    host -= missing if short in ("host", "both") else 0
    memory = hierarchy(layout, frames, host)
    before = memory.usage()
    if short == "neither":
        memory.check_fits_alone(tokens, rows)
        memory.admit(5, tokens, rows)
        assert memory.arena.frames.free == 0 and memory.usage().host_free == 0
        memory.check_integrity()
        memory.check_fits_alone(tokens, rows)  # speaks of an empty engine
        with pytest.raises(CapacityError):
            memory.admit(6, tokens, rows)
        assert list(memory.requests) == [5]
        memory.check_integrity()
        memory.release(5)
    else:
        tier = "host" if short == "host" else "device"
        for attempt in (memory.check_fits_alone, lambda t, r: memory.admit(5, t, r)):
            with pytest.raises(CapacityError, match=f"^{tier} memory: ") as caught:
                attempt(tokens, rows)
            assert caught.value.tier == tier
            assert not memory.requests
            memory.check_integrity()
    assert memory.usage() == before


@HALF
@given(kind=KINDS, tokens=st.integers(1, 900), more=st.integers(0, 100), rows=st.integers(0, 900))
def test_longer_requests_never_take_less(
    kind: tuple[str, str], tokens: int, more: int, rows: int
) -> None:
    """Monotone in tokens for required memory and host; in rows below full residency for hot rows."""
    layout = LAYOUTS[kind]
    for measure in (accounting.request_frames, accounting.host_bytes):
        assert measure(layout, tokens) <= measure(layout, tokens + more)
    full = [store.store.entries(tokens) for store in layout.stores]
    low = tuple(max(0, min(rows, most - 1)) for most in full)
    high = tuple(max(0, min(rows + more, most - 1)) for most in full)
    hot = [accounting.hot_frames(layout, r, tokens) for r in (low, high)]
    assert hot[0] <= hot[1]


def test_device_and_host_sizes_are_independent() -> None:
    """More of one tier never lowers what the other holds."""
    layout = LAYOUTS["toy-shared", "float32"]

    def admitted(frames: int, host_lines: int) -> int:
        memory = hierarchy(layout, frames, host_lines * 64)
        for number in range(64):
            try:
                memory.admit(number, 40, (8, 8))
            except CapacityError:
                return number
        raise AssertionError("never full")

    table = [[admitted(f, h) for h in (40, 200, 400)] for f in (10, 40, 80)]
    assert all(row == sorted(row) for row in table)
    assert all(list(column) == sorted(column) for column in zip(*table, strict=True))
    assert table[0][0] < table[2][0] or table[0][0] < table[0][2]
    assert table[2][2] > max(table[0][2], table[2][0])


def test_fragmented_host_memory_refuses_and_takes_nothing() -> None:
    """Enough host bytes in two pieces: the host is named, the device is untouched."""
    layout = LAYOUTS["toy-shared", "float32"]
    host = accounting.host_bytes(layout, 40)
    memory = hierarchy(layout, 200, 3 * host)
    for number in range(3):
        memory.admit(number, 40, (8, 8))
    memory.release(0)
    memory.release(2)
    before = memory.usage()
    with pytest.raises(CapacityError, match=r"host memory: .* wanted in one range"):
        memory.admit(9, 80, (8, 8))
    assert memory.usage() == before and list(memory.requests) == [1]
    memory.check_integrity()


def test_a_request_of_the_same_number_is_refused() -> None:
    """The first one's memory would be lost."""
    memory = hierarchy(LAYOUTS["toy-shared", "float32"], 60, 1 << 16)
    memory.admit(1, 20, (4, 4))
    before = memory.usage()
    with pytest.raises(ValueError, match="request 1 is admitted already"):
        memory.admit(1, 20, (4, 4))
    assert memory.usage() == before
    memory.release(1)
    memory.check_integrity()


def test_staging_below_top_k_is_refused() -> None:
    layout = LAYOUTS["toy-shared", "float32"]
    with pytest.raises(CapacityError, match="staging_rows = 3: must be at least top-k = 4"):
        Hierarchy(layout, 1 << 20, 1 << 20, Reserve(3, 4), 0, CacheRule(), CPU)


def test_memory_below_staging_and_in_flight_is_refused() -> None:
    layout = LAYOUTS["tiny-dsa", "float32"]
    with pytest.raises(
        CapacityError, match=r"device_kv_mib = .*: staging .128 rows. and in-flight"
    ):
        hierarchy(layout, -1, 1 << 20)
    memory = hierarchy(layout, 0, 1 << 20)
    assert memory.arena.frames.free == 0
    memory.check_integrity()


def test_a_host_pool_that_cannot_be_had_is_a_capacity_error() -> None:
    with pytest.raises(CapacityError, match="host memory"):
        HostPool(1 << 60, LAYOUTS["toy-shared", "float32"], pinned=False)


@pytest.mark.parametrize("kind", sorted(LAYOUTS), ids="-".join)
def test_regions_of_requests_are_disjoint(kind: tuple[str, str]) -> None:
    """A value written for one (request, store, entry, layer) is read nowhere else."""
    layout = LAYOUTS[kind]
    pool = HostPool(1 << 20, layout, pinned=False)
    regions = [pool.reserve(tokens) for tokens in (1, 7, 8, 9)]
    arrays = [array for region in regions for array in (*region.rows, *region.keys)]
    for i, array in enumerate(arrays):
        array.fill_(i + 1)
    for i, array in enumerate(arrays):
        assert bool((array == i + 1).all())
        assert array.data_ptr() % 64 == pool._buffer.data_ptr() % 64 or not array.numel()
    for region, tokens in zip(regions, (1, 7, 8, 9), strict=True):
        for rows, keys, store in zip(region.rows, region.keys, layout.stores, strict=True):
            entries = tokens // store.store.tokens_per_entry
            assert rows.shape == (entries, *store.record.shape)
            assert keys.shape == (entries, *store.key.shape)
    pool.release(regions[0])
    with pytest.raises(Exception, match="not in use"):
        pool.release(regions[0])
