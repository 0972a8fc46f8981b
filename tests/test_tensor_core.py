"""bf16 products and what lies between them, in Triton: against float64, bit for bit against themselves.

One file for both forms: interpreted on the CPU, compiled on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kernel_cases import randn
from micro import write_checkpoint
from torch import Tensor
from torch.nn import functional as F

from kvpolicy import Engine, EngineConfig, SamplingParams
from kvpolicy.kernels import latents as plain
from kvpolicy.kernels.elementwise import rope_table
from kvpolicy.kernels.latents import LatentNorms
from kvpolicy.kernels.ops import Ops, make_ops
from kvpolicy.models.glm_dsa import GlmDsa

# Unit-size results: float32 sums of at most 2,100 exact products, and a result rounded (by the
# interpreter cut off) to 8 bits.
WIDE, NARROW = {"rtol": 1e-5, "atol": 1e-5}, {"rtol": 8e-3, "atol": 1e-5}


@pytest.fixture(scope="module")
def ops(device: torch.device) -> Ops:
    return make_ops("triton", torch.bfloat16)


def half(device: torch.device, *shape: int, seed: int = 0) -> Tensor:
    """bf16 values; those of a matrix make products of unit size."""
    scale = shape[-1] ** -0.5 if seed else 1.0
    return (randn(device, *shape, seed=seed) * scale).bfloat16()


def close(ours: Tensor, exact: Tensor) -> None:
    bound = WIDE if ours.dtype == torch.float32 else NARROW
    torch.testing.assert_close(ours.double(), exact, **bound)


# --- products -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(33, 17), (64, 96), (7, 1), (1, 5), (130, 65), (2100, 40)])
def test_products_are_products(device: torch.device, ops: Ops, shape: tuple[int, int]) -> None:
    """Any widths, one walked in ranges; rows with a stride, at an odd address; several weights."""
    n_in, n_out = shape
    x = half(device, 19, n_in + 6)[:, 3 : 3 + n_in]
    first, second = half(device, n_out, n_in, seed=1), half(device, 3, n_in, seed=2)
    packed = ops.pack(first, second)
    for narrow in (False, True):
        found = ops.products(x, packed, narrow)
        for out, weight in zip(found, (first, second), strict=True):
            assert out.dtype == (torch.bfloat16 if narrow else torch.float32)
            close(out, x.double() @ weight.double().T)
    residual = randn(device, 19, n_out, seed=3)
    exact = x.double() @ first.double().T + residual
    close(ops.linear(x, ops.pack(first), residual), exact)


def test_gated_is_swiglu(device: torch.device, ops: Ops) -> None:
    x, gate, up = half(device, 19, 70), half(device, 45, 70, seed=1), half(device, 45, 70, seed=2)
    exact = F.silu(x.double() @ gate.double().T) * (x.double() @ up.double().T)
    out = ops.gated(x, ops.pack(gate, up))
    assert out.dtype == torch.bfloat16
    close(out, exact)


@pytest.mark.parametrize("shape", [(2, 8, 32), (3, 33, 21)])
def test_head_linear_is_a_product_per_head(
    device: torch.device, ops: Ops, shape: tuple[int, int, int]
) -> None:
    heads, n_in, n_out = shape
    x = half(device, 18, heads, n_in + 8)[..., :n_in]
    weight = half(device, heads, n_out, n_in, seed=1).transpose(1, 2)
    packed = ops.pack_heads(weight)
    assert torch.equal(packed, weight)
    out = ops.head_linear(x, packed)
    assert out.dtype == torch.bfloat16
    close(out, torch.einsum("nhd,hdc->nhc", x.double(), weight.double()))


@pytest.mark.parametrize("n", [1, 19])
def test_ranges_add_up_alike_in_one_program_or_several(
    device: torch.device, ops: Ops, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvpolicy.kernels.triton import tensor_core

    x, weight = half(device, n, 3000), ops.pack(half(device, 70, 3000, seed=1))
    assert tensor_core.ranges_of(70, 3000, 1) > 1
    several = ops.linear(x, weight)
    assert torch.equal(ops.linear(x, weight), several)  # counters are as they were
    one = replace(tensor_core.INTERPRETED, spread=False)
    monkeypatch.setattr(tensor_core, "INTERPRETED", one)
    monkeypatch.setattr(tensor_core, "tile_of", lambda *_: replace(one, columns=64, stages=3))
    assert torch.equal(ops.linear(x, weight), several)


# --- between the products -------------------------------------------------------------------------


class LayerCase:
    """Inputs of ``latents`` and ``queries``: products as views of one tensor, of 21 rows."""

    def __init__(self, device: torch.device, chooses: bool) -> None:
        self.device, self.heads, self.index_heads, self.nope = device, 3, 2, 10
        self.rank, rope, self.dim = 32, 8, 12
        widths = [33, self.rank + rope, self.dim, self.index_heads][: 4 if chooses else 2]
        self.parts = randn(device, 21, sum(widths)).split(widths, dim=1)
        self.norms = LatentNorms(
            query=randn(device, 33, seed=1),
            row=randn(device, self.rank, seed=2),
            key=randn(device, self.dim, seed=3) if chooses else None,
            key_bias=randn(device, self.dim, seed=4) if chooses else None,
            eps=1e-3,
        )
        self.table = rope_table(100, rope, 10000.0, device)
        self.positions = torch.randperm(100, generator=torch.Generator().manual_seed(1))[:21]
        self.positions = self.positions.to(device)
        widths = [self.heads * (self.nope + rope), self.index_heads * self.dim][: 1 + chooses]
        self.q = half(device, 21, sum(widths)).split(widths, dim=1)
        self.key_up = half(device, self.heads, self.rank, self.nope, seed=5).transpose(1, 2)

    def latents(self, ops: Ops, own: slice = slice(None)) -> tuple[Tensor, ...]:
        parts = [part[own] for part in self.parts]
        return ops.latents(parts, self.norms, self.table, self.positions[own])

    def queries(self, ops: Ops, own: slice = slice(None)) -> tuple[Tensor, ...]:
        parts, up = [part[own] for part in self.q], ops.pack_heads(self.key_up)
        return ops.queries(parts, up, self.index_heads, self.table, self.positions[own])


@pytest.mark.parametrize("chooses", [False, True])
def test_the_fused_forms_are_the_plain_ones(device: torch.device, ops: Ops, chooses: bool) -> None:
    case = LayerCase(device, chooses)
    at = case.positions
    norms = LatentNorms(
        *(None if w is None else w.double() for w in (case.norms.query, case.norms.row)),
        *(None if w is None else w.double() for w in (case.norms.key, case.norms.key_bias)),
        eps=1e-3,
    )
    table = case.table.double()
    exact = plain.latents([p.double() for p in case.parts], norms, table, at)
    found = case.latents(ops)
    assert [x.dtype for x in found] == [torch.bfloat16] + [torch.float32] * (len(exact) - 1)
    for ours, wanted in zip(found, exact, strict=True):
        close(ours, wanted)
    q, up = [p.double() for p in case.q], case.key_up.double()
    exact = plain.queries(q, up, case.index_heads, table, at)
    found = case.queries(ops)
    assert {x.dtype for x in found} == {torch.bfloat16}
    for ours, wanted in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), wanted, rtol=8e-3, atol=1e-4)


# --- every operation ------------------------------------------------------------------------------


def row_functions(device: torch.device, ops: Ops) -> dict[str, Callable[[slice], Tensor]]:
    """Each operation as a function of which of 21 rows it is given."""
    x, wide = half(device, 21, 45), half(device, 21, 2100)
    one, long = ops.pack(half(device, 70, 45, seed=1)), ops.pack(half(device, 10, 2100, seed=1))
    gated = ops.pack(half(device, 30, 45, seed=1), half(device, 30, 45, seed=2))
    heads, weight = half(device, 21, 2, 45), ops.pack_heads(half(device, 2, 45, 19, seed=3))
    case = LayerCase(device, True)
    return {
        "linear": lambda own: ops.linear(x[own], one),
        "ranges": lambda own: ops.linear(wide[own], long),
        "gated": lambda own: ops.gated(x[own], gated),
        "head_linear": lambda own: ops.head_linear(heads[own], weight),
        "rms_norm": lambda own: ops.rms_norm(x[own].float(), case.norms.query.new_ones(45), 1e-5),
        "latents": lambda own: torch.cat([p.float() for p in case.latents(ops, own)], 1),
        "queries": lambda own: torch.cat([p.flatten(1) for p in case.queries(ops, own)], 1),
    }


NAMES = ["linear", "ranges", "gated", "head_linear", "rms_norm", "latents", "queries"]


@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_same_bits_in_any_batch(device: torch.device, ops: Ops, name: str) -> None:
    """Alone, at another place, among more or fewer rows; and no rows give no rows."""
    function = row_functions(device, ops)[name]
    whole = function(slice(None))
    for start, stop in ((0, 1), (20, 21), (3, 8), (1, 18)):
        assert torch.equal(function(slice(start, stop)), whole[start:stop])
    assert function(slice(0, 0)).shape == (0, *whole.shape[1:])


def test_a_model_computes_what_the_reference_computes(tmp_path: Path, device: torch.device) -> None:
    """Loading holds every row's bits to themselves; results are those of the reference but for
    rounding (the interpreter cuts off where the reference rounds)."""
    folder = write_checkpoint(tmp_path)
    ours, plain = (
        GlmDsa(folder, device, "micro", backend, torch.bfloat16)
        for backend in ("triton", "reference")
    )
    rows = torch.arange(17, device=device)
    for one, other in zip(*(m._probe(m.ops, rows, 17, 64) for m in (ours, plain)), strict=True):
        assert one.dtype == other.dtype
        assert (one - other).float().norm() <= 0.02 * other.float().norm() + 1e-6
    config = EngineConfig(device=device.type, controller="static:device_buffer_rows=20")
    for model in (ours, plain):
        with Engine(config, model=model) as engine:
            (output,) = engine.generate([b"a few bytes"], SamplingParams(max_new_tokens=3))
        assert len(output.tokens) == 3


# --- true dimensions, on a GPU only ---------------------------------------------------------------

# (inner width, outputs) of GLM-5.3's products: first ones, queries, output, expert share, heads.
TRUE = [(6144, 2784), (2048, 20480), (16384, 6144), (18432, 6144), (6144, 7936)]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", TRUE)
def test_true_products_have_the_same_bits_from_1_to_1024_rows(shape: tuple[int, int]) -> None:
    cuda, ops = torch.device("cuda"), make_ops("triton", torch.bfloat16)
    n_in, n_out = shape
    x, weight = half(cuda, 1024, n_in), half(cuda, n_out, n_in, seed=1)
    packed, residual = ops.pack(weight), randn(cuda, 1024, n_out, seed=2)
    whole = ops.linear(x, packed, residual)
    exact = x[:64].double() @ weight.double().T + residual[:64]
    # A sum of 18,432 products in float32 is 1.1e-4 off at worst here.
    torch.testing.assert_close(whole[:64].double(), exact, rtol=1e-5, atol=3e-4)
    for n in (1, 2, 8, 16, 17, 32, 64, 65, 128, 129, 256, 512, 1000):
        for start in (0, 1024 - n):
            own = slice(start, start + n)
            assert torch.equal(ops.linear(x[own], packed, residual[own]), whole[own]), (n, start)


@pytest.mark.gpu
def test_true_gated_and_head_products_have_the_same_bits_from_1_to_1024_rows() -> None:
    cuda, ops = torch.device("cuda"), make_ops("triton", torch.bfloat16)
    x = half(cuda, 1024, 6144)
    both = ops.pack(*(half(cuda, 18432, 6144, seed=s) for s in (1, 2)))
    q, up = half(cuda, 1024, 64, 256)[..., :192], half(cuda, 64, 512, 192, seed=3)
    latent, down = half(cuda, 1024, 64, 512), half(cuda, 64, 256, 512, seed=4)
    up, down = ops.pack_heads(up.transpose(1, 2)), ops.pack_heads(down.transpose(1, 2))
    functions: list[Callable[[slice], Tensor]] = [
        lambda own: ops.gated(x[own], both),
        lambda own: ops.head_linear(q[own], up),
        lambda own: ops.head_linear(latent[own], down),
    ]
    for function in functions:
        whole = function(slice(None))
        for n in (1, 16, 17, 64, 128, 129, 1000):
            assert torch.equal(function(slice(1024 - n, 1024)), whole[1024 - n :]), n


@pytest.mark.gpu
def test_products_in_a_graph_have_the_bits_of_eager_ones() -> None:
    """Replayed, so counters return to zero; with other inputs."""
    cuda, ops = torch.device("cuda"), make_ops("triton", torch.bfloat16)
    weight, x = ops.pack(half(cuda, 2784, 6144, seed=1)), half(cuda, 8, 6144)
    ops.linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.linear(x, weight)
    for seed in (7, 8, 9):
        x.copy_(half(cuda, 8, 6144, seed=seed))
        graph.replay()
        assert torch.equal(out, ops.linear(x, weight))
