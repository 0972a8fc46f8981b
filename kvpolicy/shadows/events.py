"""What an engine does, as far as a shadow has to know: decisions and steps, in their order."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpolicy.control.observation import Observation
from kvpolicy.recording.lanes import Entries

__all__ = ["Decided", "Joined", "Stepped", "Work"]


@dataclass(frozen=True, slots=True)
class Joined:
    """A request that came to the device, or came back. reserved: tokens with room. committed: tokens
    that are durable already. decoding: past its prompt."""

    request_id: int
    seat: int
    max_tokens: int
    reserved: int
    committed: int
    decoding: bool


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision of the live controller. room: frames that hot rows of all requests may take. running:
    request id -> tokens with room. alive: ids of all that have not ended."""

    observation: Observation
    room: int
    running: dict[int, int]
    alive: frozenset[int]
    joined: tuple[Joined, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """What one request did in a step. before, after: tokens committed. decode: its row extends a
    generation. calls: per store, what each selector wanted, durable entries, ascending. recent: per store,
    what all selectors chose, ascending (empty: rows of a prompt that goes on)."""

    request_id: int
    before: int
    after: int
    decode: bool
    calls: list[list[Entries]] = field(default_factory=list)
    recent: list[Entries] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step, with growth before it. Fields as of :class:`Decided`."""

    step: int
    room: int
    running: dict[int, int]
    alive: frozenset[int]
    joined: tuple[Joined, ...]
    work: list[Work]
