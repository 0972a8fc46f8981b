"""Watches an engine and takes shadow controllers through all that it does.

Selections do not depend on the policy (nothing the model computes does), so what another controller
would have missed on the same batches is counted, not estimated. The shadows' own memory decides over
their caches alone: who runs in which step is the live controller's doing, and where a shadow would have
had it otherwise, it says so (``ShadowPolicy.report``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvpolicy.control.decision import Decision
from kvpolicy.controllers.registry import ControllerLike
from kvpolicy.engine.engine import Engine
from kvpolicy.engine.request import Request, State
from kvpolicy.engine.scheduler import Batch
from kvpolicy.errors import UserError
from kvpolicy.kernels.paging import upload
from kvpolicy.memory.transfer import ToHost
from kvpolicy.recording.recorder import where_selected
from kvpolicy.shadows.events import Decided, Joined, Stepped, Work
from kvpolicy.shadows.policy import ShadowPolicy

__all__ = ["Shadows"]

# Steps that may be on their way from the device; a step of 128 requests of tiny-dsa is 0.25 MiB of
# pinned memory. With as many the shadows wait, so that memory stays bounded.
MOST_PENDING = 64


@dataclass(frozen=True, slots=True)
class _Pending:
    """An event whose selections may still be on their way. queues: per shadow, what requests that wait
    need to start with it. kept: numbers of the work whose selections ``chosen`` has."""

    event: Decided | Stepped
    queues: tuple[tuple[int, ...], ...]
    chosen: ToHost | None = None
    kept: tuple[int, ...] = ()


class Shadows:
    """Shadow controllers of one engine, from now until :meth:`close`. An engine under them computes the same
    bits; they take host time (``report``: seconds).

    specs: as for ``--controller``; the same one twice is two shadows. UserError for an engine with a
    drafter: shadows follow one row per request and step.
    """

    def __init__(self, engine: Engine, specs: Sequence[ControllerLike]) -> None:
        if engine.speculator is not None:
            raise UserError(
                f"drafter = {engine.speculator.drafter.name!r}: shadows follow one row per request and "
                "step, so they run beside an engine without a drafter"
            )
        memory = engine.memory
        self.engine, self._layout = engine, memory.layout
        self.policies: list[ShadowPolicy] = []
        try:
            for spec in specs:
                self.policies.append(ShadowPolicy(spec, engine.config, memory.layout))
        except BaseException:
            for policy in self.policies:
                policy.close()
            raise
        self._where = where_selected(memory.tables, memory.layout)
        self._curves = [policy.curves for policy in self.policies if policy.curves is not None]
        self._known: dict[int, int] = {}
        self._pending: deque[_Pending] = deque()
        engine.observers.append(self)
        engine.control.listeners.append(self._decided)

    # --- what the engine tells -------------------------------------------------------------------

    def _decided(self, decision: Decision) -> None:
        event = Decided(decision.observation, **self._state())
        self._pending.append(_Pending(event, self._queues()))
        self._go_on()

    def __call__(self, step: int, batch: Batch, /) -> None:
        """A step has been launched."""
        work, kept, seats = [], [], []
        for request, count in (*((r, 1) for r in batch.decode), *batch.prompts):
            decode = request in batch.decode
            work.append(Work(request.id, request.computed - count, request.computed, decode))
            if decode or request.computed == request.prompt_end:
                kept.append(len(work) - 1)
                seats.append(self.engine.memory.requests[request.id].seat)
        event = Stepped(step, **self._state(), work=work)
        self._pending.append(_Pending(event, self._queues(), self._copy(seats), tuple(kept)))
        self._go_on()

    def _queues(self) -> tuple[tuple[int, ...], ...]:
        residents = self.engine.residents
        return tuple(residents.queue_bytes(policy.control) for policy in self.policies)

    def _state(self) -> dict[str, Any]:
        """Who is on the device, how much hot rows may take, and who is new there."""
        memory, running = self.engine.memory, self.engine.scheduler.running
        frames = memory.arena.frames
        joined = []
        known: dict[int, int] = {}
        for request in running:
            known[request.id] = request.admitted_step
            if self._known.get(request.id) != request.admitted_step:
                joined.append(self._joined(request))
        self._known = known
        return {
            "room": frames.num_frames - frames.used + frames.held_for("hot"),
            "running": {r.id: memory.requests[r.id].reserved for r in running},
            "alive": frozenset(self.engine.requests),
            "joined": tuple(joined),
        }

    def _joined(self, request: Request) -> Joined:
        held = self.engine.memory.requests[request.id]
        return Joined(
            request.id,
            held.seat,
            request.max_tokens,
            held.reserved,
            held.committed,
            request.state is State.DECODE,
        )

    def _copy(self, seats: list[int]) -> ToHost | None:
        """What the requests in these seats selected, all selectors side by side: the next step writes
        over it."""
        if not seats:
            return None
        index = upload(seats, self.engine.device)
        parts = [
            own.recent[:, column, :topk].index_select(0, index).to(torch.int32)
            for own, column, topk in self._where
        ]
        return ToHost(torch.cat(parts, dim=1))

    # --- what the shadows make of it -------------------------------------------------------------

    def _go_on(self, wait: bool = False) -> None:
        """Take the shadows through the events whose selections have arrived."""
        while self._pending:
            first = self._pending[0]
            late = first.chosen is not None and not first.chosen.ready
            if late and not wait and len(self._pending) < MOST_PENDING:
                return
            self._pending.popleft()
            if isinstance(first.event, Decided):
                self._decide(first.event, first.queues)
            else:
                self._step(first.event, first)

    def _decide(self, event: Decided, queues: tuple[tuple[int, ...], ...]) -> None:
        self._forget(event)
        for policy, queue in zip(self.policies, queues, strict=True):
            policy.decide(event, queue)

    def _step(self, event: Stepped, pending: _Pending) -> None:
        self._forget(event)
        if pending.chosen is not None:
            for row, number in zip(pending.chosen.read().numpy(), pending.kept, strict=True):
                self._select(event.work[number], row, event.step)
        for policy, queue in zip(self.policies, pending.queues, strict=True):
            policy.step(event, queue)

    def _forget(self, event: Decided | Stepped) -> None:
        joined = {each.request_id for each in event.joined}
        for curves in self._curves:
            followed = curves.followed
            if followed is not None and (followed not in event.running or followed in joined):
                curves.leave()

    def _select(self, work: Work, row: NDArray[np.int32], step: int) -> None:
        """Sort a request's selections by store."""
        stores = self._layout.stores
        by_store: list[list[NDArray[np.int32]]] = [[] for _ in stores]
        start = 0
        for own, _, topk in self._where:
            entries = row[start : start + topk]
            by_store[own.layout.index].append(entries[entries >= 0])
            start += topk
        notes = []
        for store, parts in zip(stores, by_store, strict=True):
            committed = store.store.entries(work.before)
            distinct = [np.unique(part) for part in parts]
            work.calls.append([part[: np.searchsorted(part, committed)] for part in distinct])
            every = distinct[0] if len(distinct) == 1 else np.unique(np.concatenate(parts))
            work.recent.append(every)
            notes.append((store.index, step, committed, every.astype(np.int64)))
        if work.decode:
            for curves in self._curves:
                curves.note(work.request_id, notes)

    # --- reports ---------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until everything that the engine has launched is accounted for."""
        self._go_on(wait=True)

    def samples(self, live: dict[str, Any]) -> list[dict[str, Any]]:
        """The engine's sample (``asdict(engine.sample())``) as each shadow has it; where the device runs
        ahead, as of some steps ago."""
        if not self._pending:  # who has ended in the last step holds nothing any more
            running = {request.id for request in self.engine.scheduler.running}
            for policy in self.policies:
                policy.keep(running, self.engine.requests)
        return [policy.sample(live) for policy in self.policies]

    def report(self) -> list[dict[str, Any]]:
        """What every shadow did so far, JSON-ready, see :meth:`ShadowPolicy.report`."""
        self.settle()
        return [policy.report() for policy in self.policies]

    def close(self) -> None:
        """Leave the engine and let go of the controllers. A second call does nothing."""
        if self in self.engine.observers:
            self.engine.observers.remove(self)
            self.engine.control.listeners.remove(self._decided)
        for policy in self.policies:
            policy.close()

    def __enter__(self) -> Shadows:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
