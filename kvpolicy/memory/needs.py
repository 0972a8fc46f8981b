"""What requests need of both tiers, in frames and bytes: one arithmetic for the engine and its twin."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from kvpolicy.errors import CapacityError
from kvpolicy.memory import accounting
from kvpolicy.memory.accounting import mib
from kvpolicy.memory.layout import Layout
from kvpolicy.memory.request import GROWTH_TOKENS

__all__ = ["Capacity", "Needs"]


class Capacity(NamedTuple):
    """What there is. frames: of the device arena; shared: those that staging and in-flight rows take."""

    frames: int
    shared: int
    host_bytes: int


class Needs(ABC):
    """A memory that answers what a request would take. floor_rows: hot rows that nobody can take away."""

    layout: Layout
    floor_rows: int

    @property
    @abstractmethod
    def capacity(self) -> Capacity:
        """What there is."""

    def frames_of(self, max_tokens: int, rows: Sequence[int], tokens: int | None = None) -> int:
        """Frames a request takes with these hot rows per store and room for ``tokens`` tokens
        (None: max_tokens), required part included."""
        now = max_tokens if tokens is None else tokens
        hot = accounting.hot_frames(self.layout, self.clamp(rows), max_tokens, now)
        return accounting.request_frames(self.layout, now) + hot

    def clamp(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Rows per store, not below the floor."""
        return tuple(max(wanted, self.floor_rows) for wanted in rows)

    def check_fits_alone(self, max_tokens: int, rows: Sequence[int]) -> None:
        """CapacityError naming the tier if a request could never run, even on an empty engine, with
        these rows or with the floor (which may take a frame of metadata more than a short request that
        is full)."""
        capacity = self.capacity
        have = capacity.frames - capacity.shared
        need = max(self.frames_of(max_tokens, each) for each in (rows, (0,) * len(rows)))
        if need > have:
            size = self.layout.frame_bytes
            raise CapacityError(
                "device",
                f"a request of {max_tokens} tokens needs {mib(need * size)} MiB; device_kv_mib = "
                f"{mib(capacity.frames * size)} leaves {mib(have * size)} MiB beside "
                "staging and in-flight rows",
            )
        host = accounting.host_bytes(self.layout, max_tokens)
        if host > capacity.host_bytes:
            raise CapacityError(
                "host",
                f"a request of {max_tokens} tokens needs {mib(host)} MiB, host_kv_mib = "
                f"{mib(capacity.host_bytes)}",
            )

    def room_for(self, max_tokens: int, tokens: int) -> int:
        """Tokens that a request gets room for when it needs ``tokens``: growth comes in lots."""
        return min(max_tokens, -(-tokens // GROWTH_TOKENS) * GROWTH_TOKENS)

    @property
    def growth_frames(self) -> int:
        """Frames that one lot of growth may take of a request that is not full."""
        lot = self.room_for(GROWTH_TOKENS, 1)
        return sum(s.key.frames(s.store.entries(lot)) + 1 for s in self.layout.stores)
