"""Resolve: from selected entries to hot slots, with deterministic admission and eviction.

Look-up is a direct map entry -> slot, so its cost follows the selection (k), not the size of the
cache. One call serves the *union* of the selections of one request's rows: each unique entry is
looked up once, stamped once and fetched at most once. :func:`resolve` is one request's call,
:func:`resolve_batch` that of many requests whose state lies in one :class:`CacheTables`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .eviction import EvictionRule, SweepState, stamp_of
from .paging import Paged, arange

ABSENT = -1
# Ends a row of wanted entries that is shorter than the widest one.
PAD = 2**31 - 1


@dataclass(slots=True)
class HotState:
    """Device state of one request's hot cache in one store.

    slot_of: int32 table over entries (slot or ABSENT). entry_of, stamp: int32 tables over slots.
    capacity: slots that may hold a row. used: slots [0, used) do, the others are free. sweep: what
    the eviction rule keeps. lazy_at: spreads the steps at which caches renew stamps lazily.
    """

    slot_of: Paged
    entry_of: Paged
    stamp: Paged
    capacity: int
    used: int
    sweep: SweepState = field(default_factory=SweepState)
    lazy_at: int = 0


@dataclass(frozen=True, slots=True)
class Resolution:
    """Where each wanted entry is.

    slot: [u] int64, hot slot or ABSENT (then it is to be staged). missed: [u] bool, not in the hot
    cache before this call.
    """

    slot: Tensor
    missed: Tensor


def resolve(
    wanted: Tensor,
    state: HotState,
    rule: EvictionRule,
    step: int,
    admit: bool,
) -> Resolution:
    """Find ``wanted`` entries in the hot cache and make room for those that are missing.

    wanted: [u] int64, unique. admit: missing entries may stay when fetched, else this looks up only and
    changes nothing. Missing entries take, in the order of ``wanted``, the
    lowest free slots, then the victims in the rule's order; the rest keep slot ABSENT and belong in
    staging. Victims are no hits of this call nor, where hits renew stamps, of this step.
    """
    slot = state.slot_of.get(wanted).long() if wanted.numel() else wanted
    missed = slot < 0
    if not admit or state.capacity == 0:
        return Resolution(slot, missed)
    hits = slot[~missed]
    due = bool(missed.any()) or (step + state.lazy_at) % rule.lazy == 0
    if rule.touch and due and hits.numel():
        state.stamp.put(hits, torch.full_like(hits, stamp_of(step, hit=True)))
    incoming = wanted[missed]
    if not incoming.numel():
        return Resolution(slot, missed)
    room = make_room(state, rule, step, incoming.numel(), keep=hits)
    incoming = incoming[: room.numel()]
    place(state, incoming, room, stamp_of(step, hit=False))
    slot = slot.clone()
    slot[missed.nonzero()[: room.numel(), 0]] = room
    return Resolution(slot, missed)


def make_room(
    state: HotState,
    rule: EvictionRule,
    step: int,
    count: int,
    keep: Tensor | None,
    evict: bool = True,
) -> Tensor:
    """Up to ``count`` slots for new rows: free ones, then (evict) victims. Returns int64 [<= count].

    keep: slots that must stay, and with them whatever was hit in this step, where hits renew stamps. None:
    a row is offered that nobody waits for: any other may go, and CLOCK's age learns nothing from it.
    Victims lose their map entry here; free slots count as used.
    """
    free = min(count, state.capacity - state.used)
    device = state.slot_of.frames.device
    room = arange(free, device) + state.used
    missing = count - free
    if missing > 0 and evict:
        slots = arange(state.capacity, device)
        stamp, candidate = state.stamp.get(slots), slots < state.used
        if keep is not None and rule.touch:
            candidate &= stamp != stamp_of(step, hit=True)
        elif keep is not None:
            candidate[keep] = False
        victims = rule.victims(stamp, candidate, missing, step, state.sweep, keep is not None)
        if victims.numel():
            entries = state.entry_of.get(victims).long()
            state.slot_of.put(entries, torch.full_like(entries, ABSENT))
        room = torch.cat([room, victims])
    state.used += free
    return room


def place(state: HotState, entries: Tensor, slots: Tensor, stamp: int) -> None:
    """Publish ``entries`` at ``slots`` (both [n] int64, distinct); the rows are copied by the caller."""
    if entries.numel():
        state.slot_of.put(entries, slots)
        state.entry_of.put(slots, entries)
        state.stamp.put(slots, torch.full_like(slots, stamp))


@dataclass(frozen=True, slots=True)
class CacheTables:
    """Hot caches of one store: a row per seat. Frames are numbers of arena frames, in order.

    records: arena view [F, per, layers, width]. maps: arena view int32 [F, per_map], entry -> slot or
    ABSENT. meta: arena view int32 [F, per_meta, 2], slot -> (entry or ABSENT, stamp).
    row_frames, map_frames, meta_frames: int64 [seats, most frames of such a table]; what lies past a
    table's end is not read.
    capacity: int32 [seats], slots (0: nothing may stay). full: bool [seats], every entry is resident,
    slot = entry, neither map nor metadata is used. used: int32 [seats], slots [0, used) hold a row, the
    others up to capacity are free. hand, draws, age: int32 [seats], see SweepState.
    """

    records: Tensor
    maps: Tensor
    meta: Tensor
    row_frames: Tensor
    map_frames: Tensor
    meta_frames: Tensor
    capacity: Tensor
    full: Tensor
    used: Tensor
    hand: Tensor
    draws: Tensor
    age: Tensor

    def state(self, seat: int) -> HotState:
        """One seat's mapped cache. Its numbers are copies: see :meth:`keep`."""
        meta_frames = self.meta_frames[seat]
        return HotState(
            slot_of=Paged(self.maps, self.map_frames[seat]),
            entry_of=Paged(self.meta[..., 0], meta_frames),
            stamp=Paged(self.meta[..., 1], meta_frames),
            capacity=int(self.capacity[seat]),
            used=int(self.used[seat]),
            sweep=SweepState(int(self.hand[seat]), int(self.draws[seat]), int(self.age[seat])),
            lazy_at=seat,
        )

    def keep(self, seat: int, state: HotState) -> None:
        """Write the numbers of a seat's state back."""
        self.used[seat] = state.used
        self.hand[seat], self.draws[seat] = state.sweep.hand, state.sweep.draws
        self.age[seat] = state.sweep.age


@dataclass(frozen=True, slots=True)
class Resolved:
    """Where each wanted entry of each piece is.

    location: int64 [p, U], the record's arena location, ABSENT where it must be staged and for PAD.
    missed: bool [p, U], not in the hot cache before this call (False for PAD).
    """

    location: Tensor
    missed: Tensor


def resolve_batch(
    tables: CacheTables,
    seats: Tensor,
    wanted: Tensor,
    admit: Tensor,
    rule: EvictionRule,
    step: int | Tensor,
) -> Resolved:
    """:func:`resolve` for p pieces of different seats.

    seats: int64 [p], distinct. wanted: int64 [p, U], rows ascending and unique, PAD at their ends.
    admit: bool [p], may the missing entries of a piece stay (else it is looked up and nothing of its
    cache changes). step: in [0, 2**30), a number or on the device [1].
    """
    location = torch.full_like(wanted, ABSENT)
    missed = torch.zeros_like(wanted, dtype=torch.bool)
    for piece, (seat, stays) in enumerate(zip(seats.tolist(), admit.tolist(), strict=True)):
        entries = wanted[piece]
        entries = entries[entries != PAD]
        count = entries.numel()
        slot = entries
        if not bool(tables.full[seat]):
            state = tables.state(seat)
            found = resolve(entries, state, rule, int(step), stays)
            tables.keep(seat, state)
            slot = found.slot
            missed[piece, :count] = found.missed
        kept = slot >= 0
        rows = Paged(tables.records, tables.row_frames[seat])
        location[piece, :count][kept] = rows.locate(slot[kept])
    return Resolved(location, missed)
