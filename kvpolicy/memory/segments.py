"""The plain records of a step: who computes which rows, and where retrieved rows are."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvpolicy.memory.layout import StoreLayout
from kvpolicy.memory.request import RequestMemory


@dataclass(frozen=True, slots=True)
class Segment:
    """``count`` consecutive rows of one request: rows start..start+count-1 of the step.

    position: of the first row. decode: rows that extend a generation (else prompt rows).
    last_prompt_row: the prompt ends with this segment.
    """

    request_id: int
    start: int
    count: int
    position: int
    decode: bool
    last_prompt_row: bool = False

    @property
    def stop(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Accepted:
    """The first ``count`` rows of a segment are to stay."""

    request: RequestMemory
    segment: Segment
    count: int

    def entries(self, store: StoreLayout) -> range:
        """Entries of a store that these rows complete."""
        first = self.request.committed_entries(store.index)
        return range(first, store.store.entries(self.request.committed + self.count))


@dataclass(frozen=True, slots=True)
class Wave:
    """Query rows start..stop-1 of the step, all of whose selected rows are on the device.

    locations: int64 [stop - start, k] in the arena; valid: bool, False where a row has fewer than
    k entries (the location is then that of a finite row).
    """

    start: int
    stop: int
    locations: Tensor
    valid: Tensor
