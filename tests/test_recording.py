"""Recordings of live runs: complete, exact, compact, and refused when anything is wrong with them."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quick_model import QuickModel
from recorded import prompts, recorded
from toy_model import ToyModel

from kvpolicy.config import EngineConfig, SamplingParams
from kvpolicy.engine.engine import Engine
from kvpolicy.engine.scheduler import Batch
from kvpolicy.errors import UserError
from kvpolicy.recording import Recording, RecordingWriter
from kvpolicy.recording.layout import KINDS, VERSION, Header, SelectorInfo, StoreInfo
from kvpolicy.recording.recorder import Recorder

HEADER = Header("m", (StoreInfo("A", 2, 1, 64),), (SelectorInfo("A0", 0, 3),))


class Watcher:
    """What the model published, kept row by row in the plainest way, beside a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.engine = recorder.engine
        self.chosen: dict[tuple[int, int], list[list[int]]] = {}
        self.engine.observers[:] = [self]

    def __call__(self, step: int, batch: Batch, /) -> None:
        ended = [r for r, _ in batch.prompts if r.computed == len(r.prompt)]
        for request in (*batch.decode, *ended):
            seat = self.engine.memory.requests[request.id].seat
            for number, selector in enumerate(self.engine.model.geometry.selectors):
                store = self.engine.memory.layout.of(selector).index
                own = self.engine.memory.tables.stores[store]
                row = own.recent[seat, own.selectors.index(selector.name)].tolist()
                self.chosen.setdefault((request.id, number), []).append(row)
        self.recorder(step, batch)


@pytest.mark.parametrize("model", [QuickModel, ToyModel])
def test_every_selection_is_kept(tmp_path: Path, model: Any) -> None:
    """Of two stores, several selectors, in chunks of any size, beside prompts that are read."""
    config = EngineConfig(device="cpu", clock="steps", device_kv_mib=1.0, prefill_chunk=16)
    found = {}
    for chunk in (1, 200, 10_000_000):
        path = tmp_path / f"{chunk}.npz"
        with Engine(config, model()) as engine, Recorder(engine, path, chunk) as recorder:
            watcher = Watcher(recorder)
            outputs = engine.generate(prompts(4), SamplingParams(max_new_tokens=12))
            engine.observers[:] = [recorder]
            recorder.finish(outputs, {})
        found[chunk] = Recording(path)
        assert len(watcher.chosen) == 4 * len(found[chunk].header.selectors)
        for (request, number), rows in watcher.chosen.items():
            k = found[chunk].header.selectors[number].topk
            kept = found[chunk].selections(request, number)
            assert kept.tolist() == [row[:k] for row in rows]
    a, *others = found.values()
    for other in others:
        for name, column in a.segments.items():
            assert np.array_equal(column, other.segments[name]), name


def test_tables_say_what_ran(tmp_path: Path) -> None:
    recording = recorded(QuickModel(), tmp_path / "a.npz", prompts(3), tokens=10)
    segments, requests = recording.segments, recording.requests
    assert recording.request_ids == (0, 1, 2)
    for request, prompt in enumerate(prompts(3)):
        own = segments["request"] == request
        kinds = segments["kind"][own]
        assert (kinds == KINDS.index("seed")).sum() == 1
        assert segments["count"][own][kinds != KINDS.index("decode")].sum() == len(prompt)
        rows = recording.rows(request)
        # The last prompt row decides the first token; the last token needs no row.
        assert rows.position.tolist() == list(range(len(prompt) - 1, len(prompt) + 9))
        assert rows.decode.tolist() == [False] + [True] * 9
        assert (np.diff(rows.at) > 0).all() and rows.accepted.all()
        chosen = recording.selections(request, 1)
        assert (chosen.max(1) <= rows.position).all()  # a row sees itself and what is before it
    assert requests["prompt_tokens"].tolist() == [len(p) for p in prompts(3)]
    assert requests["output_tokens"].tolist() == [10] * 3
    assert requests["arrived_step"].tolist() == [0, 3, 6]
    assert (requests["first_token"] < requests["last_token"]).all()
    steps = recording.steps
    assert (np.diff(steps["step"]) == 1).all() and (steps["seconds"] > 0).all()
    assert (steps["hot"] <= steps["room"]).all() and (steps["hot"] > 0).all()
    assert recording.record["config"]["controller"] == "hisparse"
    assert recording.record["metrics"]["generated_tokens"] == 30


def test_the_same_run_is_the_same_file(tmp_path: Path) -> None:
    """But for the wall time of its steps."""
    paths = [tmp_path / "a.npz", tmp_path / "b.npz"]
    for path in paths:
        recorded(QuickModel(), path, prompts(2))
    contents = [dict(np.load(path)) for path in paths]
    assert contents[0].keys() == contents[1].keys()
    for name in contents[0].keys() - {"seconds", "end"}:
        assert np.array_equal(contents[0][name], contents[1][name], equal_nan="request." in name)


def test_recording_changes_no_bit(tmp_path: Path) -> None:
    config = EngineConfig(device="cpu", clock="steps", device_kv_mib=1.0)
    params = SamplingParams(max_new_tokens=8)
    with Engine(config, ToyModel()) as engine:
        plain = engine.generate(prompts(2), params)
    with Engine(config, ToyModel()) as engine, Recorder(engine, tmp_path / "a.npz"):
        watched = engine.generate(prompts(2), params)
    assert [o.logits_sha256 for o in plain] == [o.logits_sha256 for o in watched]


def test_a_recorder_that_is_not_finished_leaves_nothing(tmp_path: Path) -> None:
    config = EngineConfig(device="cpu", clock="steps", device_kv_mib=1.0)
    with Engine(config, QuickModel()) as engine:
        with pytest.raises(RuntimeError), Recorder(engine, tmp_path / "a.npz", chunk=10):
            engine.generate(prompts(1), SamplingParams(max_new_tokens=4))
            raise RuntimeError
        assert not engine.observers
        engine.generate(prompts(1), SamplingParams(max_new_tokens=4))
    assert not list(tmp_path.iterdir())


def test_requests_that_never_ran_are_in_the_table(tmp_path: Path) -> None:
    config = EngineConfig(device="cpu", clock="steps", device_kv_mib=1.0, max_concurrency=1)
    path = tmp_path / "a.npz"
    with Engine(config, QuickModel()) as engine, Recorder(engine, path) as recorder:
        first, second = (engine.submit(p, SamplingParams(max_new_tokens=3)) for p in prompts(2))
        second.cancel()
        while not first.done:
            engine.step()
        recorder.finish([first.result(), second.result()], {})
    recording = Recording(path)
    assert recording.request_ids == (0,)
    assert recording.requests["waited_steps"].tolist() == [0, -1]
    assert np.isnan(recording.requests["first_token"][1])


def test_preempted_requests_come_back(tmp_path: Path) -> None:
    recording = recorded(QuickModel(), tmp_path / "a.npz", prompts(4), preempt_every=7)
    assert recording.record["metrics"]["preemptions"] > 0
    back = [int(recording.rows(r).back.sum()) for r in recording.request_ids]
    assert 0 < sum(back) <= recording.record["metrics"]["preemptions"]
    for request in recording.request_ids:
        assert (np.diff(recording.rows(request).position) == 1).all()


# --- the file itself ------------------------------------------------------------------------------


def write(path: Path) -> Path:
    steps = {name: np.array([5, 6]) for name in ("step", "room", "hot")}
    segments = {
        "at": np.array([0, 1]),
        "request": np.array([7, 7]),
        "position": np.array([0, 4]),
        "count": np.array([4, 1]),
        "accepted": np.array([4, 1]),
        "kind": np.array([1, 2]),
        "seat": np.array([0, 0]),
        "joined": np.array([1, 0]),
        "budgets": np.array([[2], [-1]], dtype=np.int32),
    }
    chosen = np.array([[1, 2, 3], [0, 4, -1]], dtype=np.int32)
    with RecordingWriter(path, HEADER) as writer:
        writer.add(steps, segments, [(7, 0, chosen)])
        table = {name: np.zeros(1) for name in REQUESTS}
        writer.close(table, {"metrics": {}}, np.zeros(2))
    return path


REQUESTS = (
    *("request", "prompt_tokens", "output_tokens", "max_tokens", "arrived_step", "waited_steps"),
    *("arrived", "admitted", "first_token", "last_token"),
)


def test_a_written_file_is_read(tmp_path: Path) -> None:
    found = Recording(write(tmp_path / "a.npz"))
    assert found.header == HEADER
    assert found.selections(7, 0).tolist() == [[1, 2, 3], [0, 4, -1]]
    assert found.rows(7).position.tolist() == [3, 4]
    assert found.segments["budgets"].tolist() == [[2], [-1]]
    assert [p.name for p in tmp_path.iterdir()] == ["a.npz"]


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def rewrite(path: Path, changed: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in changed.items():
            archive.writestr(name, content)
    return path


def array(values: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values)
    return buffer.getvalue()


def text(value: Any) -> bytes:
    return array(np.frombuffer(json.dumps(value).encode(), dtype=np.uint8))


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.999])
def test_a_file_that_is_cut_off(tmp_path: Path, part: float) -> None:
    path = write(tmp_path / "a.npz")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * part)])
    with pytest.raises(UserError, match=r"recording '.*a\.npz': it is damaged or cut off"):
        Recording(path)


def test_every_flipped_byte_is_noticed_or_harmless(tmp_path: Path) -> None:
    """Damage never shows as another exception, nor as other numbers."""
    path = write(tmp_path / "a.npz")
    content = bytearray(path.read_bytes())
    refused = 0
    for place in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[place] ^= 0x55
        path.write_bytes(damaged)
        try:
            found = Recording(path)
            assert found.selections(7, 0).tolist() == [[1, 2, 3], [0, 4, -1]]
        except UserError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > len(content) / 7 / 2


@pytest.mark.parametrize(
    ("member", "content", "says"),
    [
        ("header.npy", text({"format": "other"}), "no kvpolicy-recording"),
        ("header.npy", text({"format": "kvpolicy-recording", "version": 99}), "version 99"),
        ("header.npy", text({"format": "kvpolicy-recording", "version": VERSION}), "header"),
        ("header.npy", array(np.array([{"a": 1}], dtype=object)), "damaged"),
        ("00000.gaps.npy", None, "incomplete"),
        ("end.npy", None, "incomplete"),
        ("00000.gaps.npy", array(np.zeros(3, dtype=np.uint8)), "do not fit together"),
        ("00000.segment.kind.npy", array(np.array([1, 9])), "allowed 0 to 2"),
        ("00000.segment.at.npy", array(np.array([0, 2])), "allowed 0 to 1"),
        ("00000.segment.at.npy", array(np.array([0.0, 1.0])), "float64"),
        ("00000.segment.request.npy", array(np.array([7, 8])), "no segment accounts for"),
        ("00000.segment.budgets.npy", array(np.zeros((2, 2))), "budgets"),
        ("00000.step.room.npy", array(np.array([1])), "rows"),
        ("00000.lane.selector.npy", array(np.array([1])), "allowed 0 to 0"),
    ],
)
def test_wrong_members(tmp_path: Path, member: str, content: bytes | None, says: str) -> None:
    path = write(tmp_path / "a.npz")
    changed = members(path)
    assert member in changed
    if content is None:
        del changed[member]
    else:
        changed[member] = content
    with pytest.raises(UserError, match=says):
        Recording(rewrite(path, changed))


@pytest.mark.parametrize("content", [b"", b"hello", array(np.zeros(3))])
def test_other_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(content)
    with pytest.raises(UserError, match="recording"):
        Recording(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such file"):
        Recording(tmp_path / "none.npz")
    with pytest.raises(UserError, match="--output"):
        RecordingWriter(tmp_path / "no" / "a.npz", HEADER)


def test_the_device_is_read_once_per_chunk(tmp_path: Path, monkeypatch: Any) -> None:
    """Steps only queue copies: everything comes to the host together."""
    reads: list[int] = []
    to_host = torch.Tensor.cpu
    monkeypatch.setattr(
        "kvpolicy.recording.recorder.to_host", lambda x: reads.append(x.numel()) or to_host(x)
    )
    recorded(QuickModel(), tmp_path / "a.npz", prompts(3), tokens=20, chunk=600)
    rows = 3 * 20
    assert sum(reads) == rows * (6 + 8)
    assert len(reads) <= 2 * (rows * 14 // 600 + 1)
