"""One store with caches, staging, in-flight rows, keys and a host pool, for tests of decode kernels."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from cache_tables import Seat, Shape, copy_tables, make_tables
from torch import Tensor

from kvpolicy.kernels.copy import alignment
from kvpolicy.kernels.paging import Paged
from kvpolicy.kernels.retrieve import COUNTERS, StoreMemory

KEY_WORDS, KEYS_PER = 5, 4


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Staging records, in-flight rows, tokens per entry."""

    staging: int
    inflight: int
    tokens: int = 1


def make_store(
    seats: list[Seat], sizes: Sizes, rng: np.random.Generator, shape: Shape | None = None
) -> tuple[Tensor, StoreMemory]:
    """The arena and a store in it, on the CPU: frames scattered at random, noise everywhere."""
    shape = shape or Shape()
    areas = [Seat(1, sizes.staging, full=True), Seat(1, sizes.inflight, full=True)]
    arena, tables = make_tables([*seats, *areas], rng, shape)
    words = shape.layers * shape.width
    grid = alignment(words)
    bases: list[int] = []
    at = 0
    for width in (words, KEY_WORDS):
        for seat in seats:
            at = -(-(at + int(rng.integers(0, 9))) // grid) * grid
            bases.append(at)
            at += seat.entries * width
    pages = [-(-seat.entries // KEYS_PER) for seat in seats]
    order = torch.from_numpy(rng.permutation(sum(pages) + 2))
    key_frames = torch.full((len(seats), max(pages)), 1 << 40)
    for seat, count in enumerate(pages):
        key_frames[seat, :count] = order[:count]
        order = order[count:]
    keys = torch.from_numpy(rng.random((sum(pages) + 2, KEYS_PER, KEY_WORDS), dtype=np.float32))
    host = torch.from_numpy(rng.integers(-(2**31), 2**31, at + 8, dtype=np.int32))
    if torch.cuda.is_available():
        host = host.pin_memory()
    store = StoreMemory(
        cache=tables,
        keys=keys,
        key_frames=key_frames,
        host=host,
        row_base=torch.tensor(bases[: len(seats)]),
        key_base=torch.tensor(bases[len(seats) :]),
        staging=tables.row_frames[len(seats)].clone(),
        staging_rows=sizes.staging,
        inflight=tables.row_frames[len(seats) + 1].clone(),
        counts=torch.from_numpy(rng.integers(0, 99, (len(seats), COUNTERS))),
        arrivals=torch.zeros(len(seats) + 2, dtype=torch.int64),
        layers=shape.layers,
        tokens_per_entry=sizes.tokens,
    )
    return arena, store


def copy_store(
    arena: Tensor, store: StoreMemory, device: torch.device
) -> tuple[Tensor, StoreMemory]:
    """The same on a device, in memory of its own."""
    moved, tables = copy_tables(arena, store.cache, device)
    host = store.host.clone()
    changes = {
        field.name: getattr(store, field.name).to(device, copy=True)
        for field in dataclasses.fields(store)
        if field.name not in ("cache", "host") and isinstance(getattr(store, field.name), Tensor)
    }
    if device.type == "cuda":
        host = host.pin_memory()
    return moved, dataclasses.replace(store, cache=tables, host=host, **changes)


def records_at(store: StoreMemory, location: Tensor) -> Tensor:
    """Records at locations, as their bits."""
    records = store.cache.records
    flat = records[location // records.shape[1], location % records.shape[1]]
    return flat.flatten(1).view(torch.int32)


def hosts_records(store: StoreMemory, seat: int, entries: Tensor) -> Tensor:
    """Records of entries in the host pool, as their bits."""
    width = int(np.prod(store.cache.records.shape[2:]))
    at = int(store.row_base[seat]) + entries.cpu()[:, None] * width + torch.arange(width)
    return store.host[at]


def flying_records(store: StoreMemory, index: Tensor) -> Tensor:
    """Records in flight, as their bits."""
    return records_at(store, Paged(store.cache.records, store.inflight).locate(index))
