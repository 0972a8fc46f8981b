"""The hot cache of one request in one store: which entries stay on the device, and where.

Two forms. *Mapped*: ``capacity`` slots, a map entry -> slot, an eviction rule. *Full*: every entry
is resident, slot = entry, no metadata, nothing to look up. :meth:`HotCache.resize` moves between
them; rows are never lost, since the host holds each of them before it may be dropped here.

Look-up, admission and new rows are the kernels' (``kernels.resolve``), for all requests at once;
here is what happens seldom: a cache changes its size or its form.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvpolicy.errors import IntegrityError
from kvpolicy.kernels.eviction import SweepState, stamp_of
from kvpolicy.kernels.paging import Paged, arange
from kvpolicy.kernels.resolve import ABSENT
from kvpolicy.memory.arena import Arena, Table
from kvpolicy.memory.tables import StoreTables

ENTRY, STAMP = 0, 1

Load = Callable[[Tensor, Tensor], None]
"""Copies records of committed entries from the host to arena locations: int64 [n] each."""


class HotCache:
    """Hot rows of one request in one store.

    tables, seat: where kernels find it. slot_map: the request's map table (required memory, owned
    by the caller), with room for ``room`` entries now. max_entries: entries the request can ever
    have. Starts mapped with capacity 0.
    """

    def __init__(
        self,
        arena: Arena,
        tables: StoreTables,
        seat: int,
        slot_map: Table,
        room: int,
        max_entries: int,
        owner: tuple[object, ...],
    ) -> None:
        self.layout = tables.layout
        self.max_entries = max_entries
        self.room = room
        self.device = arena.device
        self.capacity = 0
        self.full = False
        self._tables, self._seat = tables, seat
        self._map = slot_map
        cache = tables.cache
        self._rows = Table(arena, self.layout.record, ("hot", *owner), cache.row_frames[seat])
        self._meta = Table(arena, self.layout.meta, ("hot", *owner), cache.meta_frames[seat])
        self._frames = arena.frames
        self._set_form(0, full=False)
        self._start_anew()  # whoever sat here before: a request's evictions are its own
        self._clear_map(0)

    # --- reading -------------------------------------------------------------------------------

    @property
    def num_frames(self) -> int:
        """Arena frames held by rows and metadata."""
        return self._rows.num_frames + self._meta.num_frames

    def frames_for(self, rows: int) -> int:
        """Arena frames that a budget takes now."""
        full = rows >= self.max_entries
        return self.layout.hot_frames(self.room if full else rows, full)

    def count_missing(self, entries: Tensor) -> int:
        """How many of ``entries`` (int64, committed) are not resident. Changes nothing."""
        if self.full:
            return 0
        return int((self._map.paged.get(entries) < 0).sum())

    def resident(self, committed: int) -> Tensor:
        """Which of the first ``committed`` entries are here, bool [committed]. Changes nothing."""
        if self.full:
            return torch.ones(committed, dtype=torch.bool, device=self.device)
        here: Tensor = self._map.paged.get(arange(committed, self.device)).long() != ABSENT
        return here

    def locate(self, slots: Tensor) -> Tensor:
        """Arena locations of slots (of entries, where full)."""
        return self._rows.paged.locate(slots)

    # --- capacity ------------------------------------------------------------------------------

    def grow(self, room: int) -> None:
        """Room for more entries; the map table has been resized already. The frames must be free."""
        old, self.room = self.room, room
        self._clear_map(old)
        if self.full:
            self._rows.resize(room)

    def resize(self, rows: int, committed: int, load: Load, recent: Tensor | None = None) -> None:
        """Set the budget. At or above ``max_entries`` the cache becomes full.

        committed: entries on the host now; load: copies them here. recent: entries selected last
        (kept first when a full cache shrinks). Growing may raise CapacityError, then nothing
        changed; shrinking never fails: if metadata does not fit in what is freed, fewer rows stay.
        """
        if rows >= self.max_entries:
            if not self.full:
                self._become_full(committed, load)
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
        self._set_form(rows, full=False)
        self._tables.cache.hand[self._seat].fill_(old)

    def _shrink(self, rows: int) -> None:
        """Keep the most recently used rows; those beyond the new end move into freed slots. Which they
        are only the device knows, and nothing waits for it."""
        cache, put = self._tables.cache, self._tables.ops.put
        slots = arange(self.capacity, self.device)
        meta = self._meta.paged.get(slots)
        taken = slots < cache.used[self._seat]
        entry, age = meta[:, ENTRY].long(), -meta[:, STAMP].long()
        oldest = torch.where(taken, age, torch.iinfo(torch.int64).max)
        rank = torch.empty_like(slots)
        rank[torch.argsort(oldest, stable=True)] = slots
        keep = taken & (rank < rows)
        target = _homes(keep, rows)
        moves = target >= 0
        changed = (taken & ~keep) | moves
        place = self._map.paged.locate(torch.where(taken, entry, 0))
        put(cache.maps[..., None], torch.where(changed, place, -1), target.int()[:, None])
        put(cache.meta, torch.where(moves, self._meta.paged.locate(target), -1), meta)
        where = torch.where(moves, self.locate(target), -1)
        self._tables.ops.arena_to_arena(cache.records, self.locate(slots), where)
        self._rows.resize(rows)
        self._meta.resize(rows)
        self._set_form(rows, full=False)
        cache.used[self._seat].clamp_(max=rows)
        if rows:
            cache.hand[self._seat].remainder_(rows)

    def _become_full(self, committed: int, load: Load) -> None:
        """Promotion: all rows come from the host into place. The map is left absent, unused."""
        self._frames.require(self.frames_for(self.max_entries) - self.num_frames, self._rows.owner)
        self._clear_map(0)
        self._rows.resize(0)
        self._meta.resize(0)
        self._rows.resize(self.room)
        self._set_form(self.max_entries, full=True)
        entries = arange(committed, self.device)
        load(entries, self.locate(entries))

    def _leave_full(self, rows: int, committed: int, recent: Tensor | None) -> None:
        """Release: the entries selected last stay, then the newest, as far as ``rows`` go."""
        allowed = self._frames.free + self._rows.num_frames
        while rows and self.layout.hot_frames(rows, False) > allowed:
            rows = max(0, rows - self.layout.record.per_frame)
        entries = keep_order(recent, committed, rows, self.device)
        records = self._rows.paged.get(entries)
        self._rows.resize(0)
        self._set_form(0, full=False)
        self._start_anew()
        self._grow(rows)
        if rows and entries.numel():
            self._tables.cache.used[self._seat].fill_(entries.numel())
            slots = arange(entries.numel(), self.device)
            stamps = torch.zeros_like(slots)
            if recent is not None:
                stamps[torch.isin(entries, recent)] = 1
            self._place(entries, slots, stamps)
            self._rows.paged.put(slots, records)

    def seed(self, entries: Tensor, load: Load, step: int) -> None:
        """Make ``entries`` (distinct, at most ``capacity``) the content of a mapped cache."""
        self._clear_map(0)
        slots = arange(entries.numel(), self.device)
        self._tables.cache.used[self._seat].fill_(entries.numel())
        self._place(entries, slots, torch.full_like(slots, stamp_of(step, hit=False)))
        load(entries, self.locate(slots))

    def release(self) -> None:
        """Give all hot frames back (the map table is the caller's)."""
        self._rows.resize(0)
        self._meta.resize(0)
        self._set_form(0, full=False)

    # --- helpers -------------------------------------------------------------------------------

    def _set_form(self, capacity: int, full: bool) -> None:
        self.capacity, self.full = capacity, full
        self._tables.set_form(self._seat, capacity, full)
        if not capacity or full:
            for number in (self._tables.cache.hand, self._tables.cache.used):
                number[self._seat].zero_()

    def _start_anew(self) -> None:
        """What evictions keep between calls is as at the start."""
        cache, start = self._tables.cache, SweepState()
        cache.draws[self._seat].fill_(start.draws)
        cache.age[self._seat].fill_(start.age)

    def _column(self, index: int) -> Paged:
        return self._meta.column(index)

    def _clear_map(self, start: int) -> None:
        """Mark the entries from ``start`` on absent."""
        entries = torch.arange(start, self.room, device=self.device)
        if entries.numel():
            self._map.paged.put(entries, torch.full_like(entries, ABSENT))

    def _place(self, entries: Tensor, slots: Tensor, stamps: Tensor) -> None:
        """Publish entries at slots (both distinct); the rows are copied by the caller."""
        if entries.numel():
            self._map.paged.put(entries, slots)
            self._set_meta(slots, entries, stamps)

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
            if self._rows.items != self.room or not bool(self._tables.cache.full[self._seat]):
                raise IntegrityError(f"{where}: full, but not with room for {self.room} entries")
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
        if self._map.items != self.room:
            raise IntegrityError(
                f"{where}: a map of {self._map.items} entries, room for {self.room}"
            )
        tables, seat = self._tables.cache, self._seat
        if int(tables.capacity[seat]) != self.capacity or bool(tables.full[seat]):
            raise IntegrityError(f"{where}: kernels see another capacity")
        slot_of = self._map.paged.get(arange(self.room, self.device)).long()
        entries = (slot_of != ABSENT).nonzero()[:, 0]
        if entries.numel() and int(entries[-1]) >= committed:
            raise IntegrityError(f"{where}: entry {int(entries[-1])} is hot before it is committed")
        slots = arange(self.capacity, self.device)
        held = slots[: int(tables.used[seat])]
        entry_of = self._column(ENTRY).get(slots).long()
        if not torch.equal(slot_of[entries].sort().values, held):
            raise IntegrityError(f"{where}: map and slots disagree on which slots are taken")
        if not torch.equal(slot_of[entry_of[held]], held):
            raise IntegrityError(f"{where}: slot -> entry -> slot is not the identity")
        return held, entry_of[held]


def _homes(keep: Tensor, rows: int) -> Tensor:
    """Where kept slots from ``rows`` on go: the free ones below, in order. keep: bool [cap], as many below
    and above. Returns int64 [cap], ABSENT for slots that stay or go."""
    slots = arange(keep.numel(), keep.device)
    free = (slots < rows) & ~keep
    nth = torch.cumsum(free, 0) - 1
    homes = torch.zeros(keep.numel() + 1, dtype=torch.int64, device=keep.device)
    homes[torch.where(free, nth, keep.numel())] = slots
    moves = keep & (slots >= rows)
    return torch.where(moves, homes[(torch.cumsum(moves, 0) - 1).clamp_min(0)], ABSENT)


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
