"""Follows one decoding request at a time, so that controllers can be told miss curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvpolicy.control.curves import MissSampler
from kvpolicy.control.observation import MissCurve, RequestView, StoreView
from kvpolicy.memory.hierarchy import Hierarchy
from kvpolicy.memory.transfer import ToHost


class Follower:
    """Feeds the selections of the followed request to a MissSampler, at decisions.

    The device keeps them until then. late: they are sent to the host at one decision and used at the
    next at which they have arrived, so that no decision waits for the device.
    """

    def __init__(self, stores: Sequence[StoreView], entries: int) -> None:
        self._sampler = MissSampler([store.topk for store in stores], entries)
        self._sent: _Sent | None = None

    def curves(
        self, memory: Hierarchy, requests: Sequence[RequestView], late: bool = False
    ) -> tuple[MissCurve, ...]:
        """The curves as of now, after what is known of the selections since the last call; then whom to
        follow."""
        if late:
            self._use()
        followed = self._sampler.request_id
        if self._sent is None and followed is not None and followed in memory.requests:
            self._send(memory, followed)
        if not late:
            self._use()
        chosen = self._sampler.choose(requests)
        if chosen is not None and (chosen == followed or self._sent is None):
            if chosen != followed:
                self._sampler.begin(chosen)
            request = memory.requests[chosen]
            if request.trace is None:
                request.follow()
        return self._sampler.curves()

    def _send(self, memory: Hierarchy, followed: int) -> None:
        request = memory.requests[followed]
        if request.trace is None:  # it was preempted and has come back
            self._sampler.begin(followed)
            return
        trace, request.trace = list(request.trace), None
        if trace:
            entries = ToHost(torch.cat([chosen.flatten() for *_, chosen in trace]))
            stores = memory.layout.stores
            notes = [
                (store, step, stores[store].store.entries(tokens), chosen.numel())
                for store, step, tokens, chosen in trace
            ]
            self._sent = _Sent(notes, entries)

    def _use(self) -> None:
        """Note what has arrived."""
        if self._sent is None or not self._sent.entries.ready:
            return
        sent, self._sent = self._sent, None
        ends = np.cumsum([count for *_, count in sent.notes])
        parts = np.split(sent.entries.read().numpy(), ends[:-1])
        for (store, step, committed, _), entries in zip(sent.notes, parts, strict=True):
            old = np.unique(entries[(entries >= 0) & (entries < committed)])
            self._sampler.note(store, step, old, committed)


@dataclass(frozen=True, slots=True)
class _Sent:
    """Selections of the followed request, on their way. notes: (store, step, committed entries, count)."""

    notes: list[tuple[int, int, int, int]]
    entries: ToHost
