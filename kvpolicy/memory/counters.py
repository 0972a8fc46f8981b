"""What retrieval did, counted. Rows are per layer: one record of n layers counts n rows."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class RetrievalCounters:
    """Totals since the start. In-flight rows are never counted: they need no retrieval.

    selected_rows: rows that query rows attended to. unique_rows: after the union over the query
    rows of one request. fetched_rows: copied from the host for attention (misses).
    staged_rows: those of them that could not stay. refetched_rows: copied again for a later layer
    because the step was served in waves.
    """

    selected_rows: int = 0
    unique_rows: int = 0
    fetched_rows: int = 0
    staged_rows: int = 0
    refetched_rows: int = 0
    host_to_device_bytes: int = 0

    def add(self, other: RetrievalCounters) -> None:
        """Add another count to this one."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @property
    def miss_rate(self) -> float:
        """Fetched rows over unique rows, 0 where nothing was selected."""
        return self.fetched_rows / self.unique_rows if self.unique_rows else 0.0

    @property
    def miss_rate_selected(self) -> float:
        """Fetched rows over selected rows, the form the paper reports."""
        return self.fetched_rows / self.selected_rows if self.selected_rows else 0.0


@dataclass(slots=True)
class MemoryCounters:
    """Everything the hierarchy counts. decode and prefill are apart: miss rates speak of decode.

    moved_*: rows copied from the host to seed or promote hot caches, not for attention.
    release_steps: steps in which a budget was taken back. request_waves: extra waves, beyond one
    per retrieval.
    """

    decode: RetrievalCounters
    prefill: RetrievalCounters
    moved_rows: int = 0
    moved_bytes: int = 0
    device_to_host_bytes: int = 0
    release_steps: int = 0
    request_waves: int = 0

    @property
    def host_to_device_bytes(self) -> int:
        """All bytes copied from host to device."""
        both = self.decode.host_to_device_bytes + self.prefill.host_to_device_bytes
        return both + self.moved_bytes
