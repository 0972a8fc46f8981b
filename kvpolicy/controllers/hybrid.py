"""Hybrid HiSparse as vLLM 0.33 serves it: resident until memory runs low, then a buffer for good."""

from __future__ import annotations

import numpy as np

from kvpolicy.control.observation import Observation, StoreView
from kvpolicy.control.plan import FULL, Plan, Target
from kvpolicy.control.pool import Pool
from kvpolicy.controllers.parameters import row_count, share
from kvpolicy.memory.rule import CacheRule


class Hybrid:
    """Fully resident until free memory falls under a watermark, then one way to a fixed buffer.

    device_buffer_rows: rows of the buffer; None means 2 x top-k of each store. watermark: part of
    the pool (vLLM: a tenth). A request starts in the buffer and is resident from its first decision on
    if that leaves the watermark free. Under it, or where the first waiting request finds no room,
    requests go to the buffer, the one that runs longest first (vLLM asks in the order they were
    scheduled), until it is free again. Who has been there never returns.
    """

    cache_rule = CacheRule(eviction="lru")

    def __init__(self, device_buffer_rows: int | None = None, watermark: float = 0.1) -> None:
        self.rows = (
            None
            if device_buffer_rows is None
            else row_count("device_buffer_rows", device_buffer_rows)
        )
        self.watermark = share("watermark", watermark)
        self._demoted: set[int] = set()

    def initial(self, stores: tuple[StoreView, ...]) -> Target:
        """The buffer: a request that is larger than the pool can start too."""
        return self._buffer(stores)

    def decide(self, observation: Observation) -> Plan:
        pool = Pool(observation)
        self._demoted &= {r.request_id for r in observation.requests}
        buffer = np.maximum(self._buffer(observation.stores), observation.floor_rows)
        small = np.minimum(buffer, pool.most)
        small_cost = pool.frames(small).sum(axis=1)
        full_cost = pool.whole(pool.now).sum(axis=1)
        is_full = np.all(pool.held >= pool.most, axis=1).tolist()
        wanted = self._wanted(observation, int(small_cost.max(initial=0)))
        # What there is for hot rows if everyone were in the buffer, above what must stay free.
        spare = pool.cost(pool.held) + observation.free_bytes // observation.frame_bytes
        spare -= int(small_cost.sum()) + wanted
        targets: dict[int, Target] = {}
        # Those that run longest go first, so memory is granted from the youngest resident one on,
        # and to newcomers after all who are resident.
        order = sorted(
            range(len(observation.requests)),
            key=lambda i: (not is_full[i], observation.requests[i].age, -observation.requests[i].request_id),
        )  # fmt: skip
        for i in order:
            request = observation.requests[i]
            extra = int(full_cost[i] - small_cost[i])
            # While a context is short, all of it takes less than the buffer.
            if request.request_id not in self._demoted and (extra <= 0 or extra <= spare):
                spare -= extra
                targets[request.request_id] = FULL
            else:
                self._demoted.add(request.request_id)
                targets[request.request_id] = tuple(small[i].tolist())
        return Plan(targets=targets)

    def _buffer(self, stores: tuple[StoreView, ...]) -> tuple[int, ...]:
        return tuple(2 * s.topk if self.rows is None else self.rows for s in stores)

    def _wanted(self, observation: Observation, buffer: int) -> int:
        """Frames to leave free: the watermark, at least one buffer, or the first waiting request."""
        size = observation.frame_bytes
        mark = int(self.watermark * (observation.pool_bytes // size))
        head = -(-observation.queue_bytes[0] // size) if observation.queue_bytes else 0
        return max(mark, buffer, head)
