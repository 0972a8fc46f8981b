"""The selection process: what a selection is, what it depends on, and what caches make of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvpolicy.errors import UserError
from kvpolicy.geometry.presets import preset
from kvpolicy.kernels.selection_process import epoch_of, mix, mix_int, select
from kvpolicy.selection import GLM_5_1, ProcessParameters, ProcessSource
from kvpolicy.selection.process import make_tables
from kvpolicy.selection.rates import PUBLISHED, Span, miss_rates

CPU = torch.device("cpu")
TABLES = make_tables(GLM_5_1, CPU)
GLM = preset("glm-5.3")


def draw(
    requests: list[int], visible: list[int], k: int, selector: int = 0, seed: int = 0
) -> Tensor:
    return select(TABLES, seed, torch.tensor(requests), selector, torch.tensor(visible), k)


@given(
    st.integers(1, 300),
    st.integers(0, (1 << 31) - 1),
    st.integers(1, 3_000_000),
    st.integers(0, 40),
    st.integers(0, 1 << 31),
)
def test_a_selection_is_one(k: int, request: int, visible: int, selector: int, seed: int) -> None:
    """Ascending, distinct, below what the row sees, its own row in it, padded at the end alone."""
    row = draw([request], [visible], k, selector, seed)[0]
    count = min(k, visible)
    assert (row[count:] == -1).all() and (row[:count] >= 0).all()
    assert (row[:count].diff() > 0).all()
    assert int(row[count - 1]) == visible - 1


@given(
    st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(1, 200_000)), min_size=1, max_size=6)
)
def test_a_row_is_its_own(rows: list[tuple[int, int]]) -> None:
    """Whoever stands beside it, in whatever order."""
    requests, visible = (list(column) for column in zip(*rows, strict=True))
    together = draw(requests, visible, 32)
    for i, (request, seen) in enumerate(rows):
        assert torch.equal(together[i], draw([request], [seen], 32)[0])


def test_everything_that_names_a_selection_counts() -> None:
    plain = draw([5], [50_000], 64)
    others = [
        draw([6], [50_000], 64),
        draw([5], [50_000], 64, selector=1),
        draw([5], [50_000], 64, seed=1),
    ]
    for other in others:
        same = np.intersect1d(plain.numpy(), other.numpy()).size
        assert same < 16  # the window of 9 is common, the history is not


def test_hash_and_epochs() -> None:
    numbers = torch.arange(1 << 16)
    mixed = mix(numbers)
    assert mixed.unique().numel() == numbers.numel()  # it is a bijection of 32-bit words
    assert int(mixed.max()) < 1 << 32
    assert [mix_int(i) for i in range(100)] == mixed[:100].tolist()
    bits = (mixed[:, None] >> torch.arange(32)) & 1
    assert (bits.double().mean(0) - 0.5).abs().max() < 0.02
    for shift in (0, 3, 6):
        time = torch.arange(5000)
        epoch = epoch_of(time, torch.full_like(time, shift), torch.full_like(time, 12345))
        steps = epoch.diff()
        assert ((steps == 0) | (steps == 1)).all()
        lengths = torch.unique_consecutive(epoch, return_counts=True)[1][1:-1]
        assert float(lengths.double().mean()) == pytest.approx(2**shift, rel=0.05)
        assert int(lengths.max()) <= 2 ** (shift + 1)


def test_entries_keep_their_bins_while_the_context_grows() -> None:
    """Between two layouts of the bins an entry that is chosen again is the same one."""
    a, b = draw([1], [100_000], 2048)[0], draw([1], [100_001], 2048)[0]
    assert np.intersect1d(a.numpy(), b.numpy()).size > 0.6 * 2048


def test_the_source_knows_its_selectors() -> None:
    source = ProcessSource(GLM, CPU, seed=3)
    requests, visible = torch.tensor([1, 2]), torch.tensor([100_000, 5])
    for number in (0, 4):
        found = source.select(GLM.selectors[number], requests, visible)
        again = select(TABLES, 3, requests, number, visible, 2048)
        assert torch.equal(found, again)
    assert source.name == "process:seed=3"
    with pytest.raises(UserError, match="seed = -1"):
        ProcessSource(GLM, CPU, seed=-1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("longest", 16), ("brief", 1.5), ("window", -1), ("popularity", float("nan"))],
)
def test_parameters_out_of_range(name: str, value: float) -> None:
    with pytest.raises(UserError, match=f"{name} = .*: allowed"):
        replace(GLM_5_1, **{name: value})


def test_tables_follow_the_parameters() -> None:
    even = ProcessParameters(1.0, 0.0, 3, 0.0, 0.0, 9, 0.25, 4, 0)
    tables = make_tables(even, CPU)
    assert torch.bincount(tables.shifts).tolist() == [64] * 4
    assert torch.bincount(tables.ranks).tolist() == [16] * 64
    assert torch.bincount(tables.drifts)[[4, 9]].tolist() == [64, 192]


def test_it_misses_as_published() -> None:
    """A quarter of the rows, which miss as all of them do: every point within one percent point."""
    quarter = replace(GLM.selectors[0], topk=512)
    source = ProcessSource(GLM, CPU)
    found = miss_rates(source, quarter, 25_000, span=Span(1000, 300, 300))
    for point, known in PUBLISHED.items():
        assert found[point] == pytest.approx(known, abs=0.01), point


# --- the Triton form ------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 7, 64, 2048])
def test_the_kernel_draws_the_same(device: torch.device, k: int) -> None:
    pytest.importorskip("triton")
    from kvpolicy.kernels.triton.selection_process import select as select_triton

    visible = torch.tensor([1, 3, k, k + 1, k + 5, 1000, 100_000, 100_001, 4_000_000])
    requests = torch.arange(len(visible)) * 214_748_364
    tables = make_tables(GLM_5_1, device)
    expected = select(TABLES, 77, requests, 3, visible, k)
    found = select_triton(tables, 77, requests.to(device), 3, visible.to(device), k)
    assert torch.equal(found.cpu(), expected)
    if k == GLM.selectors[3].topk:
        source = ProcessSource(GLM, device, 77, backend="triton")
        found = source.select(GLM.selectors[3], requests.to(device), visible.to(device))
        assert torch.equal(found.cpu(), expected)
    nobody = requests[:0].to(device)
    assert select_triton(tables, 77, nobody, 3, nobody, k).shape == (0, k)
