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
    capacity: slots that may hold a row. sweep: what the eviction rule keeps.
    """

    slot_of: Paged
    entry_of: Paged
    stamp: Paged
    capacity: int
    sweep: SweepState = field(default_factory=SweepState)


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
    admit: Tensor | None,
    evict: bool = True,
) -> Resolution:
    """Find ``wanted`` entries in the hot cache and make room for those that are missing.

    wanted: [u] int64, ascending and unique. admit: [u] bool, which entries may stay when fetched;
    None looks up only and changes nothing. evict: old rows may give way. Missing entries take, in
    ascending order, the lowest free slots, then victims that are not in ``wanted``, in ascending slot
    order; the rest keep slot ABSENT and belong in staging.
    """
    slot = state.slot_of.get(wanted).long() if wanted.numel() else wanted
    missed = slot < 0
    if admit is None or state.capacity == 0:
        return Resolution(slot, missed)
    hits = slot[~missed]
    if rule.touch and hits.numel():
        state.stamp.put(hits, torch.full_like(hits, stamp_of(step, hit=True)))
    incoming = wanted[missed & admit]
    if not incoming.numel():
        return Resolution(slot, missed)
    room = make_room(state, rule, step, incoming.numel(), keep=hits, evict=evict)
    incoming = incoming[: room.numel()]
    place(state, incoming, room, stamp_of(step, hit=False))
    slot = slot.clone()
    slot[torch.searchsorted(wanted, incoming)] = room
    return Resolution(slot, missed)


def make_room(
    state: HotState, rule: EvictionRule, step: int, count: int, keep: Tensor, evict: bool = True
) -> Tensor:
    """Up to ``count`` slots for new rows: free ones, then (evict) victims outside ``keep`` slots.

    Both in ascending slot order. Victims lose their map entry here. Returns int64 [<= count].
    """
    slots = arange(state.capacity, keep.device)
    occupant = state.entry_of.get(slots)
    room = slots[occupant == ABSENT][:count]
    missing = count - room.numel()
    if missing <= 0 or not evict:
        return room
    candidate = occupant != ABSENT
    candidate[keep] = False
    victims = rule.victims(state.stamp.get(slots), candidate, missing, step, state.sweep)
    if victims.numel():
        entries = state.entry_of.get(victims).long()
        state.slot_of.put(entries, torch.full_like(entries, ABSENT))
        state.entry_of.put(victims, torch.full_like(victims, ABSENT))
    return torch.cat([room, victims])


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
    slot = entry, neither map nor metadata is used. hand, draws: int32 [seats], see SweepState.
    """

    records: Tensor
    maps: Tensor
    meta: Tensor
    row_frames: Tensor
    map_frames: Tensor
    meta_frames: Tensor
    capacity: Tensor
    full: Tensor
    hand: Tensor
    draws: Tensor

    def state(self, seat: int) -> HotState:
        """One seat's mapped cache. Its sweep is a copy: see :meth:`keep_sweep`."""
        meta_frames = self.meta_frames[seat]
        return HotState(
            slot_of=Paged(self.maps, self.map_frames[seat]),
            entry_of=Paged(self.meta[..., 0], meta_frames),
            stamp=Paged(self.meta[..., 1], meta_frames),
            capacity=int(self.capacity[seat]),
            sweep=SweepState(int(self.hand[seat]), int(self.draws[seat])),
        )

    def keep_sweep(self, seat: int, sweep: SweepState) -> None:
        """Write hand and draws of a seat back."""
        self.hand[seat] = sweep.hand
        self.draws[seat] = sweep.draws


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
    step: int,
    evict: bool = True,
) -> Resolved:
    """:func:`resolve` for p pieces of different seats.

    seats: int64 [p], distinct. wanted: int64 [p, U], rows ascending and unique, PAD at their ends.
    admit: bool [p], may the missing entries of a piece stay (else it is looked up and nothing of its
    cache changes). step: in [0, 2**30). evict: old rows may give way, else only free slots are used.
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
            mask = torch.ones_like(entries, dtype=torch.bool) if stays else None
            found = resolve(entries, state, rule, step, mask, evict)
            tables.keep_sweep(seat, state.sweep)
            slot = found.slot
            missed[piece, :count] = found.missed
        kept = slot >= 0
        rows = Paged(tables.records, tables.row_frames[seat])
        location[piece, :count][kept] = rows.locate(slot[kept])
    return Resolved(location, missed)
