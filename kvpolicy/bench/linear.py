"""Products and norms of a layer, and that a row keeps its bits in any batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from kvpolicy.bench.attention import close
from kvpolicy.bench.cases import Case, WrongResult
from kvpolicy.bench.sizes import Sizes
from kvpolicy.kernels.ops import Ops
from kvpolicy.kernels.packing import Packed

# Weights are taken in turn from more than three times the 60 MB of an H200's second-level cache.
ROTATED_BYTES = {"cuda": 200 << 20, "cpu": 1 << 20}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3}


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
    def values(self) -> int:
        return self.n_in * self.n_out * self.matrices


def shapes_of(sizes: Sizes) -> tuple[Shape, ...]:
    """The products of a layer that chooses, and the head."""
    c = sizes.config
    row = c.q_rank + c.kv_rank + c.rope
    return (
        Shape("inputs", c.hidden, row + c.index_dim + c.index_heads),
        Shape("queries", c.q_rank, c.heads * (c.nope + c.rope) + c.index_heads * c.index_dim),
        Shape("key_up", c.nope, c.kv_rank, heads=c.heads),
        Shape("value_up", c.kv_rank, c.value, heads=c.heads),
        Shape("o", c.heads * c.value, c.hidden),
        Shape("gate_up", c.hidden, c.mlp, gated=True),
        Shape("down", c.mlp, c.hidden),
    )


def linear_cases(sizes: Sizes, rows: tuple[int, ...]) -> Iterator[Case]:
    """By shape and rows. Bytes: the weight, once; beside cuBLAS, or what torch takes here."""
    for shape in shapes_of(sizes):
        weights = Weights(shape, sizes, max(rows))
        for n in rows:
            yield weights.case(n)


class Weights:
    """One shape with enough copies of its weight."""

    def __init__(self, shape: Shape, sizes: Sizes, most_rows: int) -> None:
        self.shape, self.ops, self.dtype = shape, sizes.ops(), sizes.dtype
        device = sizes.device
        g = torch.Generator(device).manual_seed(0)
        dims = (shape.matrices, shape.n_out, shape.n_in)
        weight = torch.empty(dims, dtype=sizes.dtype, device=device)
        weight.normal_(0.0, float(shape.n_in**-0.5), generator=g)
        copies = max(1, -(-ROTATED_BYTES[device.type] // weight.nbytes))
        self.plain = [weight, *(weight.clone() for _ in range(copies - 1))]
        self.packed = [self._packed(self.ops, one) for one in self.plain]
        x = torch.empty((most_rows, shape.heads, shape.n_in), device=device).normal_(generator=g)
        self.x = x.to(sizes.dtype)

    def _packed(self, ops: Ops, weight: Tensor) -> Packed | Tensor:
        if self.shape.heads > 1:
            return ops.pack_heads(weight.transpose(1, 2))
        return ops.pack(*weight)

    def ours(self, n: int, i: int = 0) -> Tensor:
        """[n, heads, n_out]"""
        weight = self.packed[i % len(self.packed)]
        if isinstance(weight, Tensor):
            return self.ops.head_linear(self.x[:n], weight)
        if self.shape.gated:
            return self.ops.gated(self.x[:n, 0], weight)[:, None]
        return self.ops.products(self.x[:n, 0], weight)[0][:, None]

    def vendor(self, n: int, i: int) -> Tensor:
        """For gate and up: both products, without the activation."""
        weight = self.plain[i % len(self.plain)]
        if self.shape.heads > 1:
            return torch.bmm(self.x[:n].transpose(0, 1), weight.transpose(1, 2))
        return F.linear(self.x[:n, 0], weight.flatten(0, 1))

    def check(self, n: int) -> None:
        """Near the product in float64, and the first row's bits do not depend on the others."""
        found = self.ours(n)
        if not torch.equal(found[:1], self.ours(1)):
            raise WrongResult(f"{self.shape.name}: a row's bits depend on the {n} rows beside it")
        x, weight = self.x[: min(n, 16)].double(), self.plain[0].double()
        if self.shape.gated:
            exact = F.silu(x[:, 0] @ weight[0].T) * (x[:, 0] @ weight[1].T)
            exact = exact[:, None]
        else:
            exact = torch.einsum("nhd,hcd->nhc", x, weight)
        close(found[: len(x)].double(), exact, TOLERANCE[self.dtype], self.shape.name)

    def case(self, n: int) -> Case:
        count = max(8, len(self.plain))
        shape = self.shape
        return Case(
            group="linear",
            name=f"{shape.name}, {shape.matrices} x {shape.n_in:,} x {shape.n_out:,}",
            batch=n,
            calls=[partial(self.ours, n, i) for i in range(count)],
            check=partial(self.check, n),
            device_bytes=shape.values * self.plain[0].element_size(),
            flops=2 * n * shape.values,
            vendor=[partial(self.vendor, n, i) for i in range(count)],
        )


def norm_cases(sizes: Sizes) -> Iterator[Case]:
    """Root-mean-square norm of hidden states. Bytes: float32 read, narrow written."""
    ops, width = sizes.ops(), sizes.config.hidden
    weight = torch.linspace(0.5, 1.5, width, device=sizes.device)
    for n in sizes.batches:
        x = torch.randn(n, width, device=sizes.device)
        call: Callable[[], Tensor] = partial(ops.rms_norm, x, weight, sizes.config.eps)

        def check(x: Tensor = x, call: Callable[[], Tensor] = call) -> None:
            wide = x.double()
            root = (wide.square().mean(-1, keepdim=True) + sizes.config.eps).rsqrt()
            close(call().double(), wide * root * weight.double(), TOLERANCE[sizes.dtype], "norm")

        size = n * width * (4 + sizes.dtype.itemsize)
        yield Case("norm", f"rms norm, {width:,} wide", n, [call] * 16, check, device_bytes=size)
