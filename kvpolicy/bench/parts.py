"""Which part of a decode step a kernel belongs to, and a clock for parts that are calls."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kvpolicy.bench.timing import wait
from kvpolicy.kernels.memory_ops import MemoryOps
from kvpolicy.kernels.ops import Ops

INDEXER, TOP_K, RETRIEVE, FETCH = "indexer", "top-k", "retrieve", "fetch"
ATTENTION, LINEAR, ELEMENTWISE = "attention", "linear", "norms, elementwise"
PUBLISH, SAMPLING, HOST = "publish", "sampling", "host"
PARTS = (
    *(INDEXER, TOP_K, RETRIEVE, FETCH, ATTENTION),
    *(LINEAR, ELEMENTWISE, PUBLISH, SAMPLING, HOST),
)
"""In the order of tables and pictures."""

KERNELS: dict[str, str] = {
    "_score_kernel": INDEXER,
    "_score_tiles": INDEXER,
    "_select_kernel": INDEXER,
    "_maxima": TOP_K,
    "_candidates": TOP_K,
    "_choose": TOP_K,
    "_resolve": RETRIEVE,
    "_resolve_union": RETRIEVE,
    "_fused": RETRIEVE,
    "_take_victims": RETRIEVE,
    "_fetch": FETCH,
    "_copy": FETCH,
    "_attend_kernel": ATTENTION,
    "_attend_bf16": ATTENTION,
    "_attend_fp8": ATTENTION,
    "_combine": ATTENTION,
    "_offsets": ATTENTION,
    "_queries": ATTENTION,
    "_linear_kernel": LINEAR,
    "_product_kernel": LINEAR,
    "_norm_kernel": ELEMENTWISE,
    "_latents_kernel": ELEMENTWISE,
    "_turn_kernel": ELEMENTWISE,
    "_put": ELEMENTWISE,
    "_write_rows": ELEMENTWISE,
    "_write_vectors": ELEMENTWISE,
    "_publish": PUBLISH,
    "_gumbel_kernel": SAMPLING,
    "_scale_kernel": SAMPLING,
    "_accept_kernel": SAMPLING,
    "_draft_attention_kernel": ATTENTION,
}
"""Our kernels' names, as a profiler shows them."""

# In the names of other libraries' kernels. Reductions, sorts and scans are in no other part of a step.
OTHERS = (
    (LINEAR, ("gemm", "cutlass", "nvjet")),
    (SAMPLING, ("reduce_kernel", "radixsort", "sort", "scan")),
)


def part_of(kernel: str) -> str:
    """The part that a kernel's time counts for."""
    known = KERNELS.get(kernel)
    if known is not None:
        return known
    name = kernel.lower()
    for part, words in OTHERS:
        if any(word in name for word in words):
            return part
    return ELEMENTWISE


OPERATIONS: dict[str, str] = {
    "products": LINEAR,
    "linear": LINEAR,
    "gated": LINEAR,
    "head_linear": LINEAR,
    "queries": LINEAR,
    "rms_norm": ELEMENTWISE,
    "latents": ELEMENTWISE,
    "index_scores": INDEXER,
    "index_top_k": INDEXER,
    "sparse_mla": ATTENTION,
}
"""What a model calls. Top-k counts as the indexer, the head products inside queries as linear."""


class PartClock:
    """Wall time of calls by part; what calls inside calls take counts for these alone."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._device = device
        self._inner = 0.0

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time counts for a part; on a GPU it waits before and after."""

        def call(*arguments: Any, **named: Any) -> Any:
            wait(self._device)
            outer, self._inner = self._inner, 0.0
            start = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                wait(self._device)
                took = time.perf_counter() - start
                self.seconds[part] += took - self._inner
                self._inner = outer + took

        return call


class TimedOps:
    """A model's operations, each timed as its part. The rest is as in ``ops``."""

    def __init__(self, ops: Ops, clock: PartClock) -> None:
        self._ops = ops
        for name, part in OPERATIONS.items():
            setattr(self, name, clock.timed(part, getattr(ops, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)


MEMORY_OPERATIONS: dict[str, str] = {
    "resolve": RETRIEVE,
    "host_to_arena": FETCH,
    "arena_to_host": PUBLISH,
    "arena_to_arena": PUBLISH,
    "put": ELEMENTWISE,
    "retrieve": RETRIEVE,
    "publish": PUBLISH,
}
"""What the hierarchy calls. Retrieve looks up and fetches in one call."""


def timed_memory(ops: MemoryOps, clock: PartClock) -> MemoryOps:
    """The hierarchy's operations, each timed as its part."""
    calls = {
        name: clock.timed(part, getattr(ops, name)) for name, part in MEMORY_OPERATIONS.items()
    }
    return replace(ops, **calls)
