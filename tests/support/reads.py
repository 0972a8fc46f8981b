"""What a toy model reads of a step's memory, as plain tensors."""

from __future__ import annotations

from torch import Tensor

from kvpolicy.geometry.geometry import Selector
from kvpolicy.kernels.paging import gather
from kvpolicy.memory.segments import Wave
from kvpolicy.memory.step import StepMemory


def keys_of(memory: StepMemory, selector: Selector, segment: int) -> Tensor:
    """Index keys that the last row of a segment sees, in entry order: [entries, width]."""
    own = memory.segments[segment]
    entries = memory.layout.of(selector).store.entries(own.position + own.count)
    return memory.key_pages(selector).keys(memory.requests[segment].seat, entries)


def rows_of(memory: StepMemory, layer: int, wave: Wave) -> Tensor:
    """Rows of one layer for every query row of a wave: [m, k, width]."""
    return gather(memory.row_view(layer), wave.locations)
