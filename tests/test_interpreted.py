"""The matrix product that interpreted Triton uses: its bits, its place in ``tl.dot``."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpolicy.kernels.interpreted import product

Matrix = NDArray[np.float32]


def normal(*shape: int, seed: int = 0) -> Matrix:
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


def one_by_one(a: Matrix, b: Matrix) -> Matrix:
    """Every element on its own, in float32, the inner index ascending."""
    out = np.zeros((a.shape[0], b.shape[1]), dtype=np.float32)
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            total = np.float32(0.0)
            for x, y in zip(a[i], b[:, j], strict=True):
                total = np.float32(total + np.float32(x * y))
            out[i, j] = total
    return out


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 2), (16, 33, 8), (17, 64, 3)])
def test_a_product_adds_in_ascending_order(shape: tuple[int, int, int]) -> None:
    rows, inner, columns = shape
    a, b = normal(rows, inner), normal(inner, columns, seed=1)
    found = product(a, b)
    assert found.dtype == np.float32
    assert np.array_equal(found, one_by_one(a, b))
    assert np.allclose(found, a.astype(np.float64) @ b.astype(np.float64), atol=1e-4)


def test_a_row_does_not_depend_on_its_place() -> None:
    a, b = normal(32, 96), normal(96, 16, seed=1)
    whole = product(a, b)
    order = np.random.default_rng(2).permutation(32)
    assert np.array_equal(product(a[order], b), whole[order])
    for i in (0, 15, 31):
        assert np.array_equal(product(a[i : i + 1], b)[0], whole[i])
    assert np.array_equal(product(a, b[:, 5:9]), whole[:, 5:9])


def test_leading_dimensions() -> None:
    a, b = normal(2, 3, 4, 5), normal(2, 3, 5, 6, seed=1)
    found = product(a, b)
    assert found.shape == (2, 3, 4, 6)
    for i in range(2):
        for j in range(3):
            assert np.array_equal(found[i, j], product(a[i, j], b[i, j]))


def test_an_empty_inner_dimension_is_zero() -> None:
    assert np.array_equal(product(normal(2, 0), normal(0, 3)), np.zeros((2, 3), dtype=np.float32))
