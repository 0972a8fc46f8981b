"""Selections as bytes and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.errors import UserError
from kvpolicy.recording.packing import pack, pack_numbers, unpack, unpack_numbers

EDGES = [
    0,
    1,
    127,
    128,
    16383,
    16384,
    (1 << 21) - 1,
    1 << 21,
    (1 << 28) - 1,
    1 << 28,
    (1 << 31) - 1,
]


def rows_of(selections: list[list[int]], k: int) -> np.ndarray:
    rows = np.full((len(selections), k), -1, dtype=np.int32)
    for row, chosen in zip(rows, selections, strict=True):
        row[: len(chosen)] = sorted(chosen)
    return rows


@given(st.lists(st.sampled_from(EDGES) | st.integers(0, (1 << 31) - 1)))
def test_numbers_come_back(numbers: list[int]) -> None:
    packed = pack_numbers(np.array(numbers, dtype=np.int64))
    assert packed.dtype == np.uint8
    assert unpack_numbers(packed).tolist() == numbers


def test_sizes_of_numbers() -> None:
    assert [len(pack_numbers(np.array([n]))) for n in EDGES] == [1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    # LEB128: 300 = 0b10_0101100, the low seven bits first.
    assert pack_numbers(np.array([300])).tolist() == [0b10101100, 0b10]


@given(st.lists(st.sets(st.integers(0, (1 << 31) - 2), max_size=7)), st.integers(7, 9))
def test_selections_come_back(selections: list[set[int]], k: int) -> None:
    rows = rows_of([list(chosen) for chosen in selections], k)
    counts = (rows >= 0).sum(1)
    assert np.array_equal(unpack(pack(rows), counts, k), rows)


@pytest.mark.parametrize("row", [[3, 2], [5, 5]])
def test_a_selection_must_be_ascending(row: list[int]) -> None:
    with pytest.raises(ValueError, match="ascending and distinct"):
        pack(np.array([row], dtype=np.int32))


def test_damaged_bytes_are_refused() -> None:
    packed = pack(np.array([[3, 400, 100_000]], dtype=np.int32))
    with pytest.raises(UserError, match="end within a number"):
        unpack(packed[:-1], np.array([3]), 3)
    with pytest.raises(UserError, match="3 packed entries, 2 announced"):
        unpack(packed, np.array([2]), 3)
    with pytest.raises(UserError, match="at most 5"):
        unpack_numbers(np.array([128] * 5 + [1], dtype=np.uint8))
    with pytest.raises(UserError, match=r"past 2\*\*31"):
        unpack(pack_numbers(np.array([(1 << 31) - 1] * 2)), np.array([2]), 2)
    assert unpack_numbers(np.empty(0, dtype=np.uint8)).size == 0
