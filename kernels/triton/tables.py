"""How kernels read the tables of :class:`kvpolicy.kernels.resolve.CacheTables`, tile by tile."""

from __future__ import annotations

import triton
import triton.language as tl

from ..resolve import ABSENT as _ABSENT
from ..resolve import PAD as _PAD

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
