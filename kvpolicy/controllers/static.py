"""Static: a fixed budget, for studies."""

from __future__ import annotations

from kvpolicy.control.observation import Observation, StoreView
from kvpolicy.control.plan import Plan, Target
from kvpolicy.controllers.parameters import row_count


class Static:
    """A fixed number of hot rows per request and layer, at every load.

    device_buffer_rows: rows; None means 2 x top-k of each store.
    """

    def __init__(self, device_buffer_rows: int | None = None) -> None:
        self.rows = (
            None
            if device_buffer_rows is None
            else row_count("device_buffer_rows", device_buffer_rows)
        )

    def initial(self, stores: tuple[StoreView, ...]) -> Target:
        """The budget, from the first token on."""
        return self.budget(stores)

    def decide(self, observation: Observation) -> Plan:
        return Plan.even(self.budget(observation.stores))

    def budget(self, stores: tuple[StoreView, ...]) -> tuple[int, ...]:
        """Rows per store."""
        return tuple(2 * s.topk if self.rows is None else self.rows for s in stores)
