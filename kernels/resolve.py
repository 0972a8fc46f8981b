"""Resolve: from selected entries to hot slots, with deterministic admission and eviction.

Look-up is a direct map entry -> slot, so its cost follows the selection (k), not the size of the
cache. One call serves the *union* of the selections of one request's rows: each unique entry is
looked up once, stamped once and fetched at most once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .eviction import EvictionRule, SweepState, stamp_of
from .paging import Paged, arange

ABSENT = -1


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
    wanted: Tensor, state: HotState, rule: EvictionRule, step: int, admit: Tensor | None
) -> Resolution:
    """Find ``wanted`` entries in the hot cache and make room for those that are missing.

    wanted: [u] int64, ascending and unique. admit: [u] bool, which entries may stay when fetched;
    None looks up only and changes nothing. Missing entries take free slots, then victims that are
    not in ``wanted``, in ascending entry order; the rest keep slot ABSENT and belong in staging.
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
    room = make_room(state, rule, step, incoming.numel(), keep=hits)
    incoming = incoming[: room.numel()]
    place(state, incoming, room, stamp_of(step, hit=False))
    slot = slot.clone()
    slot[torch.searchsorted(wanted, incoming)] = room
    return Resolution(slot, missed)


def make_room(state: HotState, rule: EvictionRule, step: int, count: int, keep: Tensor) -> Tensor:
    """Up to ``count`` slots for new rows: free ones first, then victims outside ``keep`` slots.

    Victims lose their map entry here. Returns int64 [<= count].
    """
    slots = arange(state.capacity, keep.device)
    occupant = state.entry_of.get(slots)
    room = slots[occupant == ABSENT][:count]
    missing = count - room.numel()
    if missing <= 0:
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


PAD = 2**31 - 1
"""Fills rows of wanted entries at their end; above every entry."""


@dataclass(frozen=True, slots=True)
class CacheTables:
    """Hot caches of one store: a row per seat. Frames are numbers of arena frames, in order."""

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


@dataclass(frozen=True, slots=True)
class Resolved:
    """location: int64 [p, U]; missed: bool [p, U]."""

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
    """See :func:`resolve`, for several requests."""
    location = torch.full_like(wanted, -1)
    missed = torch.zeros_like(wanted, dtype=torch.bool)
    for i, (seat, may) in enumerate(zip(seats.tolist(), admit.tolist(), strict=True)):
        real = (wanted[i] != PAD).nonzero()[:, 0]
        asked = wanted[i][real]
        rows = Paged(tables.records, tables.row_frames[seat])
        if bool(tables.full[seat]):
            location[i][real] = rows.locate(asked)
            continue
        meta = tables.meta_frames[seat]
        state = HotState(
            Paged(tables.maps, tables.map_frames[seat]),
            Paged(tables.meta[..., 0], meta),
            Paged(tables.meta[..., 1], meta),
            int(tables.capacity[seat]),
            SweepState(int(tables.hand[seat]), int(tables.draws[seat])),
        )
        if may and not evict:
            taken = state.entry_of.get(arange(state.capacity, wanted.device)) != ABSENT
            free = int((~taken).sum())
            known = state.slot_of.get(asked) >= 0
            may_stay = torch.cumsum(~known, 0) <= free
        else:
            may_stay = torch.ones_like(asked, dtype=torch.bool)
        found = resolve(asked, state, rule, step, may_stay if may else None)
        tables.hand[seat], tables.draws[seat] = state.sweep.hand, state.sweep.draws
        kept = found.slot >= 0
        location[i][real[kept]] = rows.locate(found.slot[kept])
        missed[i][real] = found.missed
    return Resolved(location, missed)
