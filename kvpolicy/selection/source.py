"""Where selections come from: the model itself, a recording, or a process that behaves like one.

Weights that were never trained select at random, and random selections have no reuse: every cache
fails alike. A slice of a large model with dummy weights therefore takes its selections from a *source*,
while everything else runs for real (the indexer scores its keys, and its choice is put aside).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kvpolicy.geometry.geometry import Selector

__all__ = ["SelectionSource"]


class SelectionSource(Protocol):
    """Stands in for an indexer's choice.

    A selection is a function of the request, the selector and the entries that the row sees, of
    nothing else: whoever runs beside it, and on which device, changes no bit of it. ``select`` only
    launches work on the device of its arguments and waits for nothing, so it can be captured in a
    CUDA graph.
    """

    @property
    def name(self) -> str:
        """For reports: ``process`` or ``recording``, with what tells two of them apart."""
        ...

    def select(self, selector: Selector, requests: Tensor, visible: Tensor) -> Tensor:
        """What n query rows choose: int64 [n, topk], ascending, distinct, below ``visible``, -1 after
        the last one where a row sees fewer than topk.

        requests: int64 [n], a number per row that is its request's own (below 2**31). visible:
        int64 [n], entries that each row sees, its own being the last.
        """
        ...
