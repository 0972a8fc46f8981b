"""Time of one resolve call by cache size, rule and misses: 16 requests, top-k 128, on a GPU.

    python -P benchmarks/resolve_time.py

Launches from Python, one after the other, so a call takes at least what a launch takes (40 to 50 us).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.geometry.presets import preset
from kvpolicy.kernels.eviction import RULES
from kvpolicy.kernels.triton.resolve import resolve_batch
from kvpolicy.memory.arena import Arena, Table
from kvpolicy.memory.hot_cache import HotCache
from kvpolicy.memory.layout import Layout
from kvpolicy.memory.tables import StoreTables

SEATS, ENTRIES, TOPK, CALLS, WARM = 16, 20_000, 128, 50, 10
CAPACITIES, MISSES = (256, 4096, 16_000), (0, 2, 18)


def no_copy(entries: Tensor, locations: Tensor) -> None:
    """Rows are not read here."""


def selections(capacity: int, misses: int, device: torch.device) -> list[Tensor]:
    """Random selections with this many entries that the cache does not hold: int64 [seats, k] each."""
    first = ENTRIES - capacity  # the cache holds the newest
    found = []
    for _ in range(WARM + CALLS):
        hits = torch.randperm(capacity - 10, device=device)[: TOPK - misses] + first + 5
        others = torch.randperm(first - 10, device=device)[:misses]
        found.append(torch.cat([others, hits]).sort().values.expand(SEATS, -1).contiguous())
    return found


def main() -> None:
    """Print one line per case."""
    torch.manual_seed(0)
    device = torch.device("cuda")
    layout = Layout(preset("tiny-dsa"), "float32")
    store = layout.stores[2]
    arena = Arena(1 << 30, layout.frame_bytes, device)
    tables = StoreTables(arena, store, SEATS, ENTRIES)
    seats = torch.arange(SEATS, device=device)
    admit = torch.ones(SEATS, dtype=torch.bool, device=device)
    for capacity in CAPACITIES:
        caches = []
        for seat in range(SEATS):
            name = (seat, capacity)
            maps = Table(arena, store.slot_map, ("map", *name), tables.cache.map_frames[seat])
            maps.resize(ENTRIES)
            cache = HotCache(arena, tables, seat, maps, ENTRIES, ENTRIES, name)
            cache.resize(capacity, ENTRIES, no_copy)
            cache.seed(torch.arange(capacity, device=device) + ENTRIES - capacity, no_copy, 1)
            caches.append((cache, maps))
        for rule in ("clock", "lru"):
            for misses in MISSES:
                wanted = selections(capacity, misses, device)
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                for i, one in enumerate(wanted):
                    if i == WARM:
                        begin.record()
                    resolve_batch(tables.cache, seats, one, admit, RULES[rule], 100 + i)
                end.record()
                torch.cuda.synchronize()
                us = begin.elapsed_time(end) / CALLS * 1e3
                print(
                    f"{capacity:6} slots  {rule:5}  {misses:2} misses  {us:7.1f} us a call",
                    flush=True,
                )
        for cache, maps in caches:
            cache.release()
            maps.resize(0)


if __name__ == "__main__":
    main()
