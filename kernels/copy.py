"""Copies of records between the host pool and the device arena, and inside the arena: flat lists.

A record is contiguous on both sides. On the host its *position* is the number of its first 4-byte
word in the whole pool; in the arena it is a location of the view (frame * per_frame + place).
Entries of a list with a negative source or destination are skipped, so that lists can keep their
shape from step to step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .paging import arange, gather, scatter

WORD = 4
# Host positions are multiples of this many words, or of the largest divisor that the record's own
# length shares with it: then 16-byte accesses are possible wherever the record allows them.
ALIGNED_WORDS = 4


def words_of(view: Tensor) -> Tensor:
    """An arena view [F, per, *item] read as int32 words: [F, per, words].

    ValueError if a record is not a whole number of words or not contiguous.
    """
    frames, per = view.shape[:2]
    items = math.prod(view.shape[2:])
    size = items * view.element_size()
    if size % WORD or not size:
        raise ValueError(f"a record of {size} bytes: must be a positive multiple of {WORD}")
    try:
        words = view.view(frames, per, items).view(torch.int32)
    except RuntimeError:
        words = None  # not contiguous, or off the grid of words
    if words is None or (words.shape[2] > 1 and words.stride(2) != 1):
        raise ValueError(
            f"records of strides {view.stride()} at offset {view.storage_offset()}: must be "
            f"contiguous and lie at multiples of {WORD} bytes"
        )
    return words


def alignment(words: int) -> int:
    """What host positions of records of ``words`` words must be multiples of."""
    return math.gcd(words, ALIGNED_WORDS)


def check_host(host: Tensor) -> None:
    """ValueError unless ``host`` is the pool as contiguous int32 words."""
    if host.dtype != torch.int32 or host.dim() != 1 or not host.is_contiguous():
        raise ValueError(
            f"host = {host.dtype} {list(host.shape)}: must be contiguous torch.int32 [words]"
        )


def host_to_arena(host: Tensor, source: Tensor, view: Tensor, destination: Tensor) -> None:
    """Copy records from host positions to arena locations.

    host: int32 [words]; source, destination: int64 [m], destinations distinct; view: arena view
    [F, per, *item]. ValueError for an item that is no multiple of 4 bytes or for a position off
    :func:`alignment`.
    """
    check_host(host)
    words = words_of(view)
    source, destination = _kept(source, destination)
    if source.numel():
        width = words.shape[2]
        at = _positions(source, width)
        records = host.unfold(0, width, 1)[at]
        scatter(words, destination.to(view.device), records.to(view.device))


def arena_to_host(view: Tensor, source: Tensor, host: Tensor, destination: Tensor) -> None:
    """Copy records from arena locations to host positions; see :func:`host_to_arena`."""
    check_host(host)
    words = words_of(view)
    source, destination = _kept(source, destination)
    if source.numel():
        width = words.shape[2]
        at = _positions(destination, width)
        host[at[:, None] + arange(width, host.device)] = gather(words, source.to(view.device)).cpu()


def arena_to_arena(view: Tensor, source: Tensor, destination: Tensor) -> None:
    """Copy records between locations of one view; no destination may also be a source."""
    words = words_of(view)
    source, destination = _kept(source, destination)
    if source.numel():
        scatter(words, destination, gather(words, source))


def put(view: Tensor, location: Tensor, items: Tensor) -> None:
    """Write items [n, *item] of any dtype at distinct locations, int64 [n]; negative ones are skipped."""
    kept = location >= 0
    scatter(view, location[kept], items[kept])


def _kept(source: Tensor, destination: Tensor) -> tuple[Tensor, Tensor]:
    kept = (source >= 0) & (destination >= 0)
    return source[kept], destination[kept]


def _positions(at: Tensor, width: int) -> Tensor:
    """Host positions on the host, checked."""
    at = at.cpu()
    wrong = at[at % alignment(width) != 0]
    if wrong.numel():
        raise ValueError(
            f"host position {int(wrong[0])}: must be a multiple of {alignment(width)} for records of "
            f"{width} words"
        )
    return at
