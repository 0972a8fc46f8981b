"""Attention of a drafter's block: Triton against the formula, and blind to empty columns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_cases import randn
from torch import Tensor

from kvpolicy.kernels.draft_attention import draft_attention as reference
from kvpolicy.kernels.ops import make_ops

# (requests, block, columns, heads, key heads, width)
CPU = torch.device("cpu")
SHAPES = [(3, 8, 70, 8, 2, 32), (2, 7, 11, 4, 4, 8), (1, 1, 64, 2, 1, 16), (2, 5, 0, 4, 2, 8)]


def case(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Query, context (a slice of a wider ring, NaN in empty columns), key, value, visible."""
    r, block, columns, heads, groups, dim = shape
    width = 2 * groups * dim
    ring = randn(CPU, r, columns, 2 * width, seed=1)
    empty = torch.rand(r, columns, generator=torch.Generator().manual_seed(2)) < 0.3
    ring[empty] = torch.nan
    visible = torch.rand(r, block, columns, generator=torch.Generator().manual_seed(3)) < 0.7
    visible &= ~empty[:, None]
    own = (randn(CPU, r, block, groups, dim, seed=s) for s in (4, 5))
    parts = [randn(CPU, r, block, heads, dim, seed=6), ring.to(dtype), *own, visible]
    query, context, key, value, seen = (x.to(device) for x in parts)
    return [query, context[..., width:], key, value, seen]


def formula(
    query: Tensor, context: Tensor, key: Tensor, value: Tensor, visible: Tensor, causal: bool
) -> Tensor:
    """One row and one head at a time, in float64."""
    r, block, heads, dim = query.shape
    groups, out = key.shape[2], torch.empty(query.shape, dtype=torch.float64)
    past = context.double().view(r, -1, 2, groups, dim)
    for i in range(r):
        for row in range(block):
            own = slice(0, row + 1) if causal else slice(None)
            for head in range(heads):
                g = head * groups // heads
                keys = torch.cat([past[i, visible[i, row], 0, g], key[i, own, g].double()])
                values = torch.cat([past[i, visible[i, row], 1, g], value[i, own, g].double()])
                share = torch.softmax(keys @ query[i, row, head].double() * dim**-0.5, 0)
                out[i, row, head] = share @ values
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_reference_is_the_formula(shape: tuple[int, ...], causal: bool) -> None:
    parts = case(shape, CPU)
    torch.testing.assert_close(
        reference(*parts, causal).double(), formula(*parts, causal), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_is_the_formula(
    shape: tuple[int, ...], causal: bool, dtype: torch.dtype, device: torch.device
) -> None:
    parts = case(shape, device, dtype)
    found = make_ops("triton").draft_attention(*parts, causal)
    exact = formula(*(x.cpu() for x in parts), causal)
    torch.testing.assert_close(found.cpu().double(), exact, rtol=2e-5, atol=2e-5)


def test_a_request_has_the_same_bits_alone(device: torch.device) -> None:
    parts = case(SHAPES[0], device)
    ops = make_ops("triton")
    together = ops.draft_attention(*parts, False)
    for i in range(SHAPES[0][0]):
        alone = ops.draft_attention(*(x[i : i + 1] for x in parts), False)
        assert torch.equal(alone, together[i : i + 1])


@pytest.mark.full
def test_it_compiles_for_a_gpu(tmp_path: Path) -> None:
    """Nothing spills in PTX, and shared memory is that of any GPU."""
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).parent / "support" / "compile_draft.py"
    done = subprocess.run(
        [sys.executable, str(script)], env=os.environ | settings, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 2
    assert all(not line["wrong"] and line["shared"] <= 99 * 1024 for line in lines), lines
