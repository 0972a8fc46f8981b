"""Frame allocator of the device arena: who owns which frame. Free of torch."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterable

from kvpolicy.errors import CapacityError, IntegrityError


def kind_of(owner: Hashable) -> Hashable:
    """What an owner holds frames for: the first part of its name."""
    return owner[0] if isinstance(owner, tuple) and owner else owner


class FrameAllocator:
    """Hands out equal frames of one arena, lowest number first, and remembers each owner.

    Deterministic: the same calls give the same frames. All operations are all-or-nothing.
    """

    def __init__(self, num_frames: int) -> None:
        if num_frames < 0:
            raise ValueError(f"num_frames = {num_frames}: must be 0 or more")
        self.num_frames = num_frames
        self._free = list(range(num_frames))  # a heap: the lowest free frame first
        self._owner: dict[int, Hashable] = {}
        self._held: Counter[Hashable] = Counter()
        self._kinds: Counter[Hashable] = Counter()
        self._peak = 0

    @property
    def free(self) -> int:
        """Frames nobody owns."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Frames somebody owns."""
        return self.num_frames - len(self._free)

    @property
    def peak(self) -> int:
        """Most frames ever in use at once."""
        return self._peak

    def require(self, count: int, owner: Hashable) -> None:
        """CapacityError unless ``count`` frames are free. Changes nothing."""
        if count > len(self._free):
            raise CapacityError(
                "device",
                f"{count} frames wanted for {owner}, {len(self._free)} of {self.num_frames} free",
            )

    def allocate(self, count: int, owner: Hashable) -> list[int]:
        """``count`` frames for ``owner``, or CapacityError and no change."""
        if count < 0:
            raise ValueError(f"count = {count}: must be 0 or more")
        self.require(count, owner)
        frames = [heapq.heappop(self._free) for _ in range(count)]
        for frame in frames:
            self._owner[frame] = owner
        if count:
            self._held[owner] += count
            self._kinds[kind_of(owner)] += count
        self._peak = max(self._peak, self.used)
        return frames

    def release(self, frames: Iterable[int], owner: Hashable) -> None:
        """Give frames back. IntegrityError if ``owner`` does not own one of them; then no change."""
        frames = list(frames)
        for frame in frames:
            if frame not in self._owner or self._owner[frame] != owner:
                holder = self._owner.get(frame)
                raise IntegrityError(f"frame {frame} is released by {owner}, owned by {holder}")
        if len(set(frames)) != len(frames):
            raise IntegrityError(f"{owner} releases a frame twice in one call")
        for frame in frames:
            del self._owner[frame]
            heapq.heappush(self._free, frame)
        if frames:
            self._held[owner] -= len(frames)
            self._kinds[kind_of(owner)] -= len(frames)
            if not self._held[owner]:
                del self._held[owner]

    def owners(self) -> dict[Hashable, int]:
        """Frames held, by owner."""
        return dict(self._held)

    def held_for(self, kind: Hashable) -> int:
        """Frames held by owners of this kind."""
        return self._kinds[kind]

    def check_integrity(self) -> None:
        """IntegrityError unless every frame is exactly free or owned, once."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise IntegrityError("a frame is twice in the free list")
        if any(self._free[(i - 1) // 2] > self._free[i] for i in range(1, len(self._free))):
            raise IntegrityError("the free list lost its order")
        if Counter(self._owner.values()) != self._held:
            raise IntegrityError("the frames counted by owner differ from those owned")
        kinds: Counter[Hashable] = Counter()
        for owner, count in self._held.items():
            kinds[kind_of(owner)] += count
        if kinds != self._kinds:
            raise IntegrityError("the frames counted by kind differ from those owned")
        both = free & self._owner.keys()
        if both:
            raise IntegrityError(f"frames {sorted(both)[:8]} are free and owned")
        if free | self._owner.keys() != set(range(self.num_frames)):
            raise IntegrityError("a frame is neither free nor owned")
