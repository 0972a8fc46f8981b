"""Triton resolve against the reference: equality of every bit, interpreted and on a GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from cache_tables import CPU, Seat, Shape, arena_of, copy_tables, make_tables, random_call
from torch import Tensor

from kvpolicy.kernels.eviction import CLOCK_SPARE_STEPS, RULES, EvictionRule
from kvpolicy.kernels.resolve import PAD, CacheTables, resolve_batch

pytest.importorskip("triton")


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.interpreter),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where kernels run: in the interpreter on the CPU, or compiled."""
    return torch.device(request.param)


@pytest.fixture
def kernels() -> ModuleType:
    """Imported late: without triton it does not load."""
    from kvpolicy.kernels.triton import resolve

    return resolve


def assert_same(tables: CacheTables, other: CacheTables) -> None:
    """All of both arenas, and what lies beside them."""
    assert torch.equal(arena_of(tables), arena_of(other).to(CPU))
    for name in ("used", "hand", "draws", "age"):
        assert torch.equal(getattr(tables, name), getattr(other, name).to(CPU)), name


def compare_call(
    module: ModuleType, tables: CacheTables, other: CacheTables, rule: EvictionRule, call: Any
) -> None:
    """One call on both, and everything compared."""
    device = other.maps.device
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in call.items()}
    expected = resolve_batch(tables, rule=rule, **call)
    found = module.resolve_batch(other, rule=rule, **moved)
    assert found.location.dtype == torch.int64 and found.missed.dtype == torch.bool
    assert torch.equal(found.location.to(CPU), expected.location)
    assert torch.equal(found.missed.to(CPU), expected.missed)
    assert_same(tables, other)


MIXED = [
    Seat(40, 9),
    Seat(13, 13, full=True),
    Seat(30, 0),
    Seat(35, 33),
    Seat(50, 16),
    Seat(7, 1),
]


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("name", ["clock", "lru", "fifo", "random"])
def test_random_histories(
    name: str, block: int, device: torch.device, kernels: ModuleType, monkeypatch: Any
) -> None:
    """Steps of up to two selections over unequal caches: full, without slots, one slot, many tiles."""
    monkeypatch.setattr(kernels, "BLOCK", block)
    monkeypatch.setattr(kernels, "TILE", block)
    rng = np.random.default_rng(block)
    arena, tables = make_tables(MIXED, rng)
    _, other = copy_tables(arena, tables, device)
    step = 0
    for _ in range(14):
        step += int(rng.choice([0, 1, 1, CLOCK_SPARE_STEPS]))
        compare_call(kernels, tables, other, RULES[name], random_call(rng, MIXED, step))
    assert int(tables.draws.sum()) > 5  # rows did have to go


def test_the_largest_step_and_stamps(device: torch.device, kernels: ModuleType) -> None:
    """Stamps fill an int32 at step 2**30 - 1."""
    rng = np.random.default_rng(5)
    seats = [Seat(40, 9)]
    arena, tables = make_tables(seats, rng)
    _, other = copy_tables(arena, tables, device)
    for step in (0, 2**30 - 2, 2**30 - 1, 2**30 - 1):
        call = random_call(rng, seats, step)
        compare_call(kernels, tables, other, RULES["clock"], call)
        compare_call(kernels, tables, other, RULES["random"], call)


def test_a_rule_of_somebody_else(device: torch.device, kernels: ModuleType) -> None:
    """Keys from one end of int64 to the other, with ties."""
    from device_keys import WIDE

    rng = np.random.default_rng(8)
    seats = [Seat(40, 9), Seat(40, 15)]
    arena, tables = make_tables(seats, rng)
    _, other = copy_tables(arena, tables, device)
    for step in range(14):
        compare_call(kernels, tables, other, WIDE, random_call(rng, seats, step))
    assert int(tables.draws.sum()) > 3


@pytest.mark.parametrize(("pieces", "width"), [(0, 5), (2, 0)])
def test_nothing_wanted(pieces: int, width: int, device: torch.device, kernels: ModuleType) -> None:
    arena, tables = make_tables([Seat(9, 4), Seat(9, 9, full=True)], np.random.default_rng(0))
    _, other = copy_tables(arena, tables, device)
    call = {
        "seats": torch.arange(pieces),
        "wanted": torch.full((pieces, width), PAD),
        "admit": torch.ones(pieces, dtype=torch.bool),
        "step": 3,
    }
    compare_call(kernels, tables, other, RULES["lru"], call)


@pytest.mark.interpreter
def test_a_rule_without_a_device_key_is_refused(kernels: ModuleType) -> None:
    _, tables = make_tables([Seat(9, 4)], np.random.default_rng(0))
    rule = EvictionRule("mine", touch=True, key=lambda stamp, *_: stamp.long())
    one = torch.zeros((1, 1), dtype=torch.int64)
    with pytest.raises(ValueError, match="eviction rule 'mine' has no device_key"):
        kernels.resolve_batch(tables, one[0], one, one[0] == 0, rule, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["clock", "lru", "fifo", "random"])
def test_large_caches(name: str, kernels: ModuleType) -> None:
    """Capacities to 32K, a million entries, 2048 wanted of a window that moves; real frame sizes."""
    rng = np.random.default_rng(3)
    kinds = [(1 << 20, 1 << 15), (1 << 17, 4096), (1 << 17, 4095), (5000, 5000), (1 << 17, 2000)]
    seats = [Seat(e, c, full=e == c) for e, c in kinds]
    shape = Shape(rows=12, maps=8192, meta=4096, layers=4, width=164, frame_bytes=1 << 15)
    arena, tables = make_tables(seats, rng, shape)
    _, other = copy_tables(arena, tables, torch.device("cuda"))
    for step in range(24):
        wanted = torch.full((len(seats), 2048), PAD)
        for piece, seat in enumerate(seats):
            span = min(seat.entries, 3 * seat.capacity)
            start = min(step * 700, seat.entries - span)
            row = np.sort(rng.permutation(span)[: int(rng.integers(1500, 2049))]) + start
            wanted[piece, : len(row)] = torch.from_numpy(row)
        call = {
            "seats": torch.from_numpy(rng.permutation(len(seats))),
            "wanted": wanted,
            "admit": torch.ones(len(seats), dtype=torch.bool),
            "step": step // 2,
        }
        call["wanted"] = wanted[call["seats"]]
        compare_call(kernels, tables, other, RULES[name], call)
