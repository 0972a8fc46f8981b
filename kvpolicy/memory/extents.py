"""Extent allocator of the host pool: contiguous byte ranges, first fit, merged when freed. Free of torch."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from kvpolicy.errors import CapacityError, IntegrityError

# Records start on 64-byte lines, so that a copy of one never touches another's line.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """A byte range [start, start + size)."""

    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size


class ExtentAllocator:
    """Contiguous ranges of a pool of ``capacity`` bytes. All-or-nothing, deterministic."""

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"capacity = {capacity}: must be 0 or more")
        self.capacity = capacity
        self._free: list[Extent] = [Extent(0, capacity)] if capacity else []
        self._used: dict[int, Extent] = {}

    @property
    def free(self) -> int:
        """Free bytes, in however many pieces."""
        return sum(extent.size for extent in self._free)

    @property
    def used(self) -> int:
        """Bytes handed out (rounded up to ALIGNMENT)."""
        return self.capacity - self.free

    @property
    def largest(self) -> int:
        """The largest range that can be had now."""
        return max((extent.size for extent in self._free), default=0)

    @staticmethod
    def rounded(size: int) -> int:
        """What a range of ``size`` bytes takes from the pool."""
        return -(-size // ALIGNMENT) * ALIGNMENT

    def allocate(self, size: int) -> Extent:
        """A range of at least ``size`` bytes, or CapacityError and no change."""
        if size <= 0:
            raise ValueError(f"size = {size}: must be positive")
        size = self.rounded(size)
        for i, hole in enumerate(self._free):
            if hole.size >= size:
                extent = Extent(hole.start, size)
                rest = Extent(hole.start + size, hole.size - size)
                self._free[i : i + 1] = [rest] if rest.size else []
                self._used[extent.start] = extent
                return extent
        raise CapacityError(
            "host",
            f"{size} bytes wanted in one range, largest free range {self.largest}, "
            f"{self.free} of {self.capacity} free",
        )

    def release(self, extent: Extent) -> None:
        """Give a range back and merge it with its free neighbours."""
        if self._used.get(extent.start) != extent:
            raise IntegrityError(f"{extent} is released but not in use")
        del self._used[extent.start]
        insort(self._free, extent)
        merged: list[Extent] = []
        for hole in self._free:
            if merged and merged[-1].stop == hole.start:
                merged[-1] = Extent(merged[-1].start, merged[-1].size + hole.size)
            else:
                merged.append(hole)
        self._free = merged

    def check_integrity(self) -> None:
        """IntegrityError unless free and used ranges tile the pool exactly, merged and in order."""
        position = 0
        last_free = False
        for extent in sorted([*self._free, *self._used.values()]):
            free = extent not in self._used.values()
            if extent.start != position or extent.size <= 0:
                raise IntegrityError(f"{extent} leaves a gap or overlaps at {position}")
            if free and last_free:
                raise IntegrityError(f"{extent} is free beside a free range, not merged")
            position, last_free = extent.stop, free
        if position != self.capacity:
            raise IntegrityError(f"ranges end at {position}, pool at {self.capacity}")
