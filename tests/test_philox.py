"""Philox-4x32 against its known answers, and the uniforms made of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.kernels.philox import philox, uniforms

ALL = 0xFFFFFFFF
# Random123, tests/kat_vectors, philox4x32-10: counter, key (word 0 first), result.
KNOWN = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL, ALL, ALL, ALL), (ALL, ALL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], result: tuple[int, ...]
) -> None:
    words = tuple(np.array([word, 1], dtype=np.uint64) for word in counter)
    out = philox(key[0] | key[1] << 32, words)  # type: ignore[arg-type]
    assert tuple(int(word[0]) for word in out) == result


@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**40), count=st.integers(1, 40))
def test_uniforms_are_in_the_open_interval_and_do_not_depend_on_the_count(
    seed: int, position: int, count: int
) -> None:
    values = uniforms(seed, position, 0, count)
    assert values.shape == (count,) and values.dtype == np.float64
    assert bool(((values > 0) & (values < 1)).all())
    assert np.array_equal(values, uniforms(seed, position, 0, 64)[:count])


@pytest.mark.parametrize("word", [0, ALL])
def test_uniforms_at_the_ends(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest and the largest word give numbers strictly inside (0, 1)."""

    def constant(key: int, counter: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        return tuple(np.full_like(counter[0], word) for _ in range(4))

    monkeypatch.setattr("kvpolicy.kernels.philox.philox", constant)
    assert all(0.0 < value < 1.0 for value in uniforms(1, 2, 0, 4).tolist())
