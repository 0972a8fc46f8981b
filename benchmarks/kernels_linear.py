"""Products of a GLM-5.3 layer in bf16 against cuBLAS, by rows; and that a row keeps its bits.

    python -P benchmarks/kernels_linear.py [--rows 1,16,64] [--only o,down] [--json FILE]

Times are medians of CUDA-graph replays, weights taken in turn from more than the L2 cache holds. cuBLAS
computes one product of the same matrix (for gate and up: of both, without the activation).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from kvpolicy.kernels.triton.tensor_core import product

ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024)
# More than three times the 60 MB of L2.
ROTATED_BYTES = 200 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """heads products of [n, n_in] with [n_out, n_in]; gated: of gate and up."""

    name: str
    n_in: int
    n_out: int
    heads: int = 1
    gated: bool = False

    @property
    def matrices(self) -> int:
        return 2 if self.gated else self.heads

    @property
    def bytes(self) -> int:
        return 2 * self.n_in * self.n_out * self.matrices


SHAPES = (
    Shape("inputs", 6144, 2784),  # query latent, row, index key, head weights
    Shape("inputs-shared", 6144, 2624),
    Shape("queries", 2048, 20480),  # of attention and indexer
    Shape("queries-shared", 2048, 16384),
    Shape("key_up", 192, 512, heads=64),
    Shape("value_up", 512, 256, heads=64),
    Shape("o", 16384, 6144),
    Shape("gate_up", 6144, 18432, gated=True),
    Shape("down", 18432, 6144),
    Shape("head", 6144, 7936),
)


@dataclass(frozen=True, slots=True)
class Timing:
    shape: str
    rows: int
    cublas_us: float
    ours_us: float
    ratio: float
    weight_gb_per_s: float
    tflops: float


def graph_us(call: Callable[[int], object], calls: int) -> float:
    """Microseconds of one call, of ``calls`` in a graph. call: gets its number."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    graph.replay()
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls * 1e3)
    return statistics.median(times)


class Case:
    """One shape with enough copies of its weight."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        g = torch.Generator(device).manual_seed(0)
        sizes = (shape.matrices, shape.n_out, shape.n_in)
        weight = torch.empty(sizes, dtype=torch.bfloat16, device=device)
        weight.normal_(0.0, float(shape.n_in**-0.5), generator=g)
        copies = 1 if shape.bytes > ROTATED_BYTES else -(-ROTATED_BYTES // shape.bytes)
        self.weights = [weight, *(weight.clone() for _ in range(copies - 1))]
        rows = (max(ROWS), shape.heads, shape.n_in)
        self.x = torch.empty(rows, dtype=torch.bfloat16, device=device).normal_(generator=g)

    def ours(self, n: int, i: int = 0) -> Tensor:
        weight = self.weights[i % len(self.weights)]
        return product(self.x[:n], weight, torch.bfloat16, gated=self.shape.gated)

    def cublas(self, n: int, i: int) -> Tensor:
        weight = self.weights[i % len(self.weights)]
        if self.shape.heads > 1:
            return torch.bmm(self.x[:n].transpose(0, 1), weight.transpose(1, 2))
        return F.linear(self.x[:n, 0], weight.flatten(0, 1))

    def check(self) -> None:
        """A row's bits are those of the largest batch, which is near the product in float64."""
        whole = self.ours(max(ROWS))
        for n in ROWS:
            assert torch.equal(self.ours(n), whole[:n]), f"{self.shape.name}: {n} rows differ"
        x, weight = self.x[:16].double(), self.weights[0].double()
        if self.shape.gated:
            exact = F.silu(x[:, 0] @ weight[0].T) * (x[:, 0] @ weight[1].T)
        else:
            exact = torch.einsum("nhd,hcd->nhc", x, weight).squeeze(1)
        error = (whole[:16].squeeze(1) - exact).norm() / exact.norm()
        assert error < 4e-3, f"{self.shape.name}: off by {float(error):.1e}"

    def time(self, n: int) -> Timing:
        calls = max(8, len(self.weights))
        library = graph_us(lambda i: self.cublas(n, i), calls)
        ours = graph_us(lambda i: self.ours(n, i), calls)
        size = self.shape.bytes
        return Timing(
            self.shape.name,
            n,
            round(library, 2),
            round(ours, 2),
            round(library / ours, 3),
            round(size / ours / 1e3, 1),
            round(n * size / ours / 1e6, 1),
        )


def main() -> None:
    """Print one line per shape and row count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--only", default=",".join(shape.name for shape in SHAPES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    for shape in SHAPES:
        if shape.name not in options.only.split(","):
            continue
        case = Case(shape, torch.device("cuda"))
        case.check()
        for n in map(int, options.rows.split(",")):
            timing = case.time(n)
            found.append(asdict(timing))
            print(
                f"{shape.name:16} {n:5} rows  cuBLAS {timing.cublas_us:8.1f} us  ours "
                f"{timing.ours_us:8.1f} us  x {timing.ratio:.2f}  {timing.weight_gb_per_s:6.0f} GB/s  "
                f"{timing.tflops:5.0f} TFLOP/s",
                flush=True,
            )
        del case
    if options.json is not None:
        record = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "times": found,
        }
        options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
