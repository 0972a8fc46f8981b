"""The selection process in Triton: one launch for all rows (see ``kernels/selection_process.py``).

One program draws BLOCK entries of one row, each from a few hashes; the tables (10 KiB) stay in cache.

Bytes to move: 8 per entry chosen, written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..selection_process import BIN as _BIN
from ..selection_process import DRAW as _DRAW
from ..selection_process import DRIFT as _DRIFT
from ..selection_process import EPOCH as _EPOCH
from ..selection_process import MIX_1 as _MIX_1
from ..selection_process import MIX_2 as _MIX_2
from ..selection_process import RANKS as _RANKS
from ..selection_process import REQUEST as _REQUEST
from ..selection_process import RESOLUTION as _RESOLUTION
from ..selection_process import SELECTOR as _SELECTOR
from ..selection_process import SPREAD_1 as _SPREAD_1
from ..selection_process import SPREAD_2 as _SPREAD_2
from ..selection_process import ProcessTables, mix_int, window_of
from .launch import blocks, power_of_two

BIN, DRAW, DRIFT, EPOCH = (tl.constexpr(x) for x in (_BIN, _DRAW, _DRIFT, _EPOCH))
MIX_1, MIX_2, REQUEST, SELECTOR = (tl.constexpr(x) for x in (_MIX_1, _MIX_2, _REQUEST, _SELECTOR))
RANKS, RESOLUTION = tl.constexpr(_RANKS), tl.constexpr(_RESOLUTION)
SPREAD_1, SPREAD_2 = tl.constexpr(_SPREAD_1), tl.constexpr(_SPREAD_2)
LIMIT = tl.constexpr(2 << _RESOLUTION)
BLOCK = 1024


@triton.jit
def _mix(x):
    """As ``mix``; x: uint32 block, wraps."""
    x = (x ^ (x >> 16)) * tl.full([], MIX_1, tl.uint32)
    x = (x ^ (x >> 13)) * tl.full([], MIX_2, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _epoch(time, shift, key):
    """As ``epoch_of``; all uint32 blocks."""
    turn = time >> shift
    one = tl.full([], 1, tl.uint32)
    cut = _mix(key ^ (turn * tl.full([], EPOCH, tl.uint32))) & ((one << shift) - one)
    inside = time - (turn << shift)
    return turn + (inside >= cut).to(tl.uint32)


@triton.jit(do_not_specialize=["k", "seed", "selector", "window"])
def _select_kernel(
    shifts: tl.tensor,
    ranks: tl.tensor,
    drifts: tl.tensor,
    requests: tl.tensor,
    visible: tl.tensor,
    chosen: tl.tensor,
    k: tl.tensor,
    seed: tl.tensor,
    selector: tl.tensor,
    window: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    zero = tl.zeros([BLOCK], tl.uint32)
    seen = tl.load(visible + row)
    time = zero + seen.to(tl.uint32)
    own = (zero + tl.load(requests + row).to(tl.uint32)) * tl.full([], REQUEST, tl.uint32)
    own += (zero + selector.to(tl.uint32)) * tl.full([], SELECTOR, tl.uint32)
    own = _mix(own ^ seed.to(tl.uint32))
    key = _mix(own ^ ((j + 1).to(tl.uint32) * tl.full([], BIN, tl.uint32)))
    bin = j.to(tl.uint32)
    kind = (bin * tl.full([], SPREAD_1, tl.uint32) + own) >> 24
    shift = tl.load(shifts + kind.to(tl.int32)).to(tl.uint32)
    epoch = _epoch(time + (key >> 8 & 0xFFFF), shift, key)
    draw = _mix(key ^ (epoch * tl.full([], DRAW, tl.uint32)))
    rank = tl.load(ranks + (draw & (RANKS - 1)).to(tl.int32))
    salt = tl.full([], DRIFT, tl.uint32)
    kind = (bin * tl.full([], SPREAD_2, tl.uint32) + own) >> 24
    drift = tl.load(drifts + kind.to(tl.int32)).to(tl.uint32)
    order = _epoch(time + (key >> 12 & 0xFFFFF), drift, key ^ salt)
    turn = _mix(key ^ (order * salt))
    bins = k - window
    some = tl.maximum(bins, 1).to(tl.int64)
    history = seen - window
    step = tl.full([], 1, tl.int64)
    limit = tl.full([], LIMIT, tl.int64)
    for _ in tl.static_range(31 - RESOLUTION - 1):
        step = tl.where(history >= limit, limit >> RESOLUTION, step)
        limit = limit * 2
    covered = tl.maximum(tl.maximum(history, 0) // step * step, some)
    start = j.to(tl.int64) * covered // some
    size = tl.maximum((j.to(tl.int64) + 1) * covered // some - start, 1)
    old = start + (rank + turn.to(tl.int64)) % size
    entry = tl.where(j < bins, old, seen - k + j)
    few = tl.where(j < seen, j.to(tl.int64), -1)
    tl.store(chosen + row * k + j, tl.where(seen > k, entry, few), mask=j < k)


def select(
    tables: ProcessTables, seed: int, requests: Tensor, selector: int, visible: Tensor, k: int
) -> Tensor:
    """As :func:`kvpolicy.kernels.selection_process.select`."""
    chosen = torch.empty(visible.shape[0], k, dtype=torch.int64, device=visible.device)
    if not chosen.numel():
        return chosen
    block = min(BLOCK, power_of_two(k))
    _select_kernel[(visible.shape[0], blocks(k, block))](
        tables.shifts,
        tables.ranks,
        tables.drifts,
        requests.contiguous(),
        visible.contiguous(),
        chosen,
        k,
        mix_int(seed),
        selector,
        window_of(k, tables.window),
        BLOCK=block,
    )
    return chosen
