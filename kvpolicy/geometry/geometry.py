"""What a model keeps per token and who reads it, as validated data (no torch, no weights).

Three things stay apart, because in some models they differ:

* `RowStore`: whose rows are kept together. One host record is one entry's rows of all its layers.
* `Selector`: who chooses. One top-k per query row, read by one or more layers; several selectors
  may read one store.
* `Pinned`: rows that are always resident, never chosen (sliding window, heavily compressed rows).

An *entry* is what a selector chooses: `tokens_per_entry` tokens, visible once the last of them is
committed. All sizes are payload bytes; draft models are not part of a geometry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from kvpolicy.errors import unknown_name
from kvpolicy.geometry.parts import (
    INDEX_DTYPES,
    KV_DTYPES,
    IndexDtype,
    KvBytes,
    KvDtype,
    Pinned,
    RowFormat,
    RowStore,
    Selector,
    check_positive,
    paired_index_dtype,
    require,
)

__all__ = [
    "INDEX_DTYPES",
    "KV_DTYPES",
    "Geometry",
    "IndexDtype",
    "KvBytes",
    "KvDtype",
    "Pinned",
    "RowFormat",
    "RowStore",
    "Selector",
    "paired_index_dtype",
]


@dataclass(frozen=True, slots=True)
class Geometry:
    """One model's KV geometry. Lookups scan short tuples: resolve them once, outside the step."""

    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    max_context: int  # tokens
    stores: tuple[RowStore, ...]
    selectors: tuple[Selector, ...]
    pinned: tuple[Pinned, ...] = ()
    source: str = ""
    notes: str = ""

    def __post_init__(self) -> None:
        check_positive(
            f"geometry {self.name!r}",
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            num_heads=self.num_heads,
            max_context=self.max_context,
        )
        require(len(self.stores) > 0, f"geometry {self.name!r} has no row store")
        self._check_names()
        self._check_layers_in_range()
        self._check_formats_agree()
        for selector in self.selectors:
            self._check_selector(selector)
        self._check_ownership()
        self._check_readers()

    # --- consistency between the parts -----------------------------------------------------------

    def _check_names(self) -> None:
        kinds = {
            "store": [s.name for s in self.stores],
            "selector": [s.name for s in self.selectors],
            "pinned": [p.name for p in self.pinned],
        }
        for kind, names in kinds.items():
            twice = [name for name, n in Counter(names).items() if n > 1]
            require(not twice, f"{kind} name {', '.join(twice)} is used twice: names are unique")

    def _check_layers_in_range(self) -> None:
        parts = [(f"store {s.name!r}", s.layers) for s in self.stores]
        parts += [(f"selector {s.name!r}", s.reader_layers) for s in self.selectors]
        parts += [(f"pinned {p.name!r}", p.layers) for p in self.pinned]
        for owner, layers in parts:
            require(
                layers[-1] < self.num_layers,
                f"{owner} names layer {layers[-1]}: layers are 0 to {self.num_layers - 1}",
            )

    def _check_formats_agree(self) -> None:
        rows = [(s.name, s.row_formats, self.kv_dtypes) for s in self.stores]
        rows += [(p.name, p.row_formats, self.kv_dtypes) for p in self.pinned]
        keys = [(s.name, s.index_formats, self.index_dtypes) for s in self.stores]
        for name, formats, shared in rows + keys:
            own = [f.name for f in formats]
            require(
                set(own) == set(shared),
                f"{name!r} has formats {', '.join(own)}: all parts share those of the first store, "
                f"{', '.join(shared)}",
            )

    def _check_selector(self, selector: Selector) -> None:
        store, owner = self.store(selector.store), f"selector {selector.name!r}"
        require(
            selector.index_head_dim == store.index_key_width,
            f"{owner}.index_head_dim is {selector.index_head_dim}: the index keys of store "
            f"{store.name!r} have {store.index_key_width} values",
        )
        require(
            selector.source_layer >= store.layers[0],
            f"{owner} chooses at layer {selector.source_layer}: the index keys of store "
            f"{store.name!r} exist from layer {store.layers[0]} on",
        )
        strangers = [n for n in selector.reader_layers if n not in store.layers]
        require(
            store.n_layers == 1 or not strangers,
            f"{owner} is read by layers {strangers} without a row in store {store.name!r}: only a "
            "store of one layer has readers besides its own layers",
        )

    def _check_ownership(self) -> None:
        owners = Counter(layer for store in self.stores for layer in store.layers)
        twice = sorted(layer for layer, n in owners.items() if n > 1)
        require(not twice, f"layers {twice} have rows in two stores: a layer has rows in one")
        for store in self.stores:
            read = {n for s in self.selectors_of(store.name) for n in s.reader_layers}
            unread = [layer for layer in store.layers if layer not in read]
            require(
                not unread,
                f"store {store.name!r} keeps rows of layers {unread} that no selector reads",
            )

    def _check_readers(self) -> None:
        readers = Counter(n for s in self.selectors for n in s.reader_layers)
        twice = sorted(layer for layer, n in readers.items() if n > 1)
        require(not twice, f"layers {twice} read two selectors: a layer reads at most one")
        covered = set(readers) | {layer for p in self.pinned for layer in p.layers}
        bare = [layer for layer in range(self.num_layers) if layer not in covered]
        require(not bare, f"layers {bare} read nothing: each needs a selector or pinned rows")

    # --- who is who ------------------------------------------------------------------------------

    @property
    def kv_dtypes(self) -> tuple[str, ...]:
        """Row formats that every store and pinned set of this model has."""
        return tuple(f.name for f in self.stores[0].row_formats)

    @property
    def index_dtypes(self) -> tuple[str, ...]:
        return tuple(f.name for f in self.stores[0].index_formats)

    def store(self, name: str) -> RowStore:
        for store in self.stores:
            if store.name == name:
                return store
        raise unknown_name("store", name, (s.name for s in self.stores))

    def selectors_of(self, store: str) -> tuple[Selector, ...]:
        """The selectors that read a store, in layer order as declared."""
        return tuple(s for s in self.selectors if s.store == store)

    def selector_of_layer(self, layer: int) -> Selector | None:
        """The selection that a layer attends; None for a layer with pinned rows only."""
        self._check_layer(layer)
        return next((s for s in self.selectors if layer in s.reader_layers), None)

    def store_of_layer(self, layer: int) -> RowStore | None:
        """The store whose rows a layer attends; None for a layer with pinned rows only."""
        selector = self.selector_of_layer(layer)
        return None if selector is None else self.store(selector.store)

    def row_of_layer(self, layer: int) -> int | None:
        """Which row of its store's record a layer attends: its own, or the owner's only one."""
        store = self.store_of_layer(layer)
        if store is None:
            return None
        return store.layers.index(layer) if layer in store.layers else 0

    def _check_layer(self, layer: int) -> None:
        require(
            0 <= layer < self.num_layers, f"layer is {layer}: allowed 0 to {self.num_layers - 1}"
        )

    # --- bytes -----------------------------------------------------------------------------------

    def record_bytes(self, store: str, kv_dtype: str) -> int:
        return self.store(store).record_bytes(kv_dtype)

    def kv_bytes_per_token(
        self, kv_dtype: str, index_dtype: str | None = None
    ) -> KvBytes[Fraction]:
        """Growth per token of context, exact; fixed windows do not grow and are not in it."""
        index = index_dtype or paired_index_dtype(kv_dtype)
        return KvBytes(
            rows=_sum(Fraction(s.record_bytes(kv_dtype), s.tokens_per_entry) for s in self.stores),
            index=_sum(Fraction(s.index_key_bytes(index), s.tokens_per_entry) for s in self.stores),
            pinned=_sum(
                Fraction(p.bytes_per_row(kv_dtype), p.tokens_per_row)
                for p in self.pinned
                if p.rows_per_request is None
            ),
        )

    def kv_bytes(self, tokens: int, kv_dtype: str, index_dtype: str | None = None) -> KvBytes[int]:
        """One request's whole KV at `tokens` of context: complete entries, pinned rows included."""
        require(tokens >= 0, f"tokens is {tokens}: needs an integer >= 0")
        index = index_dtype or paired_index_dtype(kv_dtype)
        return KvBytes(
            rows=sum(s.entries(tokens) * s.record_bytes(kv_dtype) for s in self.stores),
            index=sum(s.entries(tokens) * s.index_key_bytes(index) for s in self.stores),
            pinned=sum(p.bytes(tokens, kv_dtype) for p in self.pinned),
        )

    def fixed_bytes(self, kv_dtype: str) -> int:
        """Bytes of fixed windows per request, whatever its length."""
        return sum(p.bytes(0, kv_dtype) for p in self.pinned)

    def selected_bytes_per_token(self, kv_dtype: str) -> int:
        """Fetch volume of one decoded token if every selected row came from the host.

        Every selection counts in full, also where two selectors of one store share entries.
        """
        return sum(s.topk * self.record_bytes(s.store, kv_dtype) for s in self.selectors)

    # --- derived ---------------------------------------------------------------------------------

    def slice(self, num_layers: int) -> Geometry:
        """The first `num_layers` layers. Stores and selectors are cut at the edge, or dropped."""
        least = min(s.layers[0] for s in self.stores) + 1
        require(
            least <= num_layers <= self.num_layers,
            f"layers is {num_layers}: {self.name} allows {least} to {self.num_layers}",
        )
        if num_layers == self.num_layers:
            return self

        def cut(layers: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(n for n in layers if n < num_layers)

        return replace(
            self,
            name=f"{self.name.partition('[:')[0]}[:{num_layers}]",
            num_layers=num_layers,
            stores=tuple(replace(s, layers=cut(s.layers)) for s in self.stores if cut(s.layers)),
            selectors=tuple(
                replace(s, reader_layers=cut(s.reader_layers))
                for s in self.selectors
                if cut(s.reader_layers)
            ),
            pinned=tuple(replace(p, layers=cut(p.layers)) for p in self.pinned if cut(p.layers)),
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, formats as {dtype: bytes}."""
        return {
            "name": self.name,
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "num_heads": self.num_heads,
            "max_context": self.max_context,
            "stores": [s.to_dict() for s in self.stores],
            "selectors": [s.to_dict() for s in self.selectors],
            "pinned": [p.to_dict() for p in self.pinned],
            "source": self.source,
            "notes": self.notes,
        }


def _sum(values: Iterable[Fraction]) -> Fraction:
    return sum(values, Fraction(0))
