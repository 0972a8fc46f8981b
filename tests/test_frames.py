"""The frame allocator against a dictionary of owners."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvpolicy.errors import CapacityError, IntegrityError
from kvpolicy.memory.frames import FrameAllocator

OWNERS = st.sampled_from(["a", ("hot", 1, "B"), 7, None])


class FrameMachine(RuleBasedStateMachine):
    """Allocations, releases and wrong releases; the model is ``owner_of``."""

    @initialize(frames=st.integers(0, 24))
    def start(self, frames: int) -> None:
        self.allocator = FrameAllocator(frames)
        self.frames = frames
        self.owner_of: dict[int, object] = {}
        self.peak = 0

    def free(self) -> list[int]:
        return [f for f in range(self.frames) if f not in self.owner_of]

    @rule(count=st.integers(0, 12), owner=OWNERS)
    def allocate(self, count: int, owner: object) -> None:
        free = self.free()
        if count > len(free):
            with pytest.raises(CapacityError, match="device memory") as caught:
                self.allocator.allocate(count, owner)
            assert caught.value.tier == "device"
            return
        assert self.allocator.allocate(count, owner) == free[:count]
        self.owner_of.update(dict.fromkeys(free[:count], owner))
        self.peak = max(self.peak, len(self.owner_of))

    @rule(owner=OWNERS, data=st.data())
    def release(self, owner: object, data: st.DataObject) -> None:
        own = [f for f, held in self.owner_of.items() if held == owner]
        frames = data.draw(st.lists(st.sampled_from(own), unique=True)) if own else []
        self.allocator.release(iter(frames), owner)
        for frame in frames:
            del self.owner_of[frame]

    @rule(owner=OWNERS, data=st.data())
    def release_wrong(self, owner: object, data: st.DataObject) -> None:
        """One frame that is free, foreign or outside, among right ones."""
        own = [f for f, held in self.owner_of.items() if held == owner]
        others = [f for f in range(-1, self.frames + 2) if f not in own]
        frames = [*own, data.draw(st.sampled_from(others))]
        with pytest.raises(IntegrityError):
            self.allocator.release(data.draw(st.permutations(frames)), owner)

    @rule(owner=OWNERS)
    def release_twice_in_one_call(self, owner: object) -> None:
        own = [f for f, held in self.owner_of.items() if held == owner]
        if own:
            with pytest.raises(IntegrityError, match="twice"):
                self.allocator.release([*own, own[0]], owner)

    @rule(owner=OWNERS)
    def allocate_negative(self, owner: object) -> None:
        with pytest.raises(ValueError, match="count = -1"):
            self.allocator.allocate(-1, owner)

    @invariant()
    def agrees(self) -> None:
        self.allocator.check_integrity()
        held = list(self.owner_of.values())
        assert self.allocator.used == len(held)
        assert self.allocator.free == self.frames - len(held)
        assert self.allocator.peak == self.peak
        assert self.allocator.owners() == {owner: held.count(owner) for owner in held}
        for owner in ("a", 7, "nobody"):
            assert self.allocator.owners().get(owner, 0) == held.count(owner)


TestFrameMachine = FrameMachine.TestCase


def test_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="num_frames = -1"):
        FrameAllocator(-1)


def test_same_calls_give_the_same_frames() -> None:
    """Released frames come back lowest first, whatever the order of release."""
    for order in ([1, 4, 2], [4, 2, 1]):
        allocator = FrameAllocator(8)
        allocator.allocate(6, "a")
        allocator.release(order, "a")
        assert allocator.allocate(4, "b") == [1, 2, 4, 6]


@pytest.mark.parametrize("damage", ["leak", "doubled", "free and owned", "order", "stranger"])
def test_integrity_check_sees(damage: str) -> None:
    """Each kind of contradiction is reported."""
    allocator = FrameAllocator(4)
    allocator.allocate(1, "a")
    allocator.check_integrity()
    if damage == "leak":
        del allocator._owner[0]
    elif damage == "doubled":
        allocator._free.append(1)
    elif damage == "free and owned":
        allocator._owner[2] = "a"
    elif damage == "order":
        allocator._free.reverse()
    else:
        allocator._owner[9] = "a"
    with pytest.raises(IntegrityError):
        allocator.check_integrity()
