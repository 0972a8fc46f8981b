"""A selection process: which entries a query row of a long context chooses, without a model.

Models with dummy weights select at random, which no cache can serve. This draws selections whose
reuse looks like a trained model's instead (``benchmarks/fit_selection_process.py`` fits it to published
miss curves; docs/selection-sources.md).

A selection of k entries is the newest ``window`` ones and one entry from each of k - window equal
*bins* of the older history, so it is ascending and without repeats by construction. Each bin goes
through *epochs*: it keeps its entry for an epoch, whose mean length 2**shift is the bin's own, and ends
it at a random step; then it draws anew among the bin's entries, some far more popular than others.
Which are popular drifts: every 2**drift steps on average, another number of the bin's own, the order
of popularity is another.

Everything is a hash (32-bit integers) of (seed, request, selector, bin, entries visible): no state, so a
selection does not depend on batch, order or preemption, and is the same on every device. The hash is
the finaliser of MurmurHash3 (Austin Appleby, public domain), the Weyl constants are Knuth's and
Steele's odd multipliers.

Bytes to move: 8 per entry chosen, written once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
MIX_1, MIX_2 = 0x85EBCA6B, 0xC2B2AE35
REQUEST, SELECTOR, BIN = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
EPOCH, DRAW, DRIFT = 0x27D4EB2F, 0x165667B1, 0x2C1B3C6D
# Powers of 1 / 1.3247 (Roberts 2018): multiples of the two fill a square evenly. So every request has the
# same share of bins of every kind, and its miss rate is that of all.
SPREAD_1, SPREAD_2 = 0xC13FA9A9, 0x91E10DA5
# The history that bins cover grows in steps of 1/16 to 1/32 of the context, so that an entry stays in
# its bin: at 100K all bins move once in 4,096 tokens, and until then the newest that have left the
# window are in none.
RESOLUTION = 4
SHIFTS, RANKS = 256, 1024
"""Sizes of the tables: a byte finds a bin's shift or drift, ten bits a rank."""


@dataclass(frozen=True, slots=True)
class ProcessTables:
    """What the process is fitted by, on one device.

    shifts: int64 [SHIFTS], the epochs' log2 lengths. ranks: int64 [RANKS], popularity ranks of draws,
    taken modulo the bin's entries. drifts: int64 [SHIFTS], log2 of steps between two orders of
    popularity. window: part of k that the newest entries take, in 1/1024.
    """

    shifts: Tensor
    ranks: Tensor
    drifts: Tensor
    window: int


def mix(x: Tensor) -> Tensor:
    """A well mixed 32-bit number from each (int64 holding values below 2**32)."""
    x = (x ^ (x >> 16)) * MIX_1 & MASK
    x = (x ^ (x >> 13)) * MIX_2 & MASK
    return x ^ (x >> 16)


def window_of(k: int, part: int) -> int:
    """Newest entries in every selection of k, at least the row's own."""
    return min(k, max(1, k * part >> 10))


def epoch_of(time: Tensor, shift: Tensor, key: Tensor) -> Tensor:
    """Number of the epoch that ``time`` is in. One ends in every 2**shift steps, at a step drawn from
    the key: lengths are between 1 and twice that. All int64, equal shapes."""
    turn = time >> shift
    cut = mix(key ^ (turn * EPOCH & MASK)) & ((1 << shift) - 1)
    inside = time - (turn << shift)
    return turn + (inside >= cut) & MASK


def select(
    tables: ProcessTables, seed: int, requests: Tensor, selector: int, visible: Tensor, k: int
) -> Tensor:
    """Selections of n rows: int64 [n, k], ascending, -1 after the last one where a row sees fewer.

    requests: int64 [n], a number of each row's request. visible: int64 [n], entries it sees, its own
    the last. seed, selector: small integers. Raises nothing; k >= 1.
    """
    window = window_of(k, tables.window)
    bins = k - window
    j = torch.arange(k, device=visible.device)
    seen = visible[:, None]
    own = mix((requests * REQUEST + selector * SELECTOR & MASK) ^ mix_int(seed))
    key = mix(own[:, None] ^ ((j + 1) * BIN & MASK))
    shift = tables.shifts[(j * SPREAD_1 + own[:, None] & MASK) >> 24]
    epoch = epoch_of(seen + (key >> 8 & 0xFFFF), shift, key)
    draw = mix(key ^ (epoch * DRAW & MASK))
    rank = tables.ranks[draw & (RANKS - 1)]
    drift = tables.drifts[(j * SPREAD_2 + own[:, None] & MASK) >> 24]
    order = epoch_of(seen + (key >> 12 & 0xFFFFF), drift, key ^ DRIFT)
    turn = mix(key ^ (order * DRIFT & MASK))
    covered = covered_of(seen - window, max(bins, 1))
    start = j * covered // max(bins, 1)
    size = ((j + 1) * covered // max(bins, 1) - start).clamp_min(1)
    old = start + (rank + turn) % size
    new = seen - k + j
    chosen = torch.where(j < bins, old, new)
    few = torch.where(j < seen, j, -1)
    return torch.where(seen > k, chosen, few)


def covered_of(history: Tensor, bins: int) -> Tensor:
    """How much of the history bins cover: rounded down to RESOLUTION leading bits, at least ``bins``."""
    step = torch.ones_like(history)
    # The exponent by comparison: the same integer on every device.
    for bit in range(RESOLUTION + 1, 31):
        step = torch.where(
            history >= 1 << bit, torch.full_like(step, 1 << (bit - RESOLUTION)), step
        )
    return torch.maximum(history.clamp_min(0) // step * step, torch.full_like(history, bins))


def mix_int(x: int) -> int:
    """:func:`mix` of one number (its low 32 bits)."""
    x &= MASK
    x = (x ^ (x >> 16)) * MIX_1 & MASK
    x = (x ^ (x >> 13)) * MIX_2 & MASK
    return x ^ (x >> 16)
