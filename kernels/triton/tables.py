"""How kernels read the tables of :class:`kvpolicy.kernels.resolve.CacheTables`, tile by tile."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..resolve import ABSENT as _ABSENT
from ..resolve import PAD as _PAD
from ..resolve import CacheTables

ABSENT = tl.constexpr(_ABSENT)
PAD = tl.constexpr(_PAD)
# An entry of a slot that the current call wants, while victims are chosen: free is -1, wanted -2.
WANTED = tl.constexpr(-2)
# A location that is still to be found: the record is missing.
MISS = tl.constexpr(-2)


@triton.jit
def word_of(frames, index, mask, PER: tl.constexpr, FRAME: tl.constexpr, ITEM: tl.constexpr):
    """Word offsets (int64) of items of ITEM words in a table whose arena frames are FRAME apart."""
    frame = tl.load(frames + index // PER, mask=mask, other=0)
    return frame * FRAME + index % PER * ITEM


@triton.jit
def location_of(frames, index, mask, PER: tl.constexpr):
    """Arena locations (int64) of items."""
    return word_of(frames, index, mask, PER, PER, 1)


@triton.jit
def is_entry(entry):
    """Whether a wanted number is an entry: negative numbers and PAD are none."""
    return (entry >= 0) & (entry != PAD)


@triton.jit
def slot_tile(
    meta, meta_frames, start, capacity, PER: tl.constexpr, FRAME: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Slots, their entries (WANTED past the end: neither free nor a candidate), their stamps.

    Read past the first-level cache: other threads of the program have just written some of them.
    """
    slot = start + tl.arange(0, BLOCK)
    inside = slot < capacity
    at = word_of(meta_frames, slot, inside, PER, FRAME, 2)
    entry = tl.load(meta + at, mask=inside, other=WANTED, cache_modifier=".cg")
    stamp = tl.load(meta + at + 1, mask=inside, other=0, cache_modifier=".cg")
    return slot, entry, stamp


def check_tables(tables: CacheTables) -> None:
    """ValueError unless maps, metadata and frames lie as the kernels address them."""
    if tables.maps.stride(1) != 1 or tables.meta.stride()[1:] != (2, 1):
        raise ValueError(
            f"maps of strides {tables.maps.stride()}, meta of strides {tables.meta.stride()}: the "
            "items of a frame must be contiguous"
        )
    for name in ("row_frames", "map_frames", "meta_frames"):
        frames: Tensor = getattr(tables, name)
        if frames.stride(1) != 1:
            raise ValueError(f"{name} of strides {frames.stride()}: a seat's must be contiguous")


def table_arguments(tables: CacheTables) -> tuple[Tensor, ...]:
    """The tables in the order of the kernels' first arguments."""
    return (
        tables.maps, tables.meta, tables.row_frames, tables.map_frames, tables.meta_frames,
        tables.capacity, tables.full.view(torch.uint8), tables.used, tables.hand, tables.draws,
        tables.age,
    )  # fmt: skip


def table_strides(tables: CacheTables) -> tuple[int, int, int]:
    """From one seat to the next in the tables of frames of rows, maps and metadata."""
    frames = (tables.row_frames, tables.map_frames, tables.meta_frames)
    return frames[0].stride(0), frames[1].stride(0), frames[2].stride(0)


def table_constants(tables: CacheTables) -> dict[str, int]:
    """How the tables' items lie in frames."""
    return {
        "PER_ROW": tables.records.shape[1],
        "PER_MAP": tables.maps.shape[1],
        "MAP_FRAME": tables.maps.stride(0),
        "PER_META": tables.meta.shape[1],
        "META_FRAME": tables.meta.stride(0),
    }
