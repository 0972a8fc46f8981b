"""Who is on the device: admission, growth of contexts, preemption, deadlines."""

from __future__ import annotations

import itertools
import logging

from kvpolicy.engine.loop import ControlLoop
from kvpolicy.engine.metrics import Metrics
from kvpolicy.engine.request import Request, State
from kvpolicy.engine.scheduler import Scheduler
from kvpolicy.errors import CapacityError, IntegrityError
from kvpolicy.memory.hierarchy import Hierarchy

log = logging.getLogger(__name__)


class Residents:
    """Moves requests between the queue and the device, as far as memory and seats go.

    binding: what kept the first waiting request waiting at the last step: ``seats``, ``device``, ``host``,
    or empty if nothing waits.
    """

    def __init__(
        self, memory: Hierarchy, scheduler: Scheduler, control: ControlLoop, totals: Metrics
    ) -> None:
        self.memory = memory
        self.scheduler = scheduler
        self.control = control
        self.totals = totals
        self.binding = ""

    def initial_rows(self, request: Request, control: ControlLoop | None = None) -> tuple[int, ...]:
        """Hot rows per store that a request must get before it may start. control: whose promise it is
        (None: of the one that decides here)."""
        stores = self.memory.layout.stores
        most = tuple(s.store.entries(request.max_tokens) for s in stores)
        return (control or self.control).initial_rows(most)

    def frames_to_start(self, request: Request, control: ControlLoop | None = None) -> int:
        """Frames that a request takes when it starts, or comes back."""
        room = self.memory.room_for(request.max_tokens, request.next_tokens)
        return self.memory.frames_of(request.max_tokens, self.initial_rows(request, control), room)

    def queue_bytes(self, control: ControlLoop | None = None) -> tuple[int, ...]:
        """Device memory that waiting requests need to start, in order, as many as have seats.

        The room that admission leaves for growth is in it, that of all who run with the first.
        """
        size, more = self.memory.layout.frame_bytes, self.memory.growth_frames
        first = itertools.islice(self.scheduler.waiting, self.scheduler.seats_free)
        frames = [self.frames_to_start(request, control) + more for request in first]
        if frames:
            frames[0] += more * len(self.scheduler.running)
        return tuple(count * size for count in frames)

    def admit(self, step: int) -> None:
        """Start waiting requests while host, index, map and first hot rows can all be reserved.

        With nothing running there is nothing to wait for: then a request starts with the floor,
        which it was found to fit with when it came (a swap may have raised the first hot rows).
        """
        while (request := self.scheduler.next_waiting) is not None:
            rows = self.initial_rows(request)
            room = self.memory.room_for(request.max_tokens, request.next_tokens)
            try:
                if self.scheduler.running:
                    self._leave_growth(request)
                self._admit(request, rows, room)
            except CapacityError as error:
                if self.scheduler.running:
                    self.totals.defer(request, error.tier)
                    self.binding = error.tier
                    return
                log.warning("request %d starts with fewer hot rows: %s", request.id, error)
                self.totals.reduced_admissions += 1
                self._admit(request, (0,) * len(rows), room)
            self.scheduler.start(step)
            self.control.wake()
        self.binding = "seats" if self.scheduler.waiting else ""

    def _admit(self, request: Request, rows: tuple[int, ...], room: int) -> None:
        self.memory.admit(request.id, request.max_tokens, rows, room, request.context)

    def _leave_growth(self, request: Request) -> None:
        """CapacityError unless every running request could still grow once after an admission:
        a request that is admitted only to be preempted at the next growth gains nobody anything."""
        growth = self.memory.growth_frames * (len(self.scheduler.running) + 1)
        need, free = self.frames_to_start(request) + growth, self.memory.arena.frames.free
        if need > free:
            raise CapacityError("device", f"{need} frames needed, {free} free")

    def grow(self, step: int) -> None:
        """Room for the next row of every running request, the oldest first. Where frames lack,
        optional rows beyond what the controller promised give way, then the youngest request."""
        nothing = (0,) * len(self.control.promised)
        for request in list(self.scheduler.running):
            while request.state is not State.WAITING:
                missing = self.memory.grow(request.id, request.computed + 1)
                if not missing:
                    break
                self.memory.counters.shortages += 1
                self.control.wake()
                if self.memory.take_back(missing, self.control.promised):
                    continue
                if len(self.scheduler.running) > 1:
                    self.preempt(self.scheduler.running[-1], step)
                elif not (self.memory.take_back(missing, nothing) or self.memory.leave_full()):
                    raise IntegrityError(f"request {request.id} lacks {missing} frames, alone")

    def grow_for_drafts(self, width: int) -> None:
        """Room for proposed tokens too, where it is free: nobody gives way for it, and who has none
        verifies fewer."""
        for request in self.scheduler.running:
            if request.state is State.DECODE:
                most = max(0, min(width, request.tokens_left - 1))
                self.memory.grow(request.id, request.computed + 1 + most)

    def preempt(self, request: Request, step: int) -> None:
        """Put a request back to the host; it resumes exactly, before all that wait."""
        log.info("request %d is preempted at step %d", request.id, step)
        self.memory.preempt(request.id)
        self.scheduler.put_back(request, step)
        self.control.forget(request.id)
        self.totals.preemptions += 1

    def check_integrity(self) -> None:
        """IntegrityError unless who runs holds memory, and who was preempted is kept on the host."""
        held = set(self.memory.requests)
        running = {request.id for request in self.scheduler.running}
        if held != running:
            raise IntegrityError(f"requests {held ^ running} hold memory or run, not both")
        suspended = set(self.memory.suspended)
        preempted = {r.id for r in self.scheduler.waiting if r.preemptions}
        if suspended != preempted:
            raise IntegrityError(
                f"requests {suspended ^ preempted} are suspended or wait, not both"
            )
