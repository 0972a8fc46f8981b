"""The kernels that the memory hierarchy calls, as one record per backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from . import copy, fp8
from .publish import publish
from .resolve import Resolved, resolve_batch
from .retrieve import retrieve


@dataclass(frozen=True, slots=True)
class MemoryOps:
    """resolve: see ``kernels.resolve.resolve_batch``; copies and put: see ``kernels.copy``.
    retrieve, publish: see the modules of these names. quantize_rows, quantize_keys: see ``kernels.fp8``."""

    resolve: Callable[..., Resolved]
    host_to_arena: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    arena_to_host: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    arena_to_arena: Callable[[Tensor, Tensor, Tensor], None]
    put: Callable[[Tensor, Tensor, Tensor], None]
    retrieve: Callable[..., Tensor]
    publish: Callable[..., None]
    quantize_rows: Callable[[Tensor, int], Tensor]
    quantize_keys: Callable[[Tensor], Tensor]


def memory_ops(backend: str) -> MemoryOps:
    """``reference`` (plain torch) or ``triton``."""
    if backend == "reference":
        return MemoryOps(
            resolve_batch,
            copy.host_to_arena,
            copy.arena_to_host,
            copy.arena_to_arena,
            copy.put,
            retrieve,
            publish,
            fp8.quantize_rows,
            fp8.quantize_keys,
        )
    from .triton import copy as copy_triton
    from .triton import fp8 as fp8_triton
    from .triton.publish import publish as publish_triton
    from .triton.resolve import resolve_batch as resolve_triton
    from .triton.retrieve import retrieve as retrieve_triton

    return MemoryOps(
        resolve_triton,
        copy_triton.host_to_arena,
        copy_triton.arena_to_host,
        copy_triton.arena_to_arena,
        copy_triton.put,
        retrieve_triton,
        publish_triton,
        fp8_triton.quantize_rows,
        fp8_triton.quantize_keys,
    )
