"""Follows one decoding request at a time, so that controllers can be told miss curves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvpolicy.control.curves import MissSampler
from kvpolicy.control.observation import MissCurve, RequestView, StoreView
from kvpolicy.memory.hierarchy import Hierarchy


class Follower:
    """Feeds the selections of the followed request to a MissSampler, once per decision.

    The device keeps them until then, so following costs one copy per decision and no wait per step.
    """

    def __init__(self, stores: Sequence[StoreView], entries: int) -> None:
        self._sampler = MissSampler([store.topk for store in stores], entries)

    def curves(self, memory: Hierarchy, requests: Sequence[RequestView]) -> tuple[MissCurve, ...]:
        """The curves as of now, after what was selected since the last call; then whom to follow."""
        followed = self._sampler.request_id
        if followed is not None and followed in memory.requests:
            self._read(memory, followed)
        chosen = self._sampler.choose(requests)
        if chosen is not None:
            if chosen != followed:
                self._sampler.begin(chosen)
            memory.requests[chosen].follow()
        return self._sampler.curves()

    def _read(self, memory: Hierarchy, followed: int) -> None:
        request = memory.requests[followed]
        if request.trace is None:  # it was preempted and has come back
            self._sampler.begin(followed)
            return
        trace, request.trace = list(request.trace), None
        if not trace:
            return
        flat = torch.cat([chosen.flatten() for *_, chosen in trace]).cpu().numpy()
        ends = np.cumsum([chosen.numel() for *_, chosen in trace])
        for (store, step, tokens, _), entries in zip(trace, np.split(flat, ends[:-1]), strict=True):
            committed = memory.layout.stores[store].store.entries(tokens)
            old = np.unique(entries[(entries >= 0) & (entries < committed)])
            self._sampler.note(store, step, old, committed)
