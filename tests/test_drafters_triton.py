"""The drafters on the Triton backend: interpreted on the CPU, compiled and as a CUDA graph on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drafting import METHODS, drafter_of, sampling, small_config, some_taps
from micro import write_checkpoint
from torch import Tensor

from kvpolicy.models.glm_dsa import GlmDsa
from kvpolicy.speculative.drafters.blockwise import Blockwise
from kvpolicy.speculative.drawing import RowSampling
from kvpolicy.speculative.proposal import OneHot, Proposal

ANCHORS = (0, 3, 25)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("micro"))


@pytest.fixture(scope="module")
def target(folder: Path, device: torch.device) -> GlmDsa:
    return GlmDsa(folder, device, "micro", backend="triton")


@pytest.fixture(scope="module")
def reference(folder: Path) -> GlmDsa:
    return GlmDsa(folder, torch.device("cpu"), "micro")


def inputs(drafter: Blockwise, device: torch.device) -> tuple[Tensor, ...]:
    """Tokens, anchors, context and its positions of three requests."""
    taps = some_taps(30, drafter.config).to(device)
    kept = drafter.context(taps, torch.arange(30, device=device))
    at = torch.tensor(ANCHORS)[:, None] + torch.arange(1 - drafter.window, 0)
    context = torch.where((at >= 0)[..., None], kept.cpu()[at.clamp(min=0)], torch.nan)
    parts = (torch.tensor([65, 66, 67]), torch.tensor(ANCHORS), context, at.clamp(min=-1))
    return tuple(x.to(device) for x in parts)


def on(how: RowSampling, device: torch.device) -> RowSampling:
    return RowSampling(*(x.to(device) for x in (how.seeds, how.temperature, how.top_k, how.top_p)))


def laws(found: Proposal) -> Tensor:
    assert not isinstance(found.law, OneHot)
    return found.law.probabilities.cpu()


@pytest.mark.parametrize("method", METHODS)
def test_it_drafts_as_the_reference(
    target: GlmDsa, reference: GlmDsa, device: torch.device, method: str
) -> None:
    config = small_config(method)
    mine, plain = drafter_of(config, target), drafter_of(config, reference)
    how = sampling(3, 0.7)
    found = mine.propose(*inputs(mine, device), on(how, device), False)
    want = plain.propose(*inputs(plain, torch.device("cpu")), how, False)
    assert torch.equal(found.tokens.cpu(), want.tokens)
    torch.testing.assert_close(laws(found), laws(want), rtol=1e-3, atol=1e-5)
    for i in range(3):
        one = slice(i, i + 1)
        parts = (x[one] for x in inputs(mine, device))
        own = RowSampling(
            *(x[one].to(device) for x in (how.seeds, how.temperature, how.top_k, how.top_p))
        )
        alone = mine.propose(*parts, own, False)
        assert torch.equal(alone.tokens, found.tokens[one])
        assert torch.equal(laws(alone), laws(found)[one]), "bit for bit alone and in the batch"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_a_graph_drafts_as_its_calls_do(
    folder: Path, device: torch.device, method: str, dtype: torch.dtype
) -> None:
    """Captured once, replayed on other numbers: the bits of the same calls one by one."""
    model = GlmDsa(folder, device, "micro", backend="triton", dtype=dtype)
    drafter = drafter_of(small_config(method), model)
    parts, how = inputs(drafter, device), on(sampling(3, 0.7), device)
    call: Callable[[], Proposal] = lambda: drafter.propose(*parts, how, False)  # noqa: E731
    for _ in range(2):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = call()
    for shift in range(3):
        parts[0].copy_(torch.tensor([65, 66, 67]) + shift)
        how.seeds.add_(shift)
        graph.replay()
        want = call()
        assert torch.equal(held.tokens, want.tokens)
        assert torch.equal(laws(held), laws(want))
