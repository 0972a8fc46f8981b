"""The kernels that the memory hierarchy calls, as one record per backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from . import copy
from .resolve import Resolved, resolve_batch


@dataclass(frozen=True, slots=True)
class MemoryOps:
    """resolve: see ``kernels.resolve.resolve_batch``; copies and put: see ``kernels.copy``."""

    resolve: Callable[..., Resolved]
    host_to_arena: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    arena_to_host: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    arena_to_arena: Callable[[Tensor, Tensor, Tensor], None]
    put: Callable[[Tensor, Tensor, Tensor], None]


def memory_ops(backend: str) -> MemoryOps:
    """``reference`` (plain torch) or ``triton``."""
    if backend == "reference":
        return MemoryOps(
            resolve_batch,
            copy.host_to_arena,
            copy.arena_to_host,
            copy.arena_to_arena,
            copy.put,
        )
    from .triton import copy as copy_triton
    from .triton.resolve import resolve_batch as resolve_triton

    return MemoryOps(
        resolve_triton,
        copy_triton.host_to_arena,
        copy_triton.arena_to_host,
        copy_triton.arena_to_arena,
        copy_triton.put,
    )
