"""What a model sees of the memory during one step, and what both kinds of step do alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor

from kvpolicy.errors import IntegrityError
from kvpolicy.geometry.geometry import Selector
from kvpolicy.kernels.indexer import KeyPages
from kvpolicy.kernels.paging import scatter
from kvpolicy.memory.layout import Layout, StoreLayout
from kvpolicy.memory.segments import Wave
from kvpolicy.memory.tables import SharedTables, StoreTables


class StepAccess(ABC):
    """One step of n rows, in tensors only, no number that the host would have to know.

    :class:`kvpolicy.memory.step.StepMemory` serves segments that the host knows row by row,
    :class:`kvpolicy.memory.decode.DecodeStep` one row of each request.
    """

    def __init__(self, layout: Layout, tables: SharedTables) -> None:
        self.layout = layout
        self.tables = tables
        self._selection: dict[str, Tensor] = {}

    # --- the rows --------------------------------------------------------------------------------

    @property
    @abstractmethod
    def positions(self) -> Tensor:
        """Position of every row in its request: int64 [n], on the device."""

    @property
    @abstractmethod
    def seats(self) -> Tensor:
        """Seat of every row's request, negative for padding: int64 [n]."""

    @property
    def row_segment(self) -> Tensor:
        """Which row of ``key_pages`` every row reads, its seat (padding reads another's): int64 [n]."""
        return self.seats

    @property
    def request_numbers(self) -> Tensor:
        """Number of the request of every row (of padding any): int64 [n]."""
        return self.tables.requests[self.seats]

    @abstractmethod
    def write_rows(self, layer: int, rows: Tensor) -> None:
        """Put this step's rows of one layer in flight. rows: [n, width]."""

    @abstractmethod
    def write_keys(self, layer: int, keys: Tensor) -> None:
        """Index keys of this step's rows that complete an entry, for the store that owns ``layer``'s rows.
        keys: [n, width]."""

    def _put_in_flight(self, store: StoreLayout, layer: int, where: Tensor, rows: Tensor) -> None:
        """rows: [n, width] as the store keeps them; where: locations of the in-flight records."""
        records = self._tables_of(store).cache.records
        scatter(records[..., store.store.layers.index(layer), :], where, rows)

    # --- selection -------------------------------------------------------------------------------

    def visible(self, selector: Selector) -> Tensor:
        """Entries that each row may choose from: int64 [n]; a row sees its own when it completes one."""
        return (self.positions + 1) // self.layout.of(selector).store.tokens_per_entry

    @abstractmethod
    def most_visible(self, selector: Selector) -> int:
        """No row sees more entries."""

    def key_pages(self, selector: Selector) -> KeyPages:
        """The index keys of all seats, where they lie."""
        return self._tables_of(self.layout.of(selector)).keys

    def select(self, selector: Selector, selection: Tensor) -> None:
        """Publish the top-k of every row: int64 [n, k], ascending, -1 after the last one."""
        if selector.name in self._selection:
            raise IntegrityError(f"selector {selector.name!r} chose twice in one step")
        self._selection[selector.name] = selection
        seats, chosen = self._last_rows(selection)
        self._tables_of(self.layout.of(selector)).note_selected(selector, seats, chosen)

    @abstractmethod
    def _last_rows(self, selection: Tensor) -> tuple[Tensor, Tensor]:
        """Of each request its seat and what its last row chose: int64 [requests], [requests, k]."""

    def selection(self, selector: Selector) -> Tensor:
        """What was published: int64 [n, k]."""
        return self._selection[selector.name]

    # --- retrieval -------------------------------------------------------------------------------

    @abstractmethod
    def waves(self, selector: Selector) -> Iterator[Wave]:
        """The rows' selected records, in waves that fit staging; use each wave before the next."""

    def row_view(self, layer: int) -> Tensor:
        """The arena read as rows that one layer attends: [F, per, width], strided."""
        records = self._tables_of(self.layout.read_by(layer)).cache.records
        return self.layout.row_view(layer, records)

    def _tables_of(self, store: StoreLayout) -> StoreTables:
        return self.tables.stores[store.index]
