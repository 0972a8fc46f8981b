"""HiSparse as SGLang serves it (arXiv 2608.07009, SGLang 0.5.23): the fixed-budget baseline."""

from __future__ import annotations

from kvpolicy.control.observation import StoreView
from kvpolicy.controllers.static import Static
from kvpolicy.errors import UserError
from kvpolicy.memory.rule import CacheRule


class HiSparse(Static):
    """SGLang's HiSparse: a fixed device buffer per request and layer, LRU, at every load.

    device_buffer_rows: rows, at least top-k; None means SGLang's default 2 x top-k. The newest row
    stays outside the LRU (it is in flight while it is new, and fetched back if selected later);
    a fetched row always stays; after the prompt the buffer holds the prompt's first rows.
    """

    cache_rule = CacheRule(eviction="lru", admit_newest=False, seed="first", admission="all")

    def budget(self, stores: tuple[StoreView, ...]) -> tuple[int, ...]:
        """UserError below top-k, as SGLang refuses it."""
        for store in stores:
            if self.rows is not None and self.rows < store.topk:
                raise UserError(
                    f"device_buffer_rows = {self.rows}: hisparse needs at least top-k = {store.topk}"
                )
        return super().budget(stores)
