"""A matrix product for interpreted Triton whose rows do not depend on their neighbours.

The interpreter multiplies with ``numpy.matmul``. Some of its kernels (OpenBLAS for Haswell, 16 rows
and more) give a row other bits at another place of the tile, and bf16 operands are taken for the
whole numbers of their bit patterns. Here products are added one inner index after the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_TORCH = {"bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


def _float32(operand: Any) -> NDArray[np.float32]:
    """The values of a TensorHandle of floats."""
    data, name = np.ascontiguousarray(operand.data), str(operand.dtype.scalar)
    if name in _TORCH:
        return torch.from_numpy(data).view(_TORCH[name]).float().numpy()
    return data.astype(np.float32)


def product(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    """``a @ b`` over the last two dimensions, the inner one in ascending order."""
    total = np.zeros((*a.shape[:-1], b.shape[-1]), dtype=np.float32)
    for inner in range(a.shape[-1]):
        total += a[..., :, inner, None] * b[..., None, inner, :]
    return total


def fix_dots() -> None:
    """Make interpreted ``tl.dot`` of floats use :func:`product`. A second call does nothing."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    original = builder.create_dot
    if getattr(original, "row_by_row", False):
        return

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if not a.dtype.scalar.is_floating() or d.data.dtype != np.float32:
            return original(self, a, b, d, *rest)
        total = product(_float32(a), _float32(b)) + d.data
        return interpreter.TensorHandle(total, d.dtype.scalar)

    create_dot.row_by_row = True  # type: ignore[attr-defined]
    builder.create_dot = create_dot
