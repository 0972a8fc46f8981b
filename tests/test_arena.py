"""The device arena: views of different items over one buffer, and tables that grow and shrink."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvpolicy.errors import CapacityError
from kvpolicy.geometry.presets import PRESETS, TOY
from kvpolicy.memory.arena import POISON, Arena, Table
from kvpolicy.memory.layout import Item, Layout

CPU = torch.device("cpu")
FRAME = 256
# Different item sizes, none of which divides the frame but the last.
ITEMS = (
    Item((2, 6), torch.float32, FRAME // 48),
    Item((3,), torch.bfloat16, FRAME // 6),
    Item((), torch.int32, FRAME // 4),
)


def arena_of(frames: int, poison: bool = True) -> Arena:
    return Arena(frames * FRAME, FRAME, CPU, poison)


def sentinels(item: Item, count: int, salt: int = 0) -> Tensor:
    """``count`` items whose values name table, item and column; exact in every dtype used."""
    width = 1
    for extent in item.shape:
        width *= extent
    values = torch.arange(count * width) * 7 + salt
    return (values % 251).reshape(count, *item.shape).to(item.dtype)


def bits(values: Tensor) -> Tensor:
    return values.contiguous().flatten().view(torch.uint8)


def test_frames_are_what_fits_into_the_capacity() -> None:
    arena = Arena(3 * FRAME + FRAME - 1, FRAME, CPU)
    assert arena.frames.num_frames == 3
    assert arena.buffer.shape == (3, FRAME)


def test_a_capacity_that_cannot_be_had_is_a_capacity_error() -> None:
    with pytest.raises(CapacityError, match="device memory"):
        Arena(1 << 60, 4096, CPU)


@pytest.mark.parametrize("item", ITEMS)
def test_a_view_is_the_buffer(item: Item) -> None:
    """A view's item is the bytes at its place: frame by frame, no byte of another frame."""
    arena = arena_of(4)
    view = arena.view(item)
    assert view.shape == (4, item.per_frame, *item.shape)
    one = sentinels(item, 1, salt=5)[0]
    view[2, item.per_frame - 1] = one
    expected = torch.zeros(4, FRAME, dtype=torch.uint8)
    last = (item.per_frame - 1) * item.bytes
    expected[2, last : last + item.bytes] = bits(one)
    assert torch.equal(arena.buffer, expected)


@given(sizes=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 90)), min_size=1, max_size=24))
def test_tables_keep_their_items_and_leave_others_alone(sizes: list[tuple[int, int]]) -> None:
    """Three tables of different items resized in any order: the kept prefix is kept, bit for bit."""
    arena = arena_of(24)
    tables = [Table(arena, item, i) for i, item in enumerate(ITEMS)]
    known = [sentinels(item, 0) for item in ITEMS]
    for step, (i, size) in enumerate(sizes):
        table, item = tables[i], ITEMS[i]
        grown = item.frames(size) - table.num_frames
        if grown > arena.frames.free:
            before = (table.items, table.num_frames, arena.frames.used)
            with pytest.raises(CapacityError):
                table.resize(size)
            assert before == (table.items, table.num_frames, arena.frames.used)
        else:
            table.resize(size)
            old = known[i][:size]
            new = sentinels(item, size, salt=step)[old.shape[0] :]
            if new.shape[0]:
                table.paged.put(torch.arange(old.shape[0], size), new)
            known[i] = torch.cat([old, new])
            assert table.num_frames == -(-size // item.per_frame)
        arena.frames.check_integrity()
        assert arena.frames.used == sum(t.num_frames for t in tables)
        for other, truth in zip(tables, known, strict=True):
            assert other.items == truth.shape[0]
            assert torch.equal(bits(other.paged.prefix(other.items)), bits(truth))
            every = torch.arange(other.items)
            assert torch.equal(bits(other.paged.get(every)), bits(truth))
    for table in tables:
        table.resize(0)
    assert arena.frames.used == 0


@pytest.mark.parametrize("item", ITEMS)
@pytest.mark.parametrize("frames", [1, 2, 3])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_lengths_at_a_frame_boundary(item: Item, frames: int, offset: int) -> None:
    """The last item of a length one below, at and above whole frames is stored and found."""
    arena = arena_of(5)
    Table(arena, ITEMS[0], "other").resize(1)  # so that frame numbers are not item numbers
    table = Table(arena, item, "own")
    count = frames * item.per_frame + offset
    table.resize(count)
    assert table.num_frames == frames + (offset > 0)
    truth = sentinels(item, count)
    table.paged.put(torch.arange(count), truth)
    assert torch.equal(table.paged.prefix(count), truth)
    assert torch.equal(table.paged.get(torch.tensor(count - 1)), truth[-1])
    locations = table.paged.locate(torch.arange(count))
    assert locations.unique().numel() == count
    assert int(locations.min()) >= item.per_frame  # never in the other table's frame


def test_freed_frames_are_poisoned_and_kept_ones_are_not() -> None:
    arena = arena_of(4)
    item = ITEMS[0]
    table = Table(arena, item, "a")
    table.resize(2 * item.per_frame)
    table.paged.put(torch.arange(table.items), sentinels(item, table.items))
    table.resize(item.per_frame)
    assert bool((arena.buffer[1] == POISON).all())
    assert torch.equal(table.paged.prefix(item.per_frame), sentinels(item, item.per_frame))
    assert bool(arena.view(item)[1].isnan().all())
    assert bool(arena.view(ITEMS[1])[1].isnan().all())
    assert bool((arena.view(ITEMS[2])[1] == -1).all())
    assert not bool(arena.buffer[2:].any())


def test_nothing_is_poisoned_unless_asked() -> None:
    arena = arena_of(1, poison=False)
    table = Table(arena, ITEMS[2], "a")
    table.resize(3)
    table.paged.put(torch.arange(3), torch.tensor([5, 6, 7]))
    table.resize(0)
    assert arena.view(ITEMS[2])[0, :3].tolist() == [5, 6, 7]


def test_a_sharing_table_reads_its_owners_frames() -> None:
    """Another item kind over the same frames: disjoint from all other tables, same bytes."""
    arena = arena_of(4)
    Table(arena, ITEMS[0], "other").resize(1)
    owner = Table(arena, ITEMS[0], "staging")
    owner.resize(2 * ITEMS[0].per_frame)
    count = ITEMS[2].per_frame + 3
    shared = Table.sharing(owner, ITEMS[2], count)
    assert (shared.items, shared.num_frames) == (count, 2)
    assert torch.equal(shared.paged.frames, owner.paged.frames)
    values = torch.arange(count, dtype=torch.int32) + 1
    shared.paged.put(torch.arange(count), values)
    assert torch.equal(shared.paged.prefix(count), values)
    assert arena.frames.used == 3
    assert not bool(arena.buffer[0].any())
    assert torch.equal(bits(owner.paged.get(torch.tensor(0))), bits(values[:12]))


def test_a_column_is_one_component() -> None:
    arena = arena_of(3)
    item = Item((2,), torch.int32, FRAME // 8)
    table = Table(arena, item, "meta")
    count = item.per_frame + 1
    table.resize(count)
    table.paged.put(torch.arange(count), torch.zeros(count, 2))
    table.column(1).put(torch.arange(count), torch.arange(count) + 100)
    assert table.column(0).get(torch.arange(count)).tolist() == [0] * count
    assert table.column(1).get(torch.tensor([0, count - 1])).tolist() == [100, 100 + count - 1]


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_every_layouts_items_lie_inside_frames(name: str, dtype: str) -> None:
    """Items of all kinds fit, a record is as large as the geometry says, little of a frame is lost."""
    layout = Layout(PRESETS[name], dtype)
    for store in layout.stores:
        assert store.record.bytes == store.store.record_bytes(dtype)
        assert store.key.bytes == store.store.index_key_bytes(dtype)
        for item in (store.record, store.key, store.slot_map, store.meta):
            assert (
                layout.frame_bytes - item.bytes < item.per_frame * item.bytes <= layout.frame_bytes
            )
    widest = max(store.record.bytes for store in layout.stores)
    windows = [pinned.record.bytes for pinned in layout.pinned]
    assert 12 * widest <= layout.frame_bytes <= max(4096, 24 * widest, *(2 * w for w in windows))
    for pinned in layout.pinned:
        assert pinned.record.bytes == pinned.pinned.bytes_per_row(dtype)


def test_an_item_larger_than_a_frame_is_refused() -> None:
    layout = Layout(TOY, "float32")
    with pytest.raises(ValueError, match="does not fit a frame"):
        layout.item((layout.frame_bytes,), torch.float32)
