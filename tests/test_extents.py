"""The extent allocator against a byte map."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpolicy.errors import CapacityError, IntegrityError
from kvpolicy.memory.extents import ALIGNMENT, Extent, ExtentAllocator


class ExtentMachine(RuleBasedStateMachine):
    """The model is one byte per byte of the pool, 1 where in use."""

    @initialize(capacity=st.integers(0, 20 * ALIGNMENT))
    def start(self, capacity: int) -> None:
        self.allocator = ExtentAllocator(capacity)
        self.bytes = bytearray(capacity)
        self.held: list[Extent] = []
        self.last: Extent | None = None

    @rule(size=st.integers(1, 6 * ALIGNMENT))
    def allocate(self, size: int) -> None:
        wanted = -(-size // ALIGNMENT) * ALIGNMENT
        at = self.bytes.find(bytes(wanted))
        if at < 0:
            with pytest.raises(CapacityError, match="host memory") as caught:
                self.allocator.allocate(size)
            assert caught.value.tier == "host"
            return
        extent = self.allocator.allocate(size)
        assert extent == Extent(at, wanted)  # the first range that is long enough
        assert extent.start % ALIGNMENT == 0 and extent.stop <= len(self.bytes)
        self.bytes[extent.start : extent.stop] = b"\1" * wanted
        self.held.append(extent)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        extent = data.draw(st.sampled_from(self.held))
        self.allocator.release(extent)
        self.held.remove(extent)
        self.bytes[extent.start : extent.stop] = bytes(extent.size)
        self.last = extent

    @precondition(lambda self: self.last is not None and self.last not in self.held)
    @rule()
    def release_again(self) -> None:
        assert self.last is not None
        with pytest.raises(IntegrityError, match="not in use"):
            self.allocator.release(self.last)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), start=st.sampled_from([0, ALIGNMENT]))
    def release_part(self, data: st.DataObject, start: int) -> None:
        """A range that was never handed out as such."""
        extent = data.draw(st.sampled_from(self.held))
        part = Extent(extent.start + start, extent.size + ALIGNMENT - 2 * start)
        if part not in self.held:
            with pytest.raises(IntegrityError):
                self.allocator.release(part)

    @rule(size=st.integers(-2, 0))
    def allocate_nothing(self, size: int) -> None:
        with pytest.raises(ValueError, match="must be positive"):
            self.allocator.allocate(size)

    @invariant()
    def agrees(self) -> None:
        self.allocator.check_integrity()
        holes = bytes(self.bytes).split(b"\1")
        assert self.allocator.free == sum(map(len, holes))
        assert self.allocator.used == sum(extent.size for extent in self.held)
        assert self.allocator.largest == max(map(len, holes))


TestExtentMachine = ExtentMachine.TestCase


def test_negative_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity = -1"):
        ExtentAllocator(-1)


@pytest.mark.parametrize(
    "order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
)
def test_neighbours_merge_in_every_order(order: tuple[int, ...]) -> None:
    """After all is released, the whole pool can be had in one range again."""
    allocator = ExtentAllocator(3 * ALIGNMENT)
    extents = [allocator.allocate(1) for _ in range(3)]
    for i in order:
        allocator.release(extents[i])
        allocator.check_integrity()
    assert allocator.allocate(3 * ALIGNMENT) == Extent(0, 3 * ALIGNMENT)


def test_the_refusal_tells_free_from_contiguous() -> None:
    """Enough bytes in pieces that are too short: the message has both numbers."""
    allocator = ExtentAllocator(3 * ALIGNMENT)
    extents = [allocator.allocate(ALIGNMENT) for _ in range(3)]
    allocator.release(extents[0])
    allocator.release(extents[2])
    with pytest.raises(CapacityError, match=r"128 bytes wanted.*largest free range 64, 128 of 192"):
        allocator.allocate(65)
    allocator.check_integrity()


@pytest.mark.parametrize("damage", ["gap", "overlap", "not merged", "too long"])
def test_integrity_check_sees(damage: str) -> None:
    """Each kind of contradiction is reported."""
    allocator = ExtentAllocator(4 * ALIGNMENT)
    extent = allocator.allocate(ALIGNMENT)
    allocator.check_integrity()
    if damage == "gap":
        del allocator._used[extent.start]
    elif damage == "overlap":
        allocator._free.append(extent)
    elif damage == "not merged":
        half = ALIGNMENT
        allocator._free = [Extent(half, half), Extent(2 * half, 2 * half)]
    else:
        allocator._free[-1] = Extent(ALIGNMENT, 4 * ALIGNMENT)
    with pytest.raises(IntegrityError):
        allocator.check_integrity()
