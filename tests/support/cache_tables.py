"""Hot caches of several seats in one arena, frames scattered at random, for kernels' tests."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvpolicy.kernels.eviction import CLOCK_SPARE_STEPS
from kvpolicy.kernels.paging import Paged
from kvpolicy.kernels.resolve import ABSENT, PAD, CacheTables

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Seat:
    """One cache of a test: entries it may ever see, slots, or full."""

    entries: int
    capacity: int
    full: bool = False


@dataclass(frozen=True)
class Shape:
    """Items per frame of each table; the rest of a frame belongs to nobody."""

    rows: int = 4
    maps: int = 7
    meta: int = 5
    layers: int = 2
    width: int = 3
    frame_bytes: int = 128


def _frames(items: int, per: int) -> int:
    return -(-items // per)


def make_tables(
    seats: list[Seat], rng: np.random.Generator, shape: Shape = Shape()
) -> tuple[Tensor, CacheTables]:
    """The arena (uint8 [F, frame_bytes]; what no table owns holds noise) and empty caches in it."""
    needs = [
        (
            _frames(s.capacity, shape.rows),
            _frames(s.entries, shape.maps),
            0 if s.full else _frames(s.capacity, shape.meta),
        )
        for s in seats
    ]
    total = sum(map(sum, needs)) + 3
    arena = torch.from_numpy(rng.integers(0, 256, (total, shape.frame_bytes), dtype=np.uint8))
    order = iter(rng.permutation(total).tolist())
    # Past the end of a table: frames that do not exist, so that a read of them cannot go unseen.
    frames = [torch.full((len(seats), max(n) + 1), 1 << 40) for n in zip(*needs, strict=True)]
    for seat, need in enumerate(needs):
        for table, count in zip(frames, need, strict=True):
            table[seat, :count] = torch.tensor(
                [next(order) for _ in range(count)], dtype=torch.int64
            )
    tables = _over(arena, shape, frames, seats)
    for seat, s in enumerate(seats):
        state = tables.state(seat)
        state.slot_of.put(torch.arange(s.entries), torch.full((s.entries,), ABSENT))
    return arena, tables


def _over(arena: Tensor, shape: Shape, frames: list[Tensor], seats: list[Seat]) -> CacheTables:
    def view(dtype: torch.dtype, per: int, *item: int) -> Tensor:
        size = int(np.prod(item, dtype=np.int64)) * dtype.itemsize
        return arena[:, : per * size].view(dtype).view(arena.shape[0], per, *item)

    device = arena.device
    zeros = torch.zeros(len(seats), dtype=torch.int32, device=device)
    return CacheTables(
        records=view(torch.float32, shape.rows, shape.layers, shape.width),
        maps=view(torch.int32, shape.maps),
        meta=view(torch.int32, shape.meta, 2),
        row_frames=frames[0].to(device),
        map_frames=frames[1].to(device),
        meta_frames=frames[2].to(device),
        capacity=torch.tensor([s.capacity for s in seats], dtype=torch.int32, device=device),
        full=torch.tensor([s.full for s in seats], device=device),
        used=zeros,
        hand=zeros.clone(),
        draws=zeros.clone(),
        age=torch.full_like(zeros, CLOCK_SPARE_STEPS),
    )


def copy_tables(
    arena: Tensor, tables: CacheTables, device: torch.device
) -> tuple[Tensor, CacheTables]:
    """The same caches in another arena of the same layout, on a device."""
    moved = torch.empty_like(arena, device=device).copy_(arena)

    def again(view: Tensor) -> Tensor:
        raw = moved.view(-1).view(view.dtype)
        return raw.as_strided(view.shape, view.stride(), view.storage_offset())

    views = {name: again(getattr(tables, name)) for name in ("records", "maps", "meta")}
    others = {
        field.name: getattr(tables, field.name).to(device, copy=True)
        for field in dataclasses.fields(tables)
        if field.name not in views
    }
    return moved, CacheTables(**views, **others)


def arena_of(tables: CacheTables) -> Tensor:
    """The whole arena below the tables' views: uint8 [F, frame_bytes]."""
    view = tables.maps
    size = view.stride(0) * view.element_size()
    return torch.empty(0, dtype=torch.uint8, device=view.device).set_(
        view.untyped_storage(), 0, (view.shape[0], size)
    )


def random_call(
    rng: np.random.Generator, seats: list[Seat], step: int, most: int = 12
) -> dict[str, Any]:
    """Arguments of a resolve_batch over some of the seats, with PAD at the ends of rows."""
    asked = [seat for seat in rng.permutation(len(seats)).tolist() if rng.random() < 0.8]
    rows = [
        np.sort(rng.permutation(seats[seat].entries)[: int(rng.integers(0, most + 1))])
        for seat in asked
    ]
    width = max(map(len, rows), default=0) + int(rng.integers(0, 3))
    wanted = torch.full((len(asked), width), PAD)
    for piece, row in enumerate(rows):
        wanted[piece, : len(row)] = torch.from_numpy(row)
    return {
        "seats": torch.tensor(asked, dtype=torch.int64),
        "wanted": wanted,
        "admit": torch.from_numpy(rng.random(len(asked)) < 0.8),
        "step": step,
    }


def contents(tables: CacheTables, seat: int, entries: int) -> dict[int, int]:
    """entry -> slot, as a seat's map says."""
    slots = Paged(tables.maps, tables.map_frames[seat]).get(torch.arange(entries)).tolist()
    return {entry: slot for entry, slot in enumerate(slots) if slot >= 0}
