"""Medians of calls on a device, and what the device itself can do, measured in the same process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

Call = Callable[[], object]

# Of the copies and the product that rates are taken from, on a GPU and on a CPU.
COPY_BYTES = {"cuda": 1 << 31, "cpu": 1 << 24}
LINK_BYTES = 1 << 28
PRODUCT_SIDE = {"cuda": 8192, "cpu": 256}


def wait(device: torch.device) -> None:
    """Until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Times calls on one device.

    repeats: rounds, whose median is taken. graphs: on a GPU a round is a replay of a CUDA graph, so that no
    launch counts; off where calls wait for the device, as those of plain torch may.
    """

    device: torch.device
    repeats: int
    graphs: bool = True

    def micros(self, calls: Sequence[Call], reset: Call | None = None) -> float:
        """Microseconds of one call. calls: alike but for their inputs, one after the other. reset: puts
        back what they change, before each round."""
        for call in calls[:2]:
            call()
        if self.device.type == "cuda" and self.graphs:
            return self._graph(calls, reset)
        found: list[float] = []
        for _ in range(self.repeats):
            if reset is not None:
                reset()
            wait(self.device)
            start = time.perf_counter()
            for call in calls:
                call()
            wait(self.device)
            found.append(time.perf_counter() - start)
        return statistics.median(found) * 1e6 / len(calls)

    def _graph(self, calls: Sequence[Call], reset: Call | None) -> float:
        if reset is not None:
            reset()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        if reset is None:
            graph.replay()
        found: list[float] = []
        for _ in range(self.repeats):
            if reset is not None:
                reset()
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(float(begin.elapsed_time(end)))
        return statistics.median(found) * 1e3 / len(calls)


@dataclass(frozen=True, slots=True)
class Rates:
    """copy: bytes/s of a copy within the device's memory, read plus written. link: bytes/s of a copy from
    pinned host memory, None on a CPU. flops: FLOP/s of a large product in the dtype that is measured."""

    copy: float
    link: float | None
    flops: float

    def floor_us(self, device_bytes: int, link_bytes: int, flops: int) -> float:
        """Microseconds that these take at least, if all happen at once."""
        link = 0.0 if self.link is None else link_bytes / self.link
        return max(device_bytes / self.copy, link, flops / self.flops) * 1e6

    def as_dict(self) -> dict[str, float | None]:
        """Ready for JSON."""
        return {f"{name}_per_s": value for name, value in asdict(self).items()}


def measure_rates(watch: Stopwatch, dtype: torch.dtype) -> Rates:
    """What the floors are computed from. dtype: of the product."""
    device = watch.device
    kind = device.type
    source = torch.randn(COPY_BYTES[kind] // 4, device=device)
    target = torch.empty_like(source)
    # A kernel, not a copy: that would be a node of another kind in a graph, and slower (2.8 against
    # 4.3 TB/s on an H200).
    copy = 2 * source.nbytes / watch.micros([lambda: torch.neg(source, out=target)] * 3)
    side = PRODUCT_SIDE[kind]
    a = torch.randn(side, side, device=device).to(dtype)
    product = 2 * side**3 / watch.micros([lambda: torch.mm(a, a)] * 3)
    return Rates(copy * 1e6, _link_rate(watch), product * 1e6)


def _link_rate(watch: Stopwatch) -> float | None:
    """Bytes/s from pinned host memory, by the copy engine; None on a CPU."""
    if watch.device.type != "cuda":
        return None
    host = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(LINK_BYTES, dtype=torch.uint8, device=watch.device)
    found: list[float] = []
    for _ in range(watch.repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        found.append(float(begin.elapsed_time(end)) / 1e3)
    return LINK_BYTES / statistics.median(found[1:])
