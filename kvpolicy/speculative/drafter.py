"""What the engine asks of a drafter. A third party's is one class with these members.

The engine keeps what a drafter knows of the past: for each of the last tokens of a request
``ring_width`` numbers, in the *draft ring* of the device arena. A drafter itself keeps nothing between
calls, so seats, preemption and rejected rows are not its business.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from kvpolicy.speculative.drawing import RowSampling
from kvpolicy.speculative.proposal import Proposal


@runtime_checkable
class Drafter(Protocol):
    """Proposes the tokens that follow the last committed one (the *anchor*).

    name: as in ``--drafter``. taps: target layers whose outputs it reads, ascending; with none it is
    given the token ids instead. window: W; a row at position p sees committed tokens j with p - j < W, so
    W - 1 of them are kept. ring_width: numbers kept per committed token, 0 for a drafter without a past.
    tokens: K, the most tokens it can propose at once. ``capturable = True``, if it says so: its two methods
    ask the host nothing and raise nothing, so that a CUDA graph may hold them.
    """

    @property
    def name(self) -> str: ...
    @property
    def taps(self) -> tuple[int, ...]: ...
    @property
    def window(self) -> int: ...
    @property
    def ring_width(self) -> int: ...
    @property
    def tokens(self) -> int: ...

    def context(self, taps: Tensor, positions: Tensor) -> Tensor:
        """What to keep of committed tokens, a function of each alone.

        taps: float32 [n, m, hidden], outputs of the ``taps`` layers where the token was fed (without
        taps: its id, float32 [n, 1, 1]). positions: int64 [n]. Returns float32 [n, ring_width].
        """
        ...

    def propose(
        self,
        anchors: Tensor,
        positions: Tensor,
        context: Tensor,
        context_positions: Tensor,
        sampling: RowSampling,
        coupled: bool,
    ) -> Proposal:
        """K tokens for positions + 1 .. positions + K of r requests.

        anchors, positions: int64 [r], the last committed token, whose taps nobody has yet, and where it
        stands. context: float32 [r, W, ring_width], columns in ascending position; context_positions:
        int64 [r, W], -1 where a column is empty (its numbers are zero). sampling: of each request; coupled:
        draw with the noise of the target's own choice (:func:`kvpolicy.speculative.drawing.draw` does
        both). Greedy requests want the likeliest tokens.
        """
        ...
