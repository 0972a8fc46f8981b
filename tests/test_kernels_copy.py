"""Copies of records against plain Python: the reference, and Triton interpreted and on a GPU."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

CPU = torch.device("cpu")
REFERENCE, TRITON = "kvpolicy.kernels.copy", "kvpolicy.kernels.triton.copy"


class Where(NamedTuple):
    """The copy functions under test, and where the arena lies."""

    copies: ModuleType
    device: torch.device


@pytest.fixture(
    params=[
        pytest.param((REFERENCE, "cpu"), id="reference"),
        pytest.param((TRITON, "cpu"), id="interpreter", marks=pytest.mark.interpreter),
        pytest.param((REFERENCE, "cuda"), id="reference-gpu", marks=pytest.mark.gpu),
        pytest.param((TRITON, "cuda"), id="gpu", marks=pytest.mark.gpu),
    ]
)
def where(request: pytest.FixtureRequest) -> Where:
    name, device = request.param
    return Where(import_module(name), torch.device(device))


# (item shape, dtype, records in a frame, frame bytes): 12 B, bf16 of an odd count of layers, records
# of one word, 656 B, one wider than a piece and no multiple of 16 B, and scalars as the maps are.
RECORDS = [
    ((3,), torch.float32, 4, 64),
    ((3, 6), torch.bfloat16, 5, 256),
    ((2,), torch.bfloat16, 7, 64),
    ((4, 41), torch.float32, 3, 2048),
    ((3, 1430), torch.bfloat16, 2, 20480),
    ((8,), torch.uint8, 3, 32),
    ((), torch.int32, 5, 32),
]
FRAMES, HOST_RECORDS, LIST = 5, 9, 40


class Copying:
    """An arena and a host pool full of noise, and lists of moves between them, some to be skipped."""

    def __init__(self, index: int, device: torch.device) -> None:
        shape, dtype, self.per, size = RECORDS[index]
        self.rng = np.random.default_rng(index)
        self.bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self.words = self.bytes // 4
        arena = torch.from_numpy(self.rng.integers(0, 256, (FRAMES, size), dtype=np.uint8))
        # A region of records that begins on a 64-byte line, noise before and behind it.
        host = torch.from_numpy(self.noise(16 + HOST_RECORDS * self.words + 5))
        self.host = host.pin_memory() if device.type == "cuda" else host
        self.arena = arena.to(device)
        raw = self.arena[:, : self.per * self.bytes].view(dtype)
        self.view = raw.view(FRAMES, self.per, *shape)
        self.device = device

    def noise(self, words: int) -> np.ndarray:
        return self.rng.integers(-(2**31), 2**31, words, dtype=np.int32)

    def distinct(self, count: int) -> list[int]:
        return self.rng.permutation(count)[:LIST].tolist()

    def span(self, location: int) -> tuple[int, slice]:
        """Frame and bytes of a record."""
        start = location % self.per * self.bytes
        return location // self.per, slice(start, start + self.bytes)

    def position(self, record: int) -> int:
        return 16 + record * self.words

    def lists(self, source: list[int], destination: list[int]) -> tuple[Tensor, Tensor]:
        """As tensors, with entries between them that are to be skipped."""
        pairs = []
        for pair in zip(source, destination, strict=True):
            skipped = [(-1, pair[1]), (pair[0], -1), (-7, -7)][int(self.rng.integers(0, 3))]
            pairs += [pair, skipped]
        both = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).to(self.device)
        return both[:, 0].contiguous(), both[:, 1].contiguous()


@pytest.mark.parametrize("index", range(len(RECORDS)))
def test_host_to_arena(index: int, where: Where) -> None:
    """Exactly the named records change; a record may be read twice."""
    world = Copying(index, where.device)
    target = world.distinct(FRAMES * world.per)
    chosen = world.rng.integers(0, HOST_RECORDS, len(target)).tolist()
    expected, host = world.arena.to(CPU, copy=True), world.host.clone()
    for record, location in zip(chosen, target, strict=True):
        frame, columns = world.span(location)
        at = world.position(record)
        expected[frame, columns] = host[at : at + world.words].view(torch.uint8)
    source, destination = world.lists([world.position(r) for r in chosen], target)
    where.copies.host_to_arena(world.host, source, world.view, destination)
    assert torch.equal(world.arena.to(CPU), expected)
    assert torch.equal(world.host, host)


@pytest.mark.parametrize("index", range(len(RECORDS)))
def test_arena_to_host(index: int, where: Where) -> None:
    world = Copying(index, where.device)
    target = world.distinct(HOST_RECORDS)
    chosen = world.rng.integers(0, FRAMES * world.per, len(target)).tolist()
    arena, expected = world.arena.to(CPU, copy=True), world.host.clone()
    for location, record in zip(chosen, target, strict=True):
        frame, columns = world.span(location)
        at = world.position(record)
        expected[at : at + world.words] = arena[frame, columns].clone().view(torch.int32)
    source, destination = world.lists(chosen, [world.position(r) for r in target])
    where.copies.arena_to_host(world.view, source, world.host, destination)
    if where.device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(world.host, expected)
    assert torch.equal(world.arena.to(CPU), arena)


@pytest.mark.parametrize("index", range(len(RECORDS)))
def test_arena_to_arena(index: int, where: Where) -> None:
    world = Copying(index, where.device)
    order = world.distinct(FRAMES * world.per)
    target, pool = order[: len(order) // 2], order[len(order) // 2 :]
    chosen = world.rng.choice(pool, len(target)).tolist()
    before = world.arena.to(CPU, copy=True)
    expected = before.clone()
    for come, go in zip(chosen, target, strict=True):
        frame, columns = world.span(go)
        from_frame, from_columns = world.span(come)
        expected[frame, columns] = before[from_frame, from_columns]
    where.copies.arena_to_arena(world.view, *world.lists(chosen, target))
    assert torch.equal(world.arena.to(CPU), expected)


def test_an_empty_list_copies_nothing(where: Where) -> None:
    world = Copying(0, where.device)
    arena, host = world.arena.clone(), world.host.clone()
    source, destination = world.lists([], [])
    where.copies.host_to_arena(world.host, source, world.view, destination)
    where.copies.arena_to_host(world.view, source, world.host, destination)
    where.copies.arena_to_arena(world.view, source, destination)
    assert torch.equal(world.arena, arena) and torch.equal(world.host, host)


def test_odd_records_and_hosts_are_refused(where: Where) -> None:
    world = Copying(0, where.device)
    none = torch.empty(0, dtype=torch.int64, device=where.device)
    three_bytes = world.arena[:, :6].view(FRAMES, 2, 3)
    with pytest.raises(ValueError, match="a record of 3 bytes: must be a positive multiple of 4"):
        where.copies.host_to_arena(world.host, none, three_bytes, none)
    with pytest.raises(ValueError, match="a record of 0 bytes"):
        where.copies.arena_to_arena(world.view[:, :, :0], none, none)
    with pytest.raises(ValueError, match="must be contiguous"):
        where.copies.arena_to_arena(world.view.transpose(1, 2), none, none)
    for host in (world.host.view(torch.uint8), world.host[::2]):
        with pytest.raises(ValueError, match=r"host = .*: must be contiguous"):
            where.copies.arena_to_host(world.view, none, host, none)


def test_a_position_off_its_alignment_is_refused_by_the_reference() -> None:
    world = Copying(3, CPU)  # 164 words: positions are multiples of 4
    at = torch.tensor([16, 18])
    with pytest.raises(
        ValueError, match="host position 18: must be a multiple of 4 for records of"
    ):
        import_module(REFERENCE).host_to_arena(world.host, at, world.view, torch.tensor([0, 1]))


@pytest.mark.gpu
@pytest.mark.parametrize(("layers", "width"), [(1, 328), (4, 328), (3, 576), (5, 41 * 2)])
def test_many_records(layers: int, width: int) -> None:
    """20000 bf16 records, more than one round of every program, scattered on both sides."""
    from kvpolicy.kernels.triton import copy

    rng = np.random.default_rng(layers)
    per, frames, count = 12, 4000, 20000
    words = layers * width // 2
    frame = -(-per * words // 1024) * 4096
    arena = torch.zeros((frames, frame), dtype=torch.uint8, device="cuda")
    view = arena[:, : per * words * 4].view(torch.bfloat16).view(frames, per, layers, width)
    host = torch.from_numpy(rng.integers(-(2**31), 2**31, count * words, dtype=np.int32))
    host = host.pin_memory()
    source = torch.from_numpy(rng.permutation(count) * words).cuda()
    destination = torch.from_numpy(rng.permutation(frames * per)[:count]).cuda()
    copy.host_to_arena(host, source, view, destination)
    records = view.view(frames, per, -1).view(torch.int32)
    truth = host.cuda().view(count, words)
    found = records[destination // per, destination % per]
    assert torch.equal(found, truth[source // words])
    assert int((arena != 0).any(1).sum()) <= count
    elsewhere = torch.from_numpy(rng.permutation(frames * per)).cuda()
    elsewhere = elsewhere[~torch.isin(elsewhere, destination)][:count]
    copy.arena_to_arena(view, destination, elsewhere)
    back = torch.zeros(host.shape, dtype=torch.int32).pin_memory()
    copy.arena_to_host(view, elsewhere, back, source)
    torch.cuda.synchronize()
    assert torch.equal(back, host)
