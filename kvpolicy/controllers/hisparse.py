"""HiSparse as SGLang serves it (arXiv 2608.07009, SGLang 0.5.23): the fixed-budget baseline."""

from __future__ import annotations

from kvpolicy.control.observation import Observation, StoreView
from kvpolicy.control.plan import Plan, Target
from kvpolicy.controllers.parameters import row_count
from kvpolicy.errors import UserError
from kvpolicy.memory.rule import CacheRule


class HiSparse:
    """SGLang's HiSparse: a fixed device buffer per request and layer, LRU, at every load.

    device_buffer_rows: rows, at least top-k; None means SGLang's default 2 x top-k. The newest row
    stays outside the LRU (it is in flight while it is new, and fetched back if selected later);
    a fetched row always stays; after the prompt the buffer holds the prompt's first rows.
    """

    cache_rule = CacheRule(eviction="lru", admit_newest=False, seed="first")

    def __init__(self, device_buffer_rows: int | None = None) -> None:
        self.rows = (
            None
            if device_buffer_rows is None
            else row_count("device_buffer_rows", device_buffer_rows)
        )

    def initial(self, stores: tuple[StoreView, ...]) -> Target:
        """The whole buffer: SGLang allocates it before a request starts."""
        return self._budget(stores)

    def decide(self, observation: Observation) -> Plan:
        return Plan.even(self._budget(observation.stores))

    def _budget(self, stores: tuple[StoreView, ...]) -> tuple[int, ...]:
        for store in stores:
            if self.rows is not None and self.rows < store.topk:
                raise UserError(
                    f"device_buffer_rows = {self.rows}: hisparse needs at least top-k = {store.topk}"
                )
        return tuple(2 * s.topk if self.rows is None else self.rows for s in stores)
