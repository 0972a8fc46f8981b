"""Where the bytes of both tiers are, as really allocated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvpolicy.memory.arena import Arena
from kvpolicy.memory.host_pool import HostPool
from kvpolicy.memory.layout import Layout
from kvpolicy.memory.request import RequestMemory


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Device bytes by use, as really allocated (whole frames), and host bytes.

    required: staging + in-flight + index keys + slot maps + pinned + draft rings + the hot floor.
    optional: hot rows beyond the floor, all that a controller can give or take.
    """

    staging: int
    in_flight: int
    index_keys: int
    slot_maps: int
    pinned: int
    rings: int
    hot_floor: int
    optional: int
    free: int
    host_used: int
    host_free: int

    @property
    def required(self) -> int:
        fixed = self.staging + self.in_flight + self.index_keys + self.slot_maps
        return fixed + self.pinned + self.rings + self.hot_floor

    @property
    def used(self) -> int:
        return self.required + self.optional


def measure(
    layout: Layout,
    arena: Arena,
    host: HostPool,
    requests: Iterable[RequestMemory],
    floor_rows: int,
) -> MemoryUsage:
    """The report, from the allocators' own books."""
    size, held = layout.frame_bytes, arena.frames.held_for
    floor = all_floors(requests, floor_rows)
    return MemoryUsage(
        staging=held("staging") * size,
        in_flight=held("in-flight") * size,
        index_keys=held("keys") * size,
        slot_maps=held("map") * size,
        pinned=held("pinned") * size,
        rings=held("ring") * size,
        hot_floor=floor * size,
        optional=(held("hot") - floor) * size,
        free=arena.frames.free * size,
        host_used=host.extents.used,
        host_free=host.extents.free,
    )


def all_floors(requests: Iterable[RequestMemory], floor_rows: int) -> int:
    """Frames of the protected minimum of all requests."""
    return sum(floor_frames(request, floor_rows) for request in requests) if floor_rows else 0


def floor_frames(request: RequestMemory, floor_rows: int) -> int:
    """Frames of the protected minimum. A full cache has no metadata, so it may hold fewer."""
    total = 0
    for hot in request.hot:
        total += min(hot.frames_for(min(floor_rows, hot.max_entries)), hot.num_frames)
    return total
