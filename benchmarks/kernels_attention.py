"""Sparse attention, the indexer and 8-bit records at true sizes, each beside the time of its bytes.

    python -P benchmarks/kernels_attention.py

Needs a GPU (about 8 GiB of its memory). Every case is captured in a CUDA graph of several calls over
different inputs, so that the cache holds none of them; the median of its replays counts. The floor of a
case is its bytes over the rate of a plain device copy, bytes read plus bytes written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from kvpolicy.kernels.indexer import KeyPages
from kvpolicy.kernels.triton import fp8
from kvpolicy.kernels.triton.indexer import index_top_k
from kvpolicy.kernels.triton.sparse_mla import sparse_mla

# GLM-5.3: latent and rotary values of a row, entries selected, index heads and their width.
LATENT, ROTARY, TOPK, INDEX_HEADS, INDEX_WIDTH = 512, 64, 2048, 32, 128
POOL_ROWS = 1 << 21  # 2.4 GB of bf16 rows: 40 times the L2 cache
FRAME = 1 << 16  # bytes of a frame of index keys


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement. bytes: what a call must move; calls: functions of no arguments, all alike
    but for their inputs."""

    name: str
    bytes: int
    calls: list[Callable[[], object]]


def graph_time(calls: list[Callable[[], object]], replays: int = 7) -> float:
    """Microseconds per call: median replay of a CUDA graph of all calls."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / len(calls))
    return median(times)


def copy_rate(size: int = 1 << 31) -> float:
    """Bytes per microsecond of a device copy of ``size`` bytes, read plus written.

    By a kernel: a copy in a graph becomes a node of its own kind, which is slower (2.8 against 4.3
    TB/s on an H200)."""
    source = torch.randn(size // 4, device="cuda")
    target = torch.empty_like(source)
    return 2 * size / graph_time([lambda: torch.neg(source, out=target)] * 3)


def row_pool(eight_bit: bool) -> Tensor:
    """Random rows [frames, 64, 576] bf16, or their records [frames, 64, 656] uint8."""
    torch.manual_seed(0)
    parts = []
    for _ in range(POOL_ROWS >> 18):
        rows = torch.randn(1 << 18, LATENT + ROTARY, device="cuda")
        parts.append(fp8.quantize_rows(rows, LATENT) if eight_bit else rows.bfloat16())
    return torch.cat(parts).view(POOL_ROWS // 64, 64, -1)


def attention(pool: Tensor, n: int, heads: int, calls: int) -> Case:
    """n query rows over 2,048 rows each, drawn anew for each call. Bytes: the rows selected."""
    valid = torch.ones(n, TOPK, dtype=torch.bool, device="cuda")
    scale = (LATENT + ROTARY) ** -0.5

    def call() -> Callable[[], object]:
        chosen = torch.randint(0, POOL_ROWS, (n, TOPK), device="cuda").sort(dim=1).values
        query = torch.randn(n, heads, LATENT + ROTARY, device="cuda").bfloat16()
        return lambda: sparse_mla(query, pool, chosen, valid, LATENT, scale)

    size = pool.shape[2] * pool.element_size()
    name = f"attention {size} B rows, {heads} heads, batch {n}"
    return Case(name, n * TOPK * size, [call() for _ in range(calls)])


def key_pool(n: int, context: int, eight_bit: bool) -> KeyPages:
    """Random keys of n segments in scattered frames."""
    torch.manual_seed(0)
    item = INDEX_WIDTH + 4 if eight_bit else 2 * INDEX_WIDTH
    per = FRAME // item
    frames = -(-context // per)
    arena = torch.empty(n * frames, FRAME, dtype=torch.uint8, device="cuda")
    view = arena[:, : per * item].view(-1, per, item)
    view = view if eight_bit else view.view(torch.bfloat16)
    for start in range(0, len(view), 512):
        part = view[start : start + 512]
        keys = torch.randn(len(part) * per, INDEX_WIDTH, device="cuda")
        part.copy_((fp8.quantize_keys(keys) if eight_bit else keys).view(part.shape))
    order = torch.randperm(len(view), device="cuda")
    return KeyPages(view, order.view(n, frames))


def indexer(pages: KeyPages, n: int, context: int, calls: int) -> Case:
    """n requests of one row each choose 2,048 of ``context`` keys. Bytes: the keys, once."""
    segment = torch.arange(n, device="cuda")
    visible = torch.full((n,), context, device="cuda")

    def call() -> Callable[[], object]:
        q = torch.randn(n, INDEX_HEADS, INDEX_WIDTH, device="cuda").bfloat16()
        weights = torch.randn(n, INDEX_HEADS, device="cuda")
        scale = INDEX_WIDTH**-0.5
        return lambda: index_top_k(q, weights, pages, segment, visible, context, TOPK, scale)

    size = pages.view.shape[2] * pages.view.element_size()
    name = f"indexer {size} B keys, {context:,} entries, batch {n}"
    return Case(name, n * context * size, [call() for _ in range(calls)])


def cases() -> Iterator[Case]:
    """All cases, smallest batch first; each drops its pool when the next is drawn."""
    for eight_bit in (False, True):
        pool = row_pool(eight_bit)
        for heads in (16, 64, 128):
            for n in (1, 16, 128):
                yield attention(pool, n, heads, calls=32 if n == 1 else 8)
    for n, context, eight_bit in (
        (1, 100_000, True),
        (16, 100_000, True),
        (128, 100_000, True),
        (128, 100_000, False),
        (1, 1_000_000, True),
    ):
        yield indexer(key_pool(n, context, eight_bit), n, context, calls=4)


def main() -> None:
    """Print one line per case."""
    rate = copy_rate()
    print(f"device copy: {rate / 1e6:.2f} TB/s (read + written)")
    for case in cases():
        micros = graph_time(case.calls)
        floor = case.bytes / rate
        print(
            f"{case.name:50}  {micros:8.1f} us  {floor / micros:6.1%} of the copy rate", flush=True
        )


if __name__ == "__main__":
    main()
