"""Recorded selections stretched to a larger geometry."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorded import prompts, recorded
from toy_model import ToyModel

from kvpolicy.errors import UserError
from kvpolicy.geometry.presets import TOY, preset
from kvpolicy.recording import Recording
from kvpolicy.selection import RecordedSource
from kvpolicy.selection.rates import lane_of
from kvpolicy.selection.recorded import stretch

CPU = torch.device("cpu")
GLM = preset("glm-5.3")


@given(
    st.lists(st.sets(st.integers(0, 400), min_size=4, max_size=4), min_size=1), st.integers(1, 9)
)
def test_runs_have_room_and_order(selections: list[set[int]], run: int) -> None:
    chosen = np.array([sorted(s) for s in selections], dtype=np.int32)
    distinct = len(np.unique(chosen))
    starts = stretch(chosen, run, distinct * run + 3)
    assert starts.dtype == np.int32 and starts.shape == chosen.shape
    assert (np.diff(starts, axis=1) >= run).all()
    assert starts.min() >= 0 and starts.max() + run <= distinct * run + 3
    for a in range(len(chosen)):  # two entries are one place exactly if they are one entry
        same = chosen[a][:, None] == chosen[0][None]
        assert np.array_equal(same, starts[a][:, None] == starts[0][None])
    if distinct * run > 1:
        with pytest.raises(UserError, match=f"need a context of {distinct * run}"):
            stretch(chosen, run, distinct * run - 1)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    path = tmp_path_factory.mktemp("stretched") / "a.npz"
    return recorded(ToyModel(), path, prompts(3), 30)


def test_what_a_row_chooses(recording: Recording) -> None:
    """Top-k of 4 becomes 2,048: four runs of 512 neighbours, disjoint and ascending."""
    source = RecordedSource(recording, GLM, CPU, context=100_000)
    visible = torch.arange(100_000, 100_040)
    requests = torch.arange(40) % 5
    for selector in GLM.selectors[:4]:
        chosen = source.select(selector, requests, visible)
        assert chosen.shape == (40, 2048)
        assert (chosen.diff(dim=1) > 0).all()
        assert (chosen >= 0).all() and (chosen < visible[:, None]).all()
        alone = source.select(selector, requests[7:8], visible[7:8])
        assert torch.equal(chosen[7:8], alone)
    assert source.name == "recording:a.npz"


def test_rows_of_a_prompt_choose_the_newest(recording: Recording) -> None:
    source = RecordedSource(recording, GLM, CPU, context=100_000)
    visible = torch.tensor([1, 2048, 2049, 99_999])
    chosen = source.select(GLM.selectors[0], torch.zeros(4, dtype=torch.int64), visible)
    assert chosen[0].tolist() == [0, *[-1] * 2047]
    assert chosen[1].tolist() == list(range(2048))
    assert chosen[2].tolist() == list(range(1, 2049))
    assert chosen[3].tolist() == list(range(99_999 - 2048, 99_999))


def test_reuse_is_the_recorded_one(recording: Recording) -> None:
    """What stays from one row to the next is what stayed in the recording, times the run."""
    source = RecordedSource(recording, GLM, CPU, context=100_000, limit=1)
    rows = recording.rows(0).decode
    chosen = recording.selections(0, 1)[rows]
    lane = lane_of(source, GLM.selectors[1], 0, 100_000 + 29 - 100_000 % 29, 20)
    kept = [len(np.intersect1d(a, b)) for a, b in zip(lane.recent, lane.recent[1:], strict=False)]
    turn = (100_000 + 29 - 100_000 % 29 + 1) % 29
    then = [
        512 * len(np.intersect1d(chosen[(turn + i) % 29], chosen[(turn + i + 1) % 29]))
        for i in range(len(kept))
    ]
    assert kept == then


def test_sizes_that_do_not_fit(recording: Recording, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="need a context of"):
        RecordedSource(recording, GLM, CPU, context=10_000)
    odd = replace(TOY.selectors[0], topk=6)
    geometry = replace(TOY, selectors=(odd, *TOY.selectors[1:]))
    with pytest.raises(UserError, match="no multiple of its 4"):
        RecordedSource(recording, geometry, CPU, context=10_000)
    short = recorded(ToyModel(), tmp_path / "b.npz", [b"ab"], 3)
    with pytest.raises(UserError, match="no request in it decodes beyond 4 tokens"):
        RecordedSource(short, GLM, CPU, context=100_000)
