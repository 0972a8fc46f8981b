"""Token choice on the device against that of the host. One file for both forms: interpreted, compiled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("triton")

from kvpolicy.config import SamplingParams
from kvpolicy.kernels.sampling import allowed, first_of_highest
from kvpolicy.kernels.triton.sampling import gumbel, sample
from kvpolicy.sampling import Role, choose_token
from kvpolicy.sampling import allowed as allowed_on_host
from kvpolicy.sampling import gumbel as gumbel_on_host

SEEDS = [0, 1, 2**32 - 1, 2**32, 2**63 - 1]
POSITIONS = [0, 1, 511, 2**20, 2**33]
# (temperature, top-k, top-p)
HOW = [
    (0.0, 0, 1.0),
    (0.0, 3, 0.4),
    (1.0, 0, 1.0),
    (0.6, 0, 0.9),
    (1.3, 5, 1.0),
    (0.8, 40, 0.55),
    (1.0, 1, 1.0),
    (1.0, 0, 1e-9),
    (100.0, 10**6, 0.999),
    (1e-300, 0, 0.5),
]


def compare(logits: NDArray[np.float32], rng: np.random.Generator, device: torch.device) -> None:
    """One call for rows of mixed settings, and ``choose_token`` of each row."""
    rows = logits.shape[0]
    how = [HOW[i % len(HOW)] for i in range(rows)]
    seeds = rng.choice([*SEEDS, *rng.integers(0, 2**63, 5).tolist()], rows)
    positions = rng.choice(POSITIONS, rows)
    temperature, top_k, top_p = (list(column) for column in zip(*how, strict=True))
    numbers = (
        torch.from_numpy(logits),
        torch.from_numpy(seeds),
        torch.from_numpy(positions),
        torch.tensor(temperature, dtype=torch.float64),
        torch.tensor(top_k),
        torch.tensor(top_p, dtype=torch.float64),
    )
    found = sample(*(part.to(device) for part in numbers))
    wanted = [
        choose_token(
            logits[i],
            SamplingParams(
                temperature=temperature[i], top_k=top_k[i], top_p=top_p[i], seed=int(seeds[i])
            ),
            int(positions[i]),
        )
        for i in range(rows)
    ]
    assert found.tolist() == wanted


@pytest.mark.parametrize("width", [1, 2, 3, 257, 1000])
def test_sample_equals_the_host(width: int, device: torch.device) -> None:
    rng = np.random.default_rng(width)
    compare(rng.normal(0, 3, (60, width)).astype(np.float32), rng, device)


@pytest.mark.parametrize("width", [4, 1000])
def test_ties_go_to_the_lowest_token(width: int, device: torch.device) -> None:
    """Rows of three different values, and rows that are equal throughout."""
    rng = np.random.default_rng(width + 7)
    rows = rng.choice(np.array([-2.0, 0.0, 1.5], dtype=np.float32), (40, width))
    rows[::4] = 0.25
    compare(rows, rng, device)


def test_logits_far_apart(device: torch.device) -> None:
    """Weights below 2^-40 and logits near float32's limits."""
    rng = np.random.default_rng(3)
    rows = rng.normal(0, 1, (40, 33)).astype(np.float32) * np.float32(1e4)
    rows[::2, 5] = 3e38
    rows[::3, 9] = -3e38
    compare(rows, rng, device)


def test_a_row_does_not_depend_on_the_batch(device: torch.device) -> None:
    """Nor do the tokens of a row change with where it stands."""
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(rng.normal(0, 2, (9, 50)).astype(np.float32))
    seeds, positions = torch.arange(9) * 2**40, torch.arange(9) + 100
    heat = torch.full((9,), 0.7, dtype=torch.float64)
    top_k, top_p = torch.full((9,), 20), torch.full((9,), 0.9, dtype=torch.float64)
    numbers = [part.to(device) for part in (logits, seeds, positions, heat, top_k, top_p)]
    every = sample(*numbers)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1)).to(device)
    assert torch.equal(sample(*(part[order] for part in numbers)), every[order])
    for i in range(9):
        assert sample(*(part[i : i + 1] for part in numbers)).item() == every[i].item()


@pytest.mark.parametrize("width", [1, 6, 1000, 1030])
@pytest.mark.parametrize("role", list(Role))
def test_noise_equals_the_hosts(width: int, role: Role, device: torch.device) -> None:
    """Bit for bit on the CPU; a GPU's logarithm may end otherwise."""
    pairs = [(seed, position) for seed in SEEDS for position in POSITIONS]
    seeds, positions = torch.tensor(pairs).unbind(1)
    noise = gumbel(seeds.to(device), positions.to(device), width, int(role)).cpu().numpy()
    for row, (seed, position) in zip(noise, pairs, strict=True):
        wanted = gumbel_on_host(seed, position, role, width)
        if device.type == "cpu":
            assert np.array_equal(row, wanted)
        else:
            np.testing.assert_allclose(row, wanted, rtol=1e-12, atol=1e-12)


def test_no_rows(device: torch.device) -> None:
    two = torch.arange(2, device=device)
    assert gumbel(two[:0], two[:0], 5).shape == (0, 5)
    assert gumbel(two, two, 0).shape == (2, 0)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (1, 1.0), (7, 0.8), (0, 0.3), (99, 0.97)])
def test_what_top_k_and_top_p_leave(top_k: int, top_p: float) -> None:
    rng = np.random.default_rng(top_k)
    scores = rng.normal(0, 2, (12, 40))
    scores[6:] = np.round(scores[6:])
    keep = allowed(
        torch.from_numpy(scores),
        torch.full((12,), top_k),
        torch.full((12,), top_p, dtype=torch.float64),
    )
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p)
    for row, found in zip(scores, keep.numpy(), strict=True):
        assert np.array_equal(found, allowed_on_host(row, params))


def test_greedy_takes_the_lowest_of_equal_maxima() -> None:
    rows = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [-torch.inf, 0.0, 0.0], [5.0, 1.0, 2.0]])
    assert first_of_highest(rows).tolist() == [1, 0, 1, 0]
    broken = first_of_highest(torch.full((1, 3), torch.nan))  # somewhere in the vocabulary
    assert 0 <= broken.item() < 3
