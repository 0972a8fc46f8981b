"""The Triton backend of a model: every operation one kernel, rows untouched by their neighbours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..backend import TRITON
from ..indexer import KeyPages
from .index_scores import index_scores
from .indexer import index_top_k
from .linear import head_linear, linear
from .norms import layer_norm, rms_norm
from .sparse_mla import sparse_mla


@dataclass(frozen=True, slots=True)
class TritonOps:
    """``kvpolicy.kernels.ops.Ops`` on Triton kernels. All results float32."""

    name: str = TRITON

    def map_rows(self, fn: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """One call over all rows: a kernel's tiles are its own."""
        return fn(*inputs)

    def pack(self, weight: Tensor) -> Tensor:
        """The weight with its columns of outputs side by side in memory (same shape): threads of a
        tile then read neighbours, in shared memory too."""
        return weight.T.contiguous().T

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight)

    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return head_linear(x, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return layer_norm(x, weight, bias, eps)

    def index_scores(
        self,
        q: Tensor,
        weights: Tensor,
        pages: KeyPages,
        row_segment: Tensor,
        visible: Tensor,
        most: int,
        scale: float,
    ) -> Tensor:
        return index_scores(q, weights, pages, row_segment, visible, most, scale)

    def index_top_k(
        self,
        q: Tensor,
        weights: Tensor,
        pages: KeyPages,
        row_segment: Tensor,
        visible: Tensor,
        most: int,
        k: int,
        scale: float,
    ) -> Tensor:
        return index_top_k(q, weights, pages, row_segment, visible, most, k, scale)

    def sparse_mla(
        self,
        query: Tensor,
        view: Tensor,
        locations: Tensor,
        valid: Tensor,
        value_width: int,
        scale: float,
    ) -> Tensor:
        return sparse_mla(query, view, locations, valid, value_width, scale)
