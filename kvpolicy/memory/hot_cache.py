"""The hot cache of one request in one store: which entries stay on the device, and where.

Two forms. *Mapped*: ``capacity`` slots, a map entry -> slot, an eviction rule. *Full*: every entry
is resident, slot = entry, no metadata, nothing to look up. :meth:`HotCache.resize` moves between
them; rows are never lost, since the host holds each of them before it may be dropped here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvpolicy.errors import IntegrityError
from kvpolicy.kernels.eviction import EvictionRule, SweepState, stamp_of
from kvpolicy.kernels.paging import arange
from kvpolicy.kernels.resolve import ABSENT, HotState, Resolution, make_room, place, resolve
from kvpolicy.memory.arena import Arena, Table
from kvpolicy.memory.layout import StoreLayout

ENTRY, STAMP = 0, 1
# Records copied at once when a cache becomes full: bounds the copy that is outside the arena.
PROMOTE_ROWS = 1024

Fetch = Callable[[Tensor], Tensor]
"""Records of entries from the host: int64 [n] -> [n, layers, width] on the device."""


class HotCache:
    """Hot rows of one request in one store.

    slot_map: the request's map table over all its entries (required memory, owned by the caller).
    max_entries: entries the request can ever have. Starts mapped with capacity 0.
    """

    def __init__(
        self,
        arena: Arena,
        layout: StoreLayout,
        slot_map: Table,
        max_entries: int,
        rule: EvictionRule,
        owner: tuple[object, ...],
    ) -> None:
        self.layout = layout
        self.max_entries = max_entries
        self.rule = rule
        self.device = arena.device
        self.capacity = 0
        self.full = False
        self._map = slot_map
        self._rows = Table(arena, layout.record, ("hot", *owner))
        self._meta = Table(arena, layout.meta, ("hot", *owner))
        self._sweep = SweepState()
        self._frames = arena.frames
        self._clear_map()

    # --- reading -------------------------------------------------------------------------------

    @property
    def state(self) -> HotState:
        """Device state as the resolve kernel takes it."""
        return HotState(
            slot_of=self._map.paged,
            entry_of=self._meta.column(ENTRY),
            stamp=self._meta.column(STAMP),
            capacity=self.capacity,
            sweep=self._sweep,
        )

    @property
    def num_frames(self) -> int:
        """Arena frames held by rows and metadata."""
        return self._rows.num_frames + self._meta.num_frames

    def count_missing(self, entries: Tensor) -> int:
        """How many of ``entries`` (int64, committed) are not resident. Changes nothing."""
        if self.full:
            return 0
        return int((self._map.paged.get(entries) < 0).sum())

    def locate(self, slots: Tensor) -> Tensor:
        """Arena locations of slots (of entries, where full)."""
        return self._rows.paged.locate(slots)

    def resolve(self, wanted: Tensor, step: int, admit: Tensor | None) -> Resolution:
        """See :func:`kvpolicy.kernels.resolve.resolve`. A full cache misses nothing."""
        if self.full:
            return Resolution(wanted, torch.zeros_like(wanted, dtype=torch.bool))
        return resolve(wanted, self.state, self.rule, step, admit)

    def write(self, slots: Tensor, records: Tensor) -> None:
        """Store records at slots that :meth:`resolve` or :meth:`append` gave out."""
        self._rows.paged.put(slots, records)

    # --- new rows ------------------------------------------------------------------------------

    def append(self, entries: Tensor, records: Tensor, step: int, evict: bool) -> None:
        """Take in newly committed entries (ascending), as far as there is room.

        evict: old rows may give way; without it only free slots are used.
        """
        if self.full:
            self._rows.paged.put(entries, records)
            return
        if self.capacity == 0 or not entries.numel():
            return
        state = self.state
        nothing = entries[:0]
        if evict:
            room = make_room(state, self.rule, step, entries.numel(), keep=nothing)
        else:
            slots = arange(self.capacity, self.device)
            room = slots[state.entry_of.get(slots) == ABSENT][: entries.numel()]
        if not room.numel():
            return
        # Where not all fit, the newest stay: they are the likeliest to be selected again.
        entries, records = entries[-room.numel() :], records[-room.numel() :]
        place(state, entries, room, stamp_of(step, hit=False))
        self.write(room, records)

    # --- capacity ------------------------------------------------------------------------------

    def resize(self, rows: int, committed: int, fetch: Fetch, recent: Tensor | None = None) -> None:
        """Set the budget. At or above ``max_entries`` the cache becomes full.

        committed: entries on the host now; fetch: reads them. recent: entries selected last (kept
        first when a full cache shrinks). Growing may raise CapacityError, then nothing changed;
        shrinking never fails: if metadata does not fit in what is freed, fewer rows stay.
        """
        if rows >= self.max_entries:
            if not self.full:
                self._become_full(committed, fetch)
        elif self.full:
            self._leave_full(rows, committed, recent)
        elif rows < self.capacity:
            self._shrink(rows)
        elif rows > self.capacity:
            self._grow(rows)

    def _grow(self, rows: int) -> None:
        old = self.capacity
        needed = self.layout.hot_frames(rows, False) - self.num_frames
        self._frames.require(needed, self._rows.owner)
        self._rows.resize(rows)
        self._meta.resize(rows)
        self.capacity = rows
        fresh = arange(rows, self.device)[old:]
        self._set_meta(fresh, torch.full_like(fresh, ABSENT), torch.zeros_like(fresh))
        self._sweep.hand = old

    def _shrink(self, rows: int) -> None:
        """Keep the most recently used rows; those beyond the new end move into freed slots."""
        state = self.state
        slots = arange(self.capacity, self.device)
        entry, stamp = state.entry_of.get(slots).long(), state.stamp.get(slots)
        held = slots[entry != ABSENT]
        order = torch.sort(stamp[held], stable=True, descending=True).indices
        keep, drop = held[order[:rows]], held[order[rows:]]
        dropped = entry[drop]
        state.slot_of.put(dropped, torch.full_like(dropped, ABSENT))
        occupied = torch.zeros(self.capacity, dtype=torch.bool, device=self.device)
        occupied[keep] = True
        movers = keep[keep >= rows].sort().values
        homes = slots[:rows][~occupied[:rows]]
        targets, empty = homes[: movers.numel()], homes[movers.numel() :]
        if movers.numel():
            self._rows.paged.put(targets, self._rows.paged.get(movers))
            self._set_meta(targets, entry[movers], stamp[movers])
            state.slot_of.put(entry[movers], targets)
        self._set_meta(empty, torch.full_like(empty, ABSENT), torch.zeros_like(empty))
        self._rows.resize(rows)
        self._meta.resize(rows)
        self.capacity = rows
        self._sweep.hand = self._sweep.hand % rows if rows else 0

    def _become_full(self, committed: int, fetch: Fetch) -> None:
        """Promotion: all rows come from the host into place. The map is left absent, unused."""
        self._frames.require(
            self.layout.hot_frames(self.max_entries, True) - self.num_frames, self._rows.owner
        )
        self._clear_map()
        self._rows.resize(0)
        self._meta.resize(0)
        self._rows.resize(self.max_entries)
        self.capacity = self.max_entries
        self.full = True
        for start in range(0, committed, PROMOTE_ROWS):
            entries = arange(committed, self.device)[start : start + PROMOTE_ROWS]
            self._rows.paged.put(entries, fetch(entries))

    def _leave_full(self, rows: int, committed: int, recent: Tensor | None) -> None:
        """Release: the entries selected last stay, then the newest, as far as ``rows`` go."""
        allowed = self._frames.free + self._rows.num_frames
        while rows and self.layout.hot_frames(rows, False) > allowed:
            rows = max(0, rows - self.layout.record.per_frame)
        entries = keep_order(recent, committed, rows, self.device)
        records = self._rows.paged.get(entries)
        self._rows.resize(0)
        self.full = False
        self.capacity = 0
        self._sweep = SweepState()
        self._grow(rows)
        if rows and entries.numel():
            room = arange(entries.numel(), self.device)
            place(self.state, entries, room, 0)
            if recent is not None:
                selected = room[torch.isin(entries, recent)]
                self.state.stamp.put(selected, torch.ones_like(selected))
            self.write(room, records)

    def seed(self, entries: Tensor, records: Tensor, step: int) -> None:
        """Make ``entries`` (distinct, at most ``capacity``) the content of a mapped cache."""
        self._clear_map()
        every = arange(self.capacity, self.device)
        self._set_meta(every, torch.full_like(every, ABSENT), torch.zeros_like(every))
        slots = every[: entries.numel()]
        place(self.state, entries, slots, stamp_of(step, hit=False))
        self.write(slots, records)

    def release(self) -> None:
        """Give all hot frames back (the map table is the caller's)."""
        self._rows.resize(0)
        self._meta.resize(0)
        self.capacity = 0
        self.full = False

    # --- helpers -------------------------------------------------------------------------------

    def _clear_map(self) -> None:
        everything = arange(self.max_entries, self.device)
        if everything.numel():
            self._map.paged.put(everything, torch.full_like(everything, ABSENT))

    def _set_meta(self, slots: Tensor, entry: Tensor, stamp: Tensor) -> None:
        if slots.numel():
            self._meta.paged.put(slots, torch.stack([entry.int(), stamp.int()], dim=-1))

    # --- integrity -----------------------------------------------------------------------------

    def check_integrity(self, committed: int, host_rows: Tensor) -> None:
        """IntegrityError unless map and metadata mirror each other and every row equals the host's.

        committed: entries on the host; host_rows: [entries, layers, width].
        """
        where = self._rows.owner
        if self.full:
            held = slots = arange(committed, self.device)
        else:
            slots, held = self._check_maps(committed)
        records = self._rows.paged.get(slots).cpu()
        truth = host_rows[held.cpu()]
        # Bits, not values: a NaN that the model wrote must compare equal to itself.
        if not torch.equal(records.view(torch.uint8), truth.view(torch.uint8)):
            raise IntegrityError(f"{where}: a hot row differs from the host's")

    def _check_maps(self, committed: int) -> tuple[Tensor, Tensor]:
        where = self._rows.owner
        if self._rows.items != self.capacity or self._meta.items != self.capacity:
            raise IntegrityError(f"{where}: tables and capacity {self.capacity} differ")
        slot_of = self._map.paged.get(arange(self.max_entries, self.device)).long()
        entries = (slot_of != ABSENT).nonzero()[:, 0]
        if entries.numel() and int(entries[-1]) >= committed:
            raise IntegrityError(f"{where}: entry {int(entries[-1])} is hot before it is committed")
        slots = arange(self.capacity, self.device)
        entry_of = self.state.entry_of.get(slots).long()
        held = slots[entry_of != ABSENT]
        if not torch.equal(slot_of[entries].sort().values, held):
            raise IntegrityError(f"{where}: map and slots disagree on which slots are taken")
        if not torch.equal(slot_of[entry_of[held]], held):
            raise IntegrityError(f"{where}: slot -> entry -> slot is not the identity")
        return held, entry_of[held]


def keep_order(recent: Tensor | None, committed: int, rows: int, device: torch.device) -> Tensor:
    """Up to ``rows`` distinct entries: ``recent`` ones (newest first), then the newest, ascending."""
    mask = torch.zeros(committed, dtype=torch.bool, device=device)
    if recent is not None and rows:
        mask[recent[recent < committed][-rows:]] = True
    left = rows - int(mask.sum())
    others = (~mask).nonzero()[:, 0]
    if left > 0:
        mask[others[-left:]] = True
    return mask.nonzero()[:, 0]
