"""How fast this machine brings records from host memory to the device: measured once, in under a second.

Two things bound a fetch: the link's bytes per second, and how many distant rows per second the machine can
translate addresses for. The second depends on how far apart the rows lie (one H200 on PCIe 5: 70 million
rows/s where four share a block of 128 KiB, 42-48 in the order of addresses, 28-33 at random over more than
4 GiB) and is a property of the machine, so it is measured rather than assumed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from kvpolicy.kernels.memory_ops import MemoryOps

WORD = 4
# A row that is short enough for the count of rows to be the bound, and a record that is long enough for the
# bytes to be: 656 B is one fp8 row of latent attention.
ROW_WORDS, RECORD_WORDS = 164, 4096
ROWS, RECORDS, REPEATS = 16_384, 4_096, 5
# Distances between neighbouring rows, in the order of addresses; spans that rows are drawn from at random.
SPACINGS = (1 << 11, 1 << 14, 1 << 16, 1 << 18)
SPANS = (1 << 28, 1 << 30, 1 << 32, 1 << 34)


@dataclass(frozen=True)
class LinkRates:
    """bandwidth: bytes/s of long records. latency: seconds of a copy of one row, its launch included.
    ordered: (bytes between rows, rows/s) in the order of addresses. random: (bytes of the span, rows/s)."""

    bandwidth: float
    latency: float
    ordered: tuple[tuple[int, float], ...]
    random: tuple[tuple[int, float], ...]

    def seconds(self, rows: int, record_bytes: int, spacing: int) -> float:
        """A fetch of ``rows`` records that lie ``spacing`` bytes apart, visited in order."""
        if rows <= 0:
            return 0.0
        rate = row_rate(self.ordered, spacing)
        return self.latency + max(rows * record_bytes / self.bandwidth, rows / rate)

    def as_dict(self) -> dict[str, object]:
        """For the run record."""
        return asdict(self)


def row_rate(measured: tuple[tuple[int, float], ...], distance: int) -> float:
    """Rows/s at a distance, by the nearest measured one that is not below it (else the farthest)."""
    for at, rate in measured:
        if distance <= at:
            return rate
    return measured[-1][1]


def calibrate(host: Tensor, ops: MemoryOps, device: torch.device) -> LinkRates | None:
    """Measure with the backend's own copies. host: int32 [words], the pool; it is only read.

    None where there is no link: on a CPU, or with a pool of less than 64 MiB.
    """
    if device.type != "cuda" or host.numel() * WORD < 1 << 26:
        return None
    size = host.numel() * WORD

    def time(words: int, at: Tensor) -> float:
        target = torch.empty((1, at.numel(), words), dtype=torch.int32, device=device)
        places = torch.arange(at.numel(), device=device)
        source = (at // 4 * 4).to(device)
        return _median(lambda: ops.host_to_arena(host, source, target, places))

    def spaced(words: int, rows: int, distance: int) -> float:
        rows = min(rows, (size - words * WORD) // distance)
        return rows / time(words, torch.arange(rows) * (distance // WORD))

    def scattered(span: int) -> float:
        most = span // WORD - ROW_WORDS
        draw = torch.Generator().manual_seed(0)
        return ROWS / time(ROW_WORDS, torch.randint(0, most, (ROWS,), generator=draw))

    length = RECORD_WORDS * WORD
    spacings = [distance for distance in SPACINGS if distance * 1024 <= size]
    spans = [span for span in SPANS if span <= size] or [size]
    return LinkRates(
        bandwidth=spaced(RECORD_WORDS, RECORDS, length) * length,
        latency=time(ROW_WORDS, torch.zeros(1, dtype=torch.int64)),
        ordered=tuple((distance, spaced(ROW_WORDS, ROWS, distance)) for distance in spacings),
        random=tuple((span, scattered(span)) for span in spans),
    )


def _median(call: Callable[[], None]) -> float:
    """Seconds of one call on the device."""
    call()  # compiles
    found = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(float(begin.elapsed_time(end)) / 1e3)
    return statistics.median(found)
