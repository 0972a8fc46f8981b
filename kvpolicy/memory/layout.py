"""How a geometry's rows, keys and maps lie in frames: item shapes, dtypes, and frame arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvpolicy.errors import UserError
from kvpolicy.geometry.geometry import Geometry, Pinned, RowStore, Selector, paired_index_dtype
from kvpolicy.kernels import fp8

TORCH_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.uint8}
"""What rows and keys are stored as; 8-bit ones are records of bytes (``kernels/fp8.py``)."""
# Two int32 per hot slot: the entry in it and the stamp of its last use.
META_WIDTH = 2
# A frame holds at least this many of the widest record: the unused tail of a frame (less than one
# record) then stays under 1/12 of it.
RECORDS_PER_FRAME = 12
SMALLEST_FRAME = 4096
# Records are copied in words of this many bytes.
WORD = 4


@dataclass(frozen=True, slots=True)
class Item:
    """One kind of item of a table: its shape and dtype, and how many fit a frame."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    per_frame: int

    @property
    def bytes(self) -> int:
        """Payload bytes of one item."""
        return _item_bytes(self.shape, self.dtype)

    @property
    def words(self) -> int:
        """Payload in words of four bytes."""
        return self.bytes // WORD

    def frames(self, items: int) -> int:
        """Frames that a table of ``items`` items takes."""
        return -(-items // self.per_frame)


def _item_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count * dtype.itemsize


@dataclass(frozen=True, slots=True)
class StoreLayout:
    """One row store: records [layers, width], index keys [width], map and slot metadata.

    A width counts values, of 8-bit rows and keys bytes. latent: of 8-bit rows the values that are
    codes, 0 for other formats.
    """

    store: RowStore
    index: int
    record: Item
    key: Item
    slot_map: Item
    meta: Item
    latent: int = 0

    def hot_frames(self, rows: int, full: bool) -> int:
        """Frames of a hot cache of ``rows`` records; a full one is the identity and has no metadata."""
        return self.record.frames(rows) + (0 if full else self.meta.frames(rows))


@dataclass(frozen=True, slots=True)
class PinnedLayout:
    """One pinned set: a ring of records [layers, width] per request."""

    pinned: Pinned
    record: Item
    rows: int


@dataclass(frozen=True, slots=True)
class RingShape:
    """What a drafter keeps of a request: ``rows`` rows, each ``width`` numbers (float32) of one of its
    last committed tokens."""

    rows: int
    width: int


@dataclass(frozen=True, slots=True)
class RingLayout:
    """A draft ring in frames. A row lies in ``parts`` items, since it may be wider than a frame; the
    last of them may have unused numbers at its end."""

    shape: RingShape
    item: Item
    parts: int

    @property
    def items(self) -> int:
        """Items of one request's ring."""
        return self.shape.rows * self.parts

    @property
    def frames(self) -> int:
        """Frames of one request's ring, whatever its context."""
        return self.item.frames(self.items)

    @property
    def host_bytes(self) -> int:
        """Bytes that it takes on the host while its request is preempted."""
        return self.items * self.item.bytes


class Layout:
    """All item layouts of one geometry in one KV dtype.

    frame_bytes: size of a frame. stores, pinned: in the geometry's order. ring: of the drafter, None
    without one or for one that keeps nothing.
    """

    def __init__(self, geometry: Geometry, kv_dtype: str, ring: RingShape | None = None) -> None:
        allowed = allowed_kv_dtypes(geometry)
        if kv_dtype in TORCH_DTYPES and kv_dtype not in allowed:
            raise UserError(
                f"kv_dtype = {kv_dtype!r}: {geometry.name} has no rows of {fp8.GROUP} latent values to a "
                f"scale, or a multiple; allowed: {', '.join(allowed)}"
            )
        if kv_dtype not in TORCH_DTYPES:
            raise UserError(f"kv_dtype = {kv_dtype!r}: this backend has {', '.join(allowed)}")
        self.geometry = geometry
        self.kv_dtype = kv_dtype
        self.dtype = TORCH_DTYPES[kv_dtype]
        self.key_dtype = TORCH_DTYPES[paired_index_dtype(kv_dtype)]
        widest = max(store.record_bytes(kv_dtype) for store in geometry.stores)
        windows = (pinned.bytes_per_row(kv_dtype) for pinned in geometry.pinned)
        least = max(SMALLEST_FRAME, RECORDS_PER_FRAME * widest, *windows)
        self.frame_bytes = SMALLEST_FRAME
        while self.frame_bytes < least:
            self.frame_bytes *= 2
        self.stores = tuple(self._store(i, store) for i, store in enumerate(geometry.stores))
        self.pinned = tuple(self._pinned(pinned) for pinned in geometry.pinned)
        self._by_name = {layout.store.name: layout for layout in self.stores}
        self.ring = self._ring(ring) if ring and ring.rows and ring.width else None
        self.topk = max(selector.topk for selector in geometry.selectors)
        for item in (item for s in self.stores for item in (s.record, s.key)):
            if item.bytes % WORD:
                raise UserError(
                    f"kv_dtype = {kv_dtype!r}: records of {item.bytes} bytes are no whole words"
                )

    def of(self, selector: Selector) -> StoreLayout:
        """The layout of the store that a selector reads."""
        return self._by_name[selector.store]

    def owner(self, layer: int) -> StoreLayout:
        """The store that holds a layer's rows. ValueError if it owns none."""
        for store in self.stores:
            if layer in store.store.layers:
                return store
        raise ValueError(f"layer {layer} owns no rows")

    def read_by(self, layer: int) -> StoreLayout:
        """The store that a layer attends. ValueError if it reads none."""
        selector = self.geometry.selector_of_layer(layer)
        if selector is None:
            raise ValueError(f"layer {layer} reads no store")
        return self.of(selector)

    def row_view(self, layer: int, records: torch.Tensor) -> torch.Tensor:
        """Of an arena view of records, the row that a layer attends: [F, per, width], strided."""
        at = self.geometry.row_of_layer(layer)
        return records[..., at, :]

    def item(self, shape: tuple[int, ...], dtype: torch.dtype) -> Item:
        """An item kind of this arena. ValueError if one item exceeds a frame."""
        per_frame = self.frame_bytes // _item_bytes(shape, dtype)
        if per_frame < 1:
            raise ValueError(
                f"an item of shape {shape} does not fit a frame of {self.frame_bytes} B"
            )
        return Item(shape, dtype, per_frame)

    def _store(self, index: int, store: RowStore) -> StoreLayout:
        eight_bit = self.kv_dtype == "fp8"
        width = store.row_bytes("fp8") if eight_bit else store.row_width
        key_width = store.index_key_bytes("fp8") if eight_bit else store.index_key_width
        return StoreLayout(
            store=store,
            index=index,
            record=self.item((store.n_layers, width), self.dtype),
            key=self.item((key_width,), self.key_dtype),
            slot_map=self.item((), torch.int32),
            meta=self.item((META_WIDTH,), torch.int32),
            latent=store.latent_width if eight_bit else 0,
        )

    def _ring(self, shape: RingShape) -> RingLayout:
        dtype = torch.float32
        parts = -(-shape.width * dtype.itemsize // self.frame_bytes)
        return RingLayout(shape, self.item((-(-shape.width // parts),), dtype), parts)

    def _pinned(self, pinned: Pinned) -> PinnedLayout:
        if pinned.rows_per_request is None:
            raise UserError(
                f"pinned {pinned.name!r} grows with the context: not in this backend yet"
            )
        width = pinned.bytes_per_row(self.kv_dtype) // len(pinned.layers) // self.dtype.itemsize
        item = self.item((len(pinned.layers), width), self.dtype)
        return PinnedLayout(pinned, item, pinned.rows_per_request)


def allowed_kv_dtypes(geometry: Geometry) -> tuple[str, ...]:
    """The row formats that the memory can keep for a model: 8-bit ones where its rows and keys are those
    of ``kernels/fp8.py``."""
    eight_bit = not geometry.pinned and all(map(_has_8_bit_rows, geometry.stores))
    return tuple(name for name in TORCH_DTYPES if name != "fp8" or eight_bit)


def _has_8_bit_rows(store: RowStore) -> bool:
    latent, key = store.latent_width, store.index_key_width
    if not latent or latent % fp8.GROUP or (store.row_width - latent) % 2 or key % WORD:
        return False
    row = fp8.row_bytes(latent, store.row_width - latent)
    formats = {f.name: f.row_bytes for f in store.row_formats}
    keys = {f.name: f.row_bytes for f in store.index_formats}
    return formats.get("fp8") == row and keys.get("fp8") == fp8.key_bytes(key)
