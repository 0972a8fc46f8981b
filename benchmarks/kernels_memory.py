"""Which cut of resolve and fetch into programs is fastest, by batch: for who changes these kernels.

    python -P benchmarks/kernels_memory.py [--batches 1,16,128] [--output FILE]

Needs a GPU, and up to 35 GB of host memory. The stores are those of `kvpolicy bench kernels --only memory`,
which measures the cut that ships; this tries others, and two launches against one, each checked first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from kvpolicy.bench.stores import RULE, StoreCase, Stores, host_pattern
from kvpolicy.bench.timing import Stopwatch
from kvpolicy.kernels.triton.retrieve import Shape, resolve_rows, retrieve
from kvpolicy.telemetry.record import run_record

CONTEXT, TOPK = 100_352, 2048
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


@dataclass
class Sweep:
    """Results so far. best: the fastest cut of resolve, by batch."""

    watch: Stopwatch
    results: list[dict[str, object]]
    best: dict[int, Shape]

    def time(self, what: str, stores: Stores, call: Callable[..., object], shape: Shape) -> float:
        """One variant; one that fails says so and does not end the run."""
        case = stores.case
        try:
            if what != "resolve" and case.per_mille:
                stores.check(partial(call, shape=shape))
            us = stores.time(lambda s, c: call(s, stores.rows, c, RULE, shape=shape), self.watch)
        except Exception as error:  # whatever a variant meets, the others are still of use
            print(f"{what} {shape}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            return float("inf")
        self.results.append({"what": what, **asdict(case), "us": us, "shape": asdict(shape)})
        rate = f"{case.missed_bytes / us / 1e3:5.1f} GB/s" if what != "resolve" else ""
        print(
            f"{what:8} batch {case.batch:3}  {case.layers} x {case.row} B, {case.rows} rows, "
            f"{case.per_mille / 10:g} % missing  {us:8.2f} us {rate}  {shape}",
            flush=True,
        )
        return us

    def run(self, case: StoreCase, host: torch.Tensor) -> None:
        """All cuts of resolve where they matter, then with the best of them those of fetch."""
        stores = Stores(case, host, self.watch.device)
        wide = case.layers > 1
        cuts = [Shape(*cut[:3], 32, 0, tile=cut[3]) for cut in RESOLVE[case.batch]]
        if not (wide and case.rows == 2 * TOPK) and case.batch in self.best:
            cuts = [self.best[case.batch]]
        timed = [(self.time("resolve", stores, resolve_only, cut), i) for i, cut in enumerate(cuts)]
        cut = self.best[case.batch] = cuts[min(timed)[1]]
        fetches = (FETCH if wide else SINGLE)[case.batch]
        for programs, rows, warps in fetches if case.per_mille else fetches[:1]:
            shape = replace(cut, programs=programs, rows=rows, fetch_warps=warps)
            self.time("retrieve", stores, retrieve, shape)
            self.time("fused", stores, retrieve, replace(shape, fused=True))


def resolve_only(store, rows, chosen, rule, shape):  # type: ignore[no-untyped-def]
    """The first of two launches."""
    return resolve_rows(store, rows, chosen, rule, True, False, shape)


def main() -> None:
    """Print a line per case and variant."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="1,16,128")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda")
    cases = []
    for batch in map(int, options.batches.split(",")):
        states = 64 if batch == 1 else 32 if batch == 16 else 16
        base = StoreCase(batch, 4, 656, 2 * TOPK, TOPK, CONTEXT, states=states)
        cases += [base, replace(base, per_mille=0), replace(base, per_mille=0, rows=4 * TOPK)]
        cases += [replace(base, layers=1, row=1152), replace(base, layers=1)]
    buffer = host_pattern(int(max(case.host_words for case in cases) * 1.04) + (1 << 22), device)
    sweep = Sweep(Stopwatch(device, 5), [], {})
    for case in cases:
        sweep.run(case, buffer.bytes.view(torch.int32))
        torch.cuda.empty_cache()
        if options.output is not None:
            record = run_record({}, "cuda", "triton")
            text = json.dumps({"results": sweep.results, "record": record}, indent=1)
            options.output.write_text(text + "\n")
    buffer.close()


if __name__ == "__main__":
    main()
