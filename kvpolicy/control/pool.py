"""Frame arithmetic of all hot caches at once, as projection and controllers need it (numpy only)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvpolicy.control.observation import Observation

Rows = NDArray[np.int64]
"""Rows or frames per request and store: int64 [requests, stores]."""


class Pool:
    """The requests and stores of an observation as arrays.

    per_frame, meta: records, and slots' metadata, that a frame holds, [stores]. most: entries a
    request can ever have; now: what full residency takes at this moment; held: its budget; each
    [requests, stores].
    """

    def __init__(self, observation: Observation) -> None:
        shape = (len(observation.requests), len(observation.stores))
        self.per_frame = np.array([s.rows_per_frame for s in observation.stores], dtype=np.int64)
        self.meta = np.array([s.meta_per_frame for s in observation.stores], dtype=np.int64)
        most = [r.max_rows for r in observation.requests]
        now = [r.rows_now or r.max_rows for r in observation.requests]
        held = [r.budget for r in observation.requests]
        self.most = np.array(most, dtype=np.int64).reshape(shape)
        self.now = np.array(now, dtype=np.int64).reshape(shape)
        self.held = np.array(held, dtype=np.int64).reshape(shape)

    def mapped(self, rows: Rows) -> Rows:
        """Frames of mapped caches of ``rows`` records: rows and slots' metadata. Any shape [..., stores]."""
        return -(-rows // self.per_frame) - (-rows // self.meta)

    def whole(self, rows: Rows) -> Rows:
        """Frames of full caches of ``rows`` records: no metadata. Any shape [..., stores]."""
        return -(-rows // self.per_frame)

    def frames(self, rows: Rows) -> Rows:
        """Frames of every hot cache under these budgets; at or above ``most`` it is full."""
        return np.where(rows >= self.most, self.whole(self.now), self.mapped(rows))

    def cost(self, rows: Rows) -> int:
        """Frames of all hot caches together."""
        return int(self.frames(rows).sum())
