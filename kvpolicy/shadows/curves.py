"""Miss curves for shadows that ask for them, from the same selections as the engine's Follower's."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from kvpolicy.control.curves import MissSampler
from kvpolicy.control.observation import MissCurve, RequestView, StoreView
from kvpolicy.memory.request import TRACE_LENGTH
from kvpolicy.recording.lanes import Entries

__all__ = ["ShadowCurves"]

_Note = tuple[int, int, int, Entries]
"""(store, step, committed entries, chosen) of one decode row."""


class ShadowCurves:
    """Follows one request, as :class:`kvpolicy.engine.following.Follower` does without delay."""

    def __init__(self, stores: Sequence[StoreView], entries: int) -> None:
        self._sampler = MissSampler([store.topk for store in stores], entries)
        self._trace: deque[_Note] | None = None
        self.followed: int | None = None

    def leave(self) -> None:
        """The followed request has left the device: what was noted of it is gone."""
        self._trace = None

    def note(self, request_id: int, notes: Sequence[_Note]) -> None:
        """What a decode row of a request selected, per store."""
        if request_id == self.followed and self._trace is not None:
            self._trace.extend(notes)

    def curves(self, requests: Sequence[RequestView]) -> tuple[MissCurve, ...]:
        """As of a decision over these requests; then whom to follow."""
        followed = self._sampler.request_id
        if followed is not None and any(r.request_id == followed for r in requests):
            if self._trace is None:
                self._sampler.begin(followed)
            for store, step, committed, chosen in self._trace or ():
                old = np.unique(chosen[(chosen >= 0) & (chosen < committed)])
                self._sampler.note(store, step, old.astype(np.int64), committed)
            self._trace = None
        chosen_id = self._sampler.choose(requests)
        if chosen_id is not None:
            if chosen_id != followed:
                self._sampler.begin(chosen_id)
            if self._trace is None or chosen_id != self.followed:
                self._trace = deque(maxlen=TRACE_LENGTH)
            self.followed = chosen_id
        return self._sampler.curves()
