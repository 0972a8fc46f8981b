"""The parts of a geometry: row stores, selectors, pinned rows, and the formats they are kept in.

Sizes are bytes of payload, without allocator padding. Each part checks itself; what must hold
between parts is checked by `kvpolicy.geometry.geometry.Geometry`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any, Generic, Literal, TypeVar, get_args

from kvpolicy.errors import UserError, unknown_name

KvDtype = Literal["float32", "bf16", "fp8", "mxfp8", "fp4"]
"""How a KV row is stored. A quantised row includes its scales; the preset states its size."""
IndexDtype = Literal["float32", "bf16", "fp8", "fp4"]
"""How an index key is stored."""
KV_DTYPES: tuple[KvDtype, ...] = get_args(KvDtype)
INDEX_DTYPES: tuple[IndexDtype, ...] = get_args(IndexDtype)

N = TypeVar("N", int, Fraction)


def paired_index_dtype(kv_dtype: str) -> IndexDtype:
    """The index-key format that ships with a row format: the same one, and fp4 beside mxfp8."""
    if kv_dtype not in KV_DTYPES:
        raise unknown_name("kv_dtype", kv_dtype, KV_DTYPES)
    return "fp4" if kv_dtype == "mxfp8" else next(d for d in INDEX_DTYPES if d == kv_dtype)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def check_positive(owner: str, **fields: int) -> None:
    for field, value in fields.items():
        is_int = isinstance(value, int) and not isinstance(value, bool)
        require(is_int and value >= 1, f"{owner}.{field} is {value!r}: needs an integer >= 1")


def _check_layers(owner: str, field: str, layers: tuple[int, ...]) -> None:
    ok = len(layers) > 0 and layers[0] >= 0 and all(a < b for a, b in pairwise(layers))
    require(ok, f"{owner}.{field} is {layers}: needs ascending distinct layer numbers >= 0")


def _check_formats(owner: str, formats: tuple[RowFormat, ...], allowed: Iterable[str]) -> None:
    names = [f.name for f in formats]
    require(len(names) > 0, f"{owner} lists no format: needs at least one of {', '.join(allowed)}")
    require(len(set(names)) == len(names), f"{owner} lists a format twice: {', '.join(names)}")
    for name in names:
        if name not in allowed:
            raise unknown_name(f"format in {owner}", name, allowed)


def _format_bytes(formats: tuple[RowFormat, ...], kind: str, name: str) -> int:
    for row_format in formats:
        if row_format.name == name:
            return row_format.row_bytes
    raise unknown_name(kind, name, (f.name for f in formats))


def _by_name(formats: tuple[RowFormat, ...]) -> dict[str, int]:
    return {f.name: f.row_bytes for f in formats}


@dataclass(frozen=True, slots=True)
class RowFormat:
    """One stored row or index key: the dtype's name and its whole size in bytes, with scales."""

    name: str
    row_bytes: int

    def __post_init__(self) -> None:
        check_positive(f"format {self.name!r}", row_bytes=self.row_bytes)


@dataclass(frozen=True, slots=True)
class KvBytes(Generic[N]):
    """Bytes of one request's KV: int at a context length, exact Fraction as a rate per token."""

    rows: N
    index: N
    pinned: N

    @property
    def total(self) -> N:
        return self.rows + self.index + self.pinned


@dataclass(frozen=True, slots=True)
class RowStore:
    """Rows kept together. `layers` own a row each per entry; the first also owns the index key.

    latent_width: leading values of a row that 8-bit MLA rows keep as codes; 0 where rows are others.
    """

    name: str
    layers: tuple[int, ...]
    row_width: int  # values per row
    row_formats: tuple[RowFormat, ...]
    index_key_width: int  # values per index key
    index_formats: tuple[RowFormat, ...]
    tokens_per_entry: int = 1
    latent_width: int = 0

    def __post_init__(self) -> None:
        owner = f"store {self.name!r}"
        _check_layers(owner, "layers", self.layers)
        check_positive(
            owner,
            row_width=self.row_width,
            index_key_width=self.index_key_width,
            tokens_per_entry=self.tokens_per_entry,
        )
        _check_formats(f"{owner}.row_formats", self.row_formats, KV_DTYPES)
        _check_formats(f"{owner}.index_formats", self.index_formats, INDEX_DTYPES)

    @property
    def n_layers(self) -> int:
        """Rows in one record."""
        return len(self.layers)

    def entries(self, tokens: int) -> int:
        """Complete, hence visible, entries of a context of `tokens` committed tokens."""
        return tokens // self.tokens_per_entry

    def row_bytes(self, kv_dtype: str) -> int:
        """Bytes of one row of one layer."""
        return _format_bytes(self.row_formats, "kv_dtype", kv_dtype)

    def record_bytes(self, kv_dtype: str) -> int:
        """Bytes of one host record: the rows of all layers for one entry."""
        return self.n_layers * self.row_bytes(kv_dtype)

    def index_key_bytes(self, index_dtype: str) -> int:
        """Bytes of one entry's index key (one per store, whatever the number of selectors)."""
        return _format_bytes(self.index_formats, "index_dtype", index_dtype)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "layers": list(self.layers),
            "row_width": self.row_width,
            "row_bytes": _by_name(self.row_formats),
            "index_key_width": self.index_key_width,
            "index_key_bytes": _by_name(self.index_formats),
            "tokens_per_entry": self.tokens_per_entry,
        }


@dataclass(frozen=True, slots=True)
class Selector:
    """A top-k over one store's index keys: computed at `source_layer`, used by `reader_layers`."""

    name: str
    store: str
    source_layer: int
    reader_layers: tuple[int, ...]
    topk: int  # entries chosen per query row
    index_heads: int
    index_head_dim: int

    def __post_init__(self) -> None:
        owner = f"selector {self.name!r}"
        _check_layers(owner, "reader_layers", self.reader_layers)
        check_positive(
            owner, topk=self.topk, index_heads=self.index_heads, index_head_dim=self.index_head_dim
        )
        require(
            self.source_layer == self.reader_layers[0],
            f"{owner}.source_layer is {self.source_layer}: must be the first of its reader_layers "
            f"{self.reader_layers}",
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "store": self.store,
            "source_layer": self.source_layer,
            "reader_layers": list(self.reader_layers),
            "topk": self.topk,
            "index_heads": self.index_heads,
            "index_head_dim": self.index_head_dim,
        }


@dataclass(frozen=True, slots=True)
class Pinned:
    """Rows on the device for as long as their request runs, in each of `layers`.

    `rows_per_request` is a fixed window, allocated whole. None means one row for every
    `tokens_per_row` tokens, growing with the context.
    """

    name: str
    layers: tuple[int, ...]
    row_formats: tuple[RowFormat, ...]
    rows_per_request: int | None = None
    tokens_per_row: int = 1

    def __post_init__(self) -> None:
        owner = f"pinned {self.name!r}"
        _check_layers(owner, "layers", self.layers)
        check_positive(owner, tokens_per_row=self.tokens_per_row)
        if self.rows_per_request is not None:
            check_positive(owner, rows_per_request=self.rows_per_request)
        _check_formats(f"{owner}.row_formats", self.row_formats, KV_DTYPES)

    def rows(self, tokens: int) -> int:
        """Rows per layer that a context of `tokens` holds."""
        window = self.rows_per_request
        return tokens // self.tokens_per_row if window is None else window

    def bytes(self, tokens: int, kv_dtype: str) -> int:
        return self.rows(tokens) * self.bytes_per_row(kv_dtype)

    def bytes_per_row(self, kv_dtype: str) -> int:
        """Bytes of one row in all layers."""
        return len(self.layers) * _format_bytes(self.row_formats, "kv_dtype", kv_dtype)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "layers": list(self.layers),
            "row_bytes": _by_name(self.row_formats),
            "rows_per_request": self.rows_per_request,
            "tokens_per_row": self.tokens_per_row,
        }
