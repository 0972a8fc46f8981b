"""Record copies in Triton. The host side is pinned memory that the kernels read and write in place.

Host reads go through registers: staged through shared memory (cp.async, TMA) they reach half the
rate of the link. Hence while loops, which Triton does not pipeline.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..copy import alignment, check_host, words_of

# 32 programs x 16 records of 656 B keep about 500 rows in flight: fewer starve a PCIe 5 link, more
# thrash its address translation. They also leave 100 SMs of an H200 to what runs beside them.
HOST_PROGRAMS = 32
ARENA_PROGRAMS = 264
WARPS = 4
# Words of one tile (32 registers a thread), of one piece of a record, and most records of a tile.
TILE_WORDS, PIECE_WORDS, MOST_ROWS = 4096, 2048, 16


@triton.jit
def word_at(at, PER: tl.constexpr, FRAME: tl.constexpr, RECORD: tl.constexpr):
    """First word of records. PER > 0: ``at`` are locations in frames of FRAME words, records RECORD
    words apart. PER = 0: ``at`` are positions, multiples of RECORD; to divide and multiply tells the
    compiler so, which may then move 16 bytes at a time."""
    if PER == 0:
        word = at // RECORD * RECORD
    else:
        word = at // PER * FRAME + at % PER * RECORD
    return word


@triton.jit(do_not_specialize=["count"])
def _copy(
    source,
    source_at,
    target,
    target_at,
    count,
    SOURCE_PER: tl.constexpr,
    SOURCE_FRAME: tl.constexpr,
    SOURCE_RECORD: tl.constexpr,
    TARGET_PER: tl.constexpr,
    TARGET_FRAME: tl.constexpr,
    TARGET_RECORD: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Each program takes every num_programs-th group of ROWS list entries."""
    column = tl.arange(0, PIECE)
    start = tl.program_id(0) * ROWS
    while start < count:
        item = start + tl.arange(0, ROWS)
        listed = item < count
        come = tl.load(source_at + item, mask=listed, other=-1)
        go = tl.load(target_at + item, mask=listed, other=-1)
        moves = (come >= 0) & (go >= 0)
        come = word_at(come, SOURCE_PER, SOURCE_FRAME, SOURCE_RECORD)
        go = word_at(go, TARGET_PER, TARGET_FRAME, TARGET_RECORD)
        for piece in tl.static_range(PIECES):
            word = piece * PIECE + column
            mask = moves[:, None] & (word < WORDS)[None, :]
            value = tl.load(source + come[:, None] + word[None, :], mask=mask)
            tl.store(target + go[:, None] + word[None, :], value, mask=mask)
        start += tl.num_programs(0) * ROWS


# How the records of one side lie: per, frame, record as in word_at.
Side = tuple[int, int, int]


def arena_side(words: Tensor) -> Side:
    """Records of an arena view, as words [F, per, width]."""
    return words.shape[1], words.stride(0), words.stride(1)


def host_side(width: int) -> Side:
    """Records of ``width`` words in the host pool."""
    return 0, 0, alignment(width)


def plan(source: Side, target: Side, width: int) -> dict[str, int]:
    """Constants of a copy of records of ``width`` words."""
    piece = min(triton.next_power_of_2(width), PIECE_WORDS)
    names = ("PER", "FRAME", "RECORD")
    constants = {f"SOURCE_{name}": value for name, value in zip(names, source, strict=True)}
    constants |= {f"TARGET_{name}": value for name, value in zip(names, target, strict=True)}
    rows = min(TILE_WORDS // piece, MOST_ROWS)
    return constants | {
        "WORDS": width,
        "ROWS": rows,
        "PIECE": piece,
        "PIECES": triton.cdiv(width, piece),
    }


def _launch(
    source: Tensor, come: Tensor, target: Tensor, go: Tensor, constants: dict[str, int], most: int
) -> None:
    """Copy the listed records with at most ``most`` programs."""
    count = come.numel()
    if count:
        kernel: Any = _copy
        programs = min(most, triton.cdiv(count, constants["ROWS"]))
        kernel[(programs,)](
            source, come.contiguous(), target, go.contiguous(), count, **constants, num_warps=WARPS
        )


def host_to_arena(host: Tensor, source: Tensor, view: Tensor, destination: Tensor) -> None:
    """See :func:`kvpolicy.kernels.copy.host_to_arena`. host: pinned; the lists: on the device.

    Positions are not read back to be checked: one off the alignment gives the words before it.
    """
    check_host(host)
    words = words_of(view)
    width = words.shape[2]
    constants = plan(host_side(width), arena_side(words), width)
    _launch(host, source, words, destination, constants, HOST_PROGRAMS)


def arena_to_host(view: Tensor, source: Tensor, host: Tensor, destination: Tensor) -> None:
    """See :func:`kvpolicy.kernels.copy.arena_to_host`; as :func:`host_to_arena`."""
    check_host(host)
    words = words_of(view)
    width = words.shape[2]
    constants = plan(arena_side(words), host_side(width), width)
    _launch(words, source, host, destination, constants, HOST_PROGRAMS)


def arena_to_arena(view: Tensor, source: Tensor, destination: Tensor) -> None:
    """See :func:`kvpolicy.kernels.copy.arena_to_arena`."""
    words = words_of(view)
    side = arena_side(words)
    constants = plan(side, side, words.shape[2])
    _launch(words, source, words, destination, constants, ARENA_PROGRAMS)


@triton.jit(do_not_specialize=["per"])
def _put(
    view, location, items, frame_stride, item_stride, per, width,
    PIECE: tl.constexpr,
):  # fmt: skip
    """One item per program, converted to the view's dtype."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.load(location + row)
    if at >= 0:
        target = view + at // per * frame_stride + at % per * item_stride
        start = 0
        while start < width:
            column = start + tl.arange(0, PIECE)
            mask = column < width
            value = tl.load(items + row * width + column, mask=mask)
            tl.store(target + column, value.to(view.dtype.element_ty), mask=mask)
            start += PIECE


def put(view: Tensor, location: Tensor, items: Tensor) -> None:
    """See :func:`kvpolicy.kernels.copy.put`. view: [F, per, width], its items contiguous."""
    count, width = items.shape
    if count:
        kernel: Any = _put
        piece = min(triton.next_power_of_2(width), PIECE_WORDS)
        kernel[(count,)](
            view,
            location.contiguous(),
            items.contiguous(),
            view.stride(0),
            view.stride(1),
            view.shape[1],
            width,
            PIECE=piece,
            num_warps=WARPS,
        )
