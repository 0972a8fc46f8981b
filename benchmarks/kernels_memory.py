"""Retrieval and publishing of a decode step at true size, part by part, on one GPU.

    python -P benchmarks/kernels_memory.py [--batches 1,16,128] [--output FILE]

Contexts of 100,352 entries, top-k 2048, ascending selections drawn uniformly (a hit is drawn from the
cache, a miss from the rest), a layer state per call, so that nothing of it is in the second-level cache from
the call before at batch 128. Times are per call inside a CUDA graph, medians of replays; all state is put
back before each. Beside them what SGLang 0.5.23's swap-in kernel took on the same kind of machine
(`load_cache_to_device_buffer_kernel`, 960 threads, same selections; it moves the same records).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from operator import itemgetter

import torch
from torch import Tensor

from kvpolicy.kernels.eviction import CLOCK_SPARE_STEPS, RULES
from kvpolicy.kernels.resolve import CacheTables
from kvpolicy.kernels.retrieve import DecodeRows, StoreMemory
from kvpolicy.kernels.triton.publish import publish
from kvpolicy.kernels.triton.retrieve import Shape, resolve_rows, retrieve
from kvpolicy.memory.pinning import PinnedBuffer

CONTEXT, TOPK, STEP = 100_352, 2048, 1000
FRAME = 1 << 15
RULE = RULES["clock"]
# us per call by (layers, row bytes, batch, cache rows, misses per thousand), one H200, PCIe 5 x16.
SGLANG = {
    (1, 656, 1, 4096, 0): 18.5, (1, 656, 16, 4096, 0): 18.1, (1, 656, 128, 4096, 0): 25.8,
    (1, 656, 1, 8192, 0): 27.2, (1, 656, 16, 8192, 0): 33.3, (1, 656, 128, 8192, 0): 37.5,
    (1, 656, 1, 4096, 140): 52.9, (1, 656, 16, 4096, 140): 123.3, (1, 656, 128, 4096, 140): 1053.2,
    (1, 1152, 1, 4096, 140): 54.1, (1, 1152, 16, 4096, 140): 131.6, (1, 1152, 128, 4096, 140): 1156.4,
    (4, 656, 1, 4096, 140): 85.9, (4, 656, 16, 4096, 140): 531.0, (4, 656, 128, 4096, 140): 4639.0,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """layers: of a record. row: bytes of a row. rows: capacity of a cache. per_mille: misses. runs: what is
    cached and hit comes in runs of so many consecutive entries."""

    batch: int
    layers: int = 4
    row: int = 656
    rows: int = 4096
    per_mille: int = 140
    runs: int = 1

    @property
    def words(self) -> int:
        return self.layers * self.row // 4

    @property
    def misses(self) -> int:
        return round(TOPK * self.per_mille / 1000)

    @property
    def states(self) -> int:
        """Layer states in one graph."""
        return 64 if self.batch == 1 else 32 if self.batch == 16 else 16

    @property
    def sglang(self) -> float | None:
        return SGLANG.get((self.layers, self.row, self.batch, self.rows, self.per_mille))


def spread(first: int, count: int, batch: int, device: torch.device) -> Tensor:
    """Frames of tables that lie one after the other: int64 [batch, count]."""
    return torch.arange(first, first + batch * count, device=device).view(batch, count)


def make_store(case: Case, host: Tensor, shift: int, device: torch.device) -> StoreMemory:
    """One layer state: caches full of random entries with random ages."""
    batch, words = case.batch, case.words
    per_row, per_map, per_meta = FRAME // (words * 4), FRAME // 4, FRAME // 8
    frames = [
        -(-n // per) for n, per in ((case.rows, per_row), (CONTEXT, per_map), (case.rows, per_meta))
    ]
    staging, flying = -(-batch * TOPK // per_row), -(-batch // per_row)
    total = batch * frames[0] + staging + flying
    arena = torch.empty((total, FRAME // 4), dtype=torch.int32, device=device)
    records = arena[:, : per_row * words].view(total, per_row, case.layers, case.row // 4)
    maps = torch.empty((batch * frames[1], per_map), dtype=torch.int32, device=device)
    meta = torch.empty((batch * frames[2], per_meta, 2), dtype=torch.int32, device=device)
    runs = torch.rand((batch, CONTEXT // case.runs), device=device).argsort(1)[
        :, : case.rows // case.runs
    ]
    inside = torch.arange(case.runs, device=device)
    held = (runs[..., None] * case.runs + inside).flatten(1).int()
    maps.fill_(-1)
    slots = torch.arange(case.rows, dtype=torch.int32, device=device).expand(batch, -1)
    maps.view(batch, -1).scatter_(1, held.long(), slots)
    ages = torch.empty(held.shape, device=device).exponential_(1 / 5).int() + 1
    meta.view(batch, -1, 2)[:, : case.rows, 0] = held
    meta.view(batch, -1, 2)[:, : case.rows, 1] = 2 * (STEP - ages)
    zeros = torch.zeros(batch, dtype=torch.int32, device=device)
    span = CONTEXT * words
    bases = torch.arange(batch, device=device) * span + shift
    cache = CacheTables(
        records, maps, meta, spread(0, frames[0], batch, device), spread(0, frames[1], batch, device),
        spread(0, frames[2], batch, device), zeros + case.rows, zeros.bool(), zeros + case.rows,
        torch.randint(0, case.rows, (batch,), dtype=torch.int32, device=device), zeros.clone(),
        zeros + CLOCK_SPARE_STEPS,
    )  # fmt: skip
    first = batch * frames[0]
    return StoreMemory(
        cache, torch.zeros((batch, 8, 33), dtype=torch.int32, device=device),
        torch.arange(batch, device=device)[:, None].expand(-1, CONTEXT // 8).contiguous(), host, bases,
        bases.clone(), torch.arange(first, first + staging, device=device), batch * TOPK,
        torch.arange(first + staging, total, device=device),
        torch.zeros((batch, 6), dtype=torch.int64, device=device),
        torch.zeros(batch + 2, dtype=torch.int64, device=device), case.layers,
    )  # fmt: skip


def selection(case: Case, store: StoreMemory) -> Tensor:
    """Ascending entries, so many of them missing: int32 [batch, k]."""
    slot = store.cache.maps.view(case.batch, -1)[:, :CONTEXT]
    first = slot[:, :: case.runs]
    draw = torch.rand(first.shape, device=slot.device)
    count = (TOPK - case.misses) // case.runs
    hits = torch.where(first >= 0, draw, 2.0).argsort(1)[:, :count, None] * case.runs
    hits = (hits + torch.arange(case.runs, device=slot.device)).flatten(1)
    draw = torch.rand(slot.shape, device=slot.device)
    missing = torch.where(slot < 0, draw, 2.0).argsort(1)[:, : case.misses]
    return torch.cat([hits, missing], 1).sort(1).values.int()


class Bench:
    """The layer states of one case, their selections, and how to put them back."""

    def __init__(self, case: Case, host: Tensor, device: torch.device) -> None:
        self.case = case
        slack = host.numel() - case.batch * CONTEXT * case.words
        step = slack // max(1, case.states) // 4 * 4
        self.stores = [make_store(case, host, i * step, device) for i in range(case.states)]
        self.chosen = [selection(case, store) for store in self.stores]
        kept = ("maps", "meta", "hand", "draws", "age", "used")
        self.saved = [{n: getattr(s.cache, n).clone() for n in kept} for s in self.stores]
        batch = case.batch
        self.rows = DecodeRows(
            torch.arange(batch, device=device),
            torch.full((batch,), CONTEXT, device=device),
            torch.tensor([STEP + 1], device=device),
            torch.ones(batch, dtype=torch.bool, device=device),
        )

    def reset(self) -> None:
        for store, saved in zip(self.stores, self.saved, strict=True):
            for name, value in saved.items():
                getattr(store.cache, name).copy_(value)

    def time(self, call: Callable[[StoreMemory, Tensor], object], replays: int = 5) -> float:
        """Median us of one call."""
        self.reset()
        for store, chosen in zip(self.stores[:2], self.chosen, strict=False):
            call(store, chosen)
        torch.cuda.synchronize()
        self.reset()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for store, chosen in zip(self.stores, self.chosen, strict=True):
                call(store, chosen)
        found = []
        for _ in range(replays):
            self.reset()
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) * 1e3 / len(self.stores))
        return statistics.median(found)

    def retrieve(self, shape: Shape) -> float:
        return self.time(lambda s, c: retrieve(s, self.rows, c, RULE, shape=shape))

    def resolve(self, shape: Shape) -> float:
        return self.time(lambda s, c: resolve_rows(s, self.rows, c, RULE, True, False, shape))

    def resident(self, shape: Shape) -> float:
        """Every cache as if it were full: frames come again and again, locations are not used."""
        frames = self.stores[0].cache.row_frames
        turn = torch.arange(CONTEXT, device=frames.device) % frames.shape[1]
        wide = [
            replace(s, cache=replace(s.cache, row_frames=s.cache.row_frames[:, turn]))
            for s in self.stores
        ]
        stores = dict(zip(map(id, self.stores), wide, strict=True))
        return self.time(
            lambda s, c: resolve_rows(stores[id(s)], self.rows, c, RULE, True, True, shape)
        )

    def publish(self, _shape: Shape) -> float:
        accepted = torch.ones_like(self.rows.seat)
        back = replace(self.rows, committed=self.rows.committed - 1)
        return self.time(lambda s, c: publish(s, back, accepted, RULE))

    def check(self, shape: Shape) -> None:
        """Bytes of every selected record of two states against the host."""
        self.reset()
        for store, chosen in list(zip(self.stores, self.chosen, strict=True))[:2]:
            store.cache.records.zero_()
            hit = store.cache.maps.view(self.case.batch, -1)[:, :CONTEXT].gather(1, chosen.long())
            location = retrieve(store, self.rows, chosen, RULE, shape=shape)
            per = store.cache.records.shape[1]
            flat = store.cache.records.flatten(2)
            where = location.long()[hit < 0]
            found = flat[where // per, where % per]
            home = (store.row_base[:, None] + chosen.long() * self.case.words)[hit < 0]
            sample = torch.randperm(home.numel())[:2000]
            at = home.cpu()[sample][:, None] + torch.arange(self.case.words)
            assert torch.equal(found.cpu()[sample], store.host[at]), "a fetched record is wrong"
            assert int(store.counts[:, 2].sum()) % (self.case.misses * self.case.batch) == 0


# The fastest cut of resolve so far, by batch.
BEST: dict[int, list[tuple[int, int, int, int]]] = {}
# Cuts to try: of resolve (parts, block, warps, tile), of fetch (programs, records at a time, warps).
RESOLVE = {
    1: [(8, 256, 8, 512), (8, 256, 8, 1024), (16, 128, 4, 512), (16, 128, 8, 512)],
    16: [(8, 256, 8, 512), (16, 128, 4, 512), (4, 512, 16, 512)],
    128: [(1, 2048, 16, 1024), (1, 2048, 16, 512), (2, 1024, 8, 512)],
}  # fmt: skip
FETCH = {
    1: [(132, 4, 4), (72, 4, 8), (36, 8, 8)],
    16: [(16, 4, 16), (132, 4, 4)],
    128: [(48, 4, 4), (16, 4, 16)],
}
SINGLE = {
    1: [(132, 4, 4), (32, 8, 4), (288, 1, 4)],
    16: [(132, 4, 4), (32, 8, 4), (32, 16, 8)],
    128: [(32, 16, 4), (16, 16, 16), (32, 16, 8)],
}


def pattern(words: int) -> Tensor:
    """Pinned host memory with a word pattern: int32 [words]."""
    start = time.perf_counter()
    buffer = PinnedBuffer(words * 4, True)
    host = buffer.bytes.view(torch.int32)
    pinned = time.perf_counter() - start
    noise = torch.randint(-(2**31), 2**31, (1 << 28,), dtype=torch.int32, device="cuda")
    for at in range(
        0, words, noise.numel()
    ):  # a GiB at a time: a copy must not cross what is registered
        part = host[at : at + noise.numel()]
        part.copy_(noise[: part.numel()] + at)
    print(f"host: {words * 4 / 2**30:.1f} GiB pinned in {pinned:.2f} s", flush=True)
    host.owner = buffer  # type: ignore[attr-defined]
    return host


def tell(results: list[dict[str, object]], what: str, case: Case, us: float, shape: Shape) -> None:
    """Keep a result and print its line."""
    line = {"what": what, **asdict(case), "us": round(us, 2), "sglang_us": case.sglang}
    results.append(line | {"shape": asdict(shape)})
    moved = case.batch * case.misses * case.words * 4
    rate = f"{moved / us / 1e3:5.1f} GB/s" if what in ("retrieve", "fused") and moved else ""
    beside = f"sglang {case.sglang}" if case.sglang else ""
    cut = (shape.parts, shape.block, shape.warps, shape.tile)
    fetch = (shape.programs, shape.rows, shape.fetch_warps) if "re" in what else ""
    miss = f"{case.per_mille / 10:4.1f}%" + (f" runs {case.runs}" if case.runs > 1 else "")
    print(
        f"{what:9} bs {case.batch:3} {case.layers} x {case.row:4} B {case.rows} miss {miss} "
        f"{us:8.2f} us {rate} {beside} {cut} {fetch}",
        flush=True,
    )


def attempt(
    results: list[dict[str, object]],
    what: str,
    bench: Bench,
    call: Callable[[Shape], float],
    shape: Shape,
) -> float:
    """One measurement; a variant that fails says so and does not end the run."""
    changed = {f.name: getattr(shape, f.name) for f in fields(shape)}
    try:
        us = call(shape)
    except Exception as error:  # whatever a variant meets, the others are still of use
        print(f"{what} {changed}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return float("inf")
    tell(results, what, bench.case, us, shape)
    return us


def run(case: Case, host: Tensor, device: torch.device, results: list[dict[str, object]]) -> None:
    """All variants of one case: resolve, then with the best of them retrieve by fetch shape, also fused."""
    bench = Bench(case, host, device)
    wide = case.layers > 1
    cuts = (
        RESOLVE[case.batch]
        if wide and case.runs == 1 and case.rows == 4096
        else BEST[case.batch][:1]
    )
    best = (float("inf"), Shape(*cuts[0][:3], 32, 0, tile=cuts[0][3]))
    for parts, block, warps, tile in cuts:
        shape = Shape(parts, block, warps, 32, 0, tile=tile)
        best = min(
            best,
            (attempt(results, "resolve", bench, bench.resolve, shape), shape),
            key=itemgetter(0),
        )
    cut = best[1]
    BEST[case.batch] = [(cut.parts, cut.block, cut.warps, cut.tile)]
    fetches = FETCH[case.batch] if wide else SINGLE[case.batch]
    if not case.per_mille:
        fetches = fetches[:1]
        if case.rows == 4096 and case.runs == 1:
            attempt(results, "resident", bench, bench.resident, cut)
            attempt(results, "publish", bench, bench.publish, cut)
    for programs, rows, warps in fetches:
        shape = replace(cut, programs=programs, rows=rows, fetch_warps=warps)
        attempt(results, "retrieve", bench, bench.retrieve, shape)
        attempt(results, "fused", bench, bench.retrieve, replace(shape, fused=True))
    shape = replace(cut, programs=fetches[0][0], rows=fetches[0][1], fetch_warps=fetches[0][2])
    if case.per_mille:
        bench.check(shape)
        bench.check(replace(shape, fused=True))


def main() -> None:
    """Print a line per case and variant."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", default="1,16,128")
    parser.add_argument("--output")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda")
    batches = [int(b) for b in options.batches.split(",")]
    largest = max(batches)
    host = pattern(int(largest * CONTEXT * 656 * 1.04) + (16 << 20))
    results: list[dict[str, object]] = []
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    block = torch.empty(1 << 28, dtype=torch.int32, device=device)
    for _ in range(2):
        begin.record()
        block.copy_(host[: 1 << 28], non_blocking=True)
        end.record()
        torch.cuda.synchronize()
    print(f"pinned copy {block.numel() * 4 / begin.elapsed_time(end) / 1e6:.1f} GB/s", flush=True)
    del block
    start = time.perf_counter()
    cases = [Case(b) for b in batches] + [Case(b, per_mille=0) for b in batches]
    cases += [Case(b, per_mille=0, rows=8192) for b in batches]
    cases += [Case(b, per_mille=0, runs=8) for b in batches]
    cases += [Case(b, layers=1, row=1152) for b in batches]
    cases += [Case(b, layers=1) for b in batches]
    for case in cases:
        run(case, host, device, results)
        torch.cuda.empty_cache()
        print(f"--- {time.perf_counter() - start:.0f} s", flush=True)
        if options.output:
            with open(options.output, "w") as file:
                json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
