"""What a controller says: how many hot rows each running request should keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvpolicy.control.observation import Observation

FULL = float("inf")
"""A target at or above everything a request can have: fully resident."""

Target = float | Sequence[float]
"""Hot rows of a request: one number for every store, or one number per store, in store order."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A proposal. Anything goes: it is projected onto what is feasible before it is applied.

    targets: request id -> hot rows (a request that is not named keeps its budget).
    default: target of running requests that ``targets`` does not name, None to keep.
    reserve_rows: rows per store kept free for arrivals (of every store's record). reserve_bytes:
    device memory kept free besides. draft_tokens: proposed tokens that a request may have verified in
    a step, at most; FULL leaves it to the schedule.
    """

    targets: Mapping[int, Target] = field(default_factory=dict)
    default: Target | None = None
    reserve_rows: float = 0.0
    reserve_bytes: float = 0.0
    draft_tokens: float = FULL

    @staticmethod
    def even(rows: Target) -> Plan:
        """The same target for every running request."""
        return Plan(default=rows)

    @staticmethod
    def full() -> Plan:
        """Everything resident, as far as memory goes."""
        return Plan(default=FULL)

    @staticmethod
    def keep(observation: Observation) -> Plan:
        """Every request keeps the budget it has."""
        return Plan(targets={r.request_id: r.budget for r in observation.requests})
