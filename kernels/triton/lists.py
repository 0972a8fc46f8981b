"""What resolve leaves for fetch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..retrieve import DecodeRows, StoreMemory


@dataclass(frozen=True, slots=True)
class Lists:
    """What resolve leaves for fetch. source: int64 [p, W], host words; target: int32 [p, W], locations;
    misses: int32 [p], how many of each piece's are listed."""

    source: Tensor
    target: Tensor
    misses: Tensor

    @classmethod
    def empty(cls, pieces: int, width: int, device: torch.device) -> Lists:
        """Lists of that size, not filled."""
        return cls(
            torch.empty((pieces, width), dtype=torch.int64, device=device),
            torch.empty((pieces, width), dtype=torch.int32, device=device),
            torch.empty(pieces, dtype=torch.int32, device=device),
        )


def decode_arguments(
    store: StoreMemory,
    rows: DecodeRows,
    chosen: Tensor,
    location: Tensor,
    scratch: Tensor,
    lists: Lists,
) -> tuple[Tensor, ...]:
    """What the kernels that retrieve take behind the tables, in their order."""
    return (
        rows.seat, chosen.contiguous(), rows.admit.view(torch.uint8), rows.step, location, scratch,
        rows.committed, store.inflight, store.staging, store.row_base,
        lists.source, lists.target, lists.misses, store.counts,
    )  # fmt: skip
