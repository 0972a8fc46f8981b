"""What the generators and the traces make: rates, levels, lengths, texts."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy import workloads
from kvpolicy.errors import UserError
from kvpolicy.workloads.texts import Corpus, default_corpus, load_corpus
from kvpolicy.workloads.traces import SHIPPED, load_trace, read_trace, write_compact

# Requests, tokens in, tokens out and seconds of the sources (mean lengths are those that
# Mooncake's README and the Splitwise paper give).
SOURCES = {
    "mooncake-conversation": (12_031, 144_793_823, 4_122_048, 3536.999),
    "mooncake-synthetic": (3_993, 61_194_628, 595_432, 1022.025),
    "azure-conv": (19_366, 22_361_870, 4_088_665, 3501.722),
    "azure-code": (8_819, 18_059_974, 245_896, 3435.948),
    "agentic-coding": (49_334, 6_037_445_403, 21_709_947, 440_563.797),
}

PLAIN = "prompt_bytes=40-80&output_tokens=4-6&text=heldout"


def times(uri: str, clock: str = "wall") -> np.ndarray:
    return np.array([arrival.time for arrival in workloads.make(uri, clock).requests()])


# --- synthetic ------------------------------------------------------------------------------------


@given(st.integers(0, 1000), st.sampled_from(["poisson", "burst", "diurnal", "longmix"]))
def test_the_same_seed_makes_the_same_requests(seed: int, name: str) -> None:
    uri = f"synthetic:{name}?seed={seed}&rate=2&duration=10&{PLAIN}"
    first, second = (list(workloads.make(uri).requests()) for _ in range(2))
    other = list(workloads.make(uri.replace(f"seed={seed}", f"seed={seed + 1}")).requests())
    assert first == second != other
    assert all(a.time <= b.time for a, b in pairwise(first))
    assert all(0 <= a.time < 10 and a.seed == seed for a in first)


def test_a_workload_can_be_read_again() -> None:
    workload = workloads.make(f"synthetic:step?{PLAIN}")
    assert list(islice(workload.requests(), 5)) == list(islice(workload.requests(), 5))


def test_poisson_has_its_rate_and_memoryless_gaps() -> None:
    found = times(f"synthetic:poisson?rate=5&duration=1000&{PLAIN}")
    assert abs(len(found) - 5000) < 4 * 5000**0.5
    gaps = np.diff(found)
    assert abs(gaps.std() / gaps.mean() - 1) < 0.06


def test_the_clock_decides_what_a_duration_counts() -> None:
    wall = times(f"synthetic:poisson?rate=0.5&duration=100&{PLAIN}")
    steps = times(f"synthetic:poisson?rate=0.5&duration=100&{PLAIN}", "steps")
    assert np.allclose(wall / 1000, steps)


def test_step_has_three_levels() -> None:
    workload = workloads.make(f"synthetic:step?low=3&high=9&duration=50&{PLAIN}", "steps")
    assert workload.closed and workload.peak == 9
    assert [(p.name, p.level) for p in workload.phases] == [
        ("low", 3),
        ("high", 9),
        ("low again", 3),
    ]
    assert [p.end for p in workload.phases] == pytest.approx([0.05, 0.1, 0.15])


def test_bursts_come_at_once_at_each_quarter() -> None:
    found = times(f"synthetic:burst?rate=1&high=20&duration=100&{PLAIN}")
    values, counts = np.unique(found, return_counts=True)
    assert dict(zip(values[counts > 1], counts[counts > 1], strict=True)) == {
        25: 20,
        50: 20,
        75: 20,
    }
    assert abs((counts == 1).sum() - 100) < 40
    phases = workloads.make(f"synthetic:burst?duration=100&{PLAIN}").phases
    assert [(p.name, p.start) for p in phases] == [
        ("calm", 0),
        ("burst 1", 25),
        ("burst 2", 50),
        ("burst 3", 75),
    ]


def test_a_day_swings_around_its_rate() -> None:
    found = times(f"synthetic:diurnal?rate=5&duration=1000&{PLAIN}")
    assert abs(len(found) - 5000) < 300
    # Mean of 1 - 0.8 cos over the quarter around the trough and around the peak.
    night = ((found < 125) | (found >= 875)).sum() / 250 / 5
    noon = ((found >= 375) & (found < 625)).sum() / 250 / 5
    swing = 0.8 * np.sin(np.pi / 4) / (np.pi / 4)
    assert night == pytest.approx(1 - swing, abs=0.1)
    assert noon == pytest.approx(1 + swing, abs=0.15)


def test_longmix_has_one_long_prompt_in_five() -> None:
    uri = "synthetic:longmix?rate=10&duration=200&prompt_bytes=100&output_tokens=3&text=heldout"
    sizes = [len(a.prompt) for a in workloads.make(uri).requests()]
    assert set(sizes) == {100, 800}
    assert sizes.count(800) / len(sizes) == pytest.approx(0.2, abs=0.04)


def test_lengths_are_even_in_their_range_and_scaled() -> None:
    uri = "synthetic:poisson?rate=10&duration=200&prompt_bytes=100-200&output_tokens=10-30&text=heldout"
    made = list(workloads.make(uri).requests())
    sizes = np.array([[len(a.prompt), a.max_new_tokens] for a in made])
    assert sizes.min(0).tolist() == [100, 10] and sizes.max(0).tolist() == [200, 30]
    assert sizes.mean(0) == pytest.approx([150, 20], rel=0.03)
    scaled = list(workloads.make(f"{uri}&scale=0.5").requests())
    assert [len(a.prompt) for a in scaled] == [round(n * 0.5) for n in sizes[:, 0].tolist()]
    assert max(a.max_new_tokens for a in scaled) == 15
    kept = list(workloads.make(f"{uri}&scale=0.5&output_scale=1").requests())
    assert [a.max_new_tokens for a in kept] == sizes[:, 1].tolist()


def test_a_level_repeats_the_requests_of_a_finite_workload() -> None:
    workload = workloads.make(f"synthetic:poisson?rate=1&duration=8&{PLAIN}")
    own = [a.prompt for a in workload.requests()]
    held = workload.at_level(3, 2 * len(own) + 1)
    assert [a.prompt for a in held.requests()] == [*own, *own, own[0]]
    assert held.peak == 3 and {a.time for a in held.requests()} == {0.0}


# --- texts ----------------------------------------------------------------------------------------


@given(
    st.binary(min_size=1, max_size=60).map(lambda b: b.replace(b"\x00", b"\n")),
    st.floats(0, 1, exclude_max=True),
    st.integers(1, 200),
)
def test_a_piece_starts_with_a_line_and_has_its_length(text: bytes, at: float, size: int) -> None:
    piece = Corpus(text).piece(at, size)
    endless = text * (size // len(text) + 2)
    starts = [0, *(i + 1 for i, byte in enumerate(text) if byte == 10)]
    assert len(piece) == size
    assert any(endless[i : i + size] == piece for i in starts)


def test_texts_of_a_folder_come_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.txt").write_bytes(b"third\n")
    (tmp_path / "a.txt").write_bytes(b"first\n")
    (tmp_path / "a2.txt").write_bytes(b"second\n")
    assert load_corpus(str(tmp_path)).piece(0.0, 19) == b"first\nsecond\nthird\n"
    assert load_corpus(str(tmp_path / "b" / "c.txt")).piece(0.0, 5) == b"third"


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no text in it"):
        load_corpus(str(tmp_path))


def test_default_texts_are_held_out_text_and_the_standard_library() -> None:
    assert len(load_corpus("heldout")) == 9 * 33_000
    assert len(default_corpus()) > 1_000_000
    start = load_corpus("heldout").piece(0.0, 33_000)
    assert default_corpus().piece(0.0, 33_000) == start


# --- traces ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_trace_has_the_numbers_of_its_source(name: str) -> None:
    trace = load_trace(name)
    requests, given, made, seconds = SOURCES[name]
    assert (len(trace), trace.inputs.sum(), trace.outputs.sum()) == (requests, given, made)
    assert trace.times[0] == 0 and trace.times[-1] == pytest.approx(seconds, abs=1e-3)
    assert (np.diff(trace.times) >= 0).all()
    shipped = SHIPPED[name]
    assert trace.inputs.mean() * shipped.scale == pytest.approx(512, rel=0.03)
    assert trace.outputs.mean() * shipped.output_scale == pytest.approx(64, rel=0.03)
    assert f"{requests:,} requests" in shipped.about


def test_every_shipped_file_is_attributed_and_small() -> None:
    data = Path(workloads.__file__).parent / "data"
    notice = (data / "NOTICE").read_text()
    assert all(shipped.file in notice for shipped in SHIPPED.values())
    assert sum(file.stat().st_size for file in data.iterdir()) < 3 << 20


MOONCAKE = "".join(
    json.dumps({"timestamp": t, "input_length": i, "output_length": o, "hash_ids": [0]}) + "\n"
    for t, i, o in [(0, 10, 3), (1500, 20, 0), (4000, 5, 7)]
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.0000000,10,3\n2023-11-16 18:15:47.5000001,20,0\n"
    "2023-11-16 18:15:50.0000000,5,7"
)
AGENTIC = (
    "trace,agent,req,t_s,type,in_tokens,out_tokens\n"
    "1,m,0,0.0,n,10,3\n1,m,1,4.0,n,5,7\n1,ms,2,1.5,n,20,0\n"
)


@pytest.mark.parametrize("text", [MOONCAKE, AZURE, AGENTIC], ids=["mooncake", "azure", "agentic"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_formats(text: str, pack: Callable[[bytes], bytes]) -> None:
    trace = read_trace(pack(text.encode()), "x")
    assert trace.times == pytest.approx([0, 1.5, 4.0], abs=1e-6)
    assert (trace.inputs.tolist(), trace.outputs.tolist()) == ([10, 20, 5], [3, 1, 7])
    again = read_trace(write_compact(trace), "y")
    assert np.allclose(again.times, trace.times, atol=1e-3)
    assert (again.inputs == trace.inputs).all() and (again.outputs == trace.outputs).all()
    assert write_compact(again) == write_compact(trace)


def test_conversations_without_a_common_clock_start_every_minute() -> None:
    text = "trace,t_s,in_tokens,out_tokens\na,0,1,1\na,70,2,1\nb,0,3,1\n"
    trace = read_trace(text.encode(), "x")
    assert (trace.times.tolist(), trace.inputs.tolist()) == ([0, 60, 70], [1, 3, 2])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"a,b\n1,2\n",
        b"time_s,in_tokens,out_tokens\n",
        b"time_s,in_tokens,out_tokens\nx,1,2\n",
        b"time_s,in_tokens,out_tokens\n1,2\n",
        b"time_s,in_tokens,out_tokens\ninf,1,2\n",
        b"time_s,in_tokens,out_tokens\n1,1,1e300\n",
        b'{"timestamp": 1}\n',
        b'{"timestamp": "soon", "input_length": 1, "output_length": 1}\n',
        b"{broken\n",
        b"\xff\xfe\x00",
        b"\x1f\x8bbroken",
        gzip.compress(b"time_s,in_tokens,out_tokens\n1,2,3\n", mtime=0)[:-9],
    ],
)
def test_what_is_no_trace_is_one_clear_line(content: bytes) -> None:
    with pytest.raises(UserError, match="trace 'x' is in no known format") as error:
        read_trace(content, "x")
    assert "\n" not in str(error.value)


def test_a_replay_fills_its_duration_with_the_first_requests() -> None:
    workload = workloads.make("trace:azure-conv?rate=0.5&duration=200&text=heldout", "steps")
    made = list(workload.requests())
    trace = load_trace("azure-conv")
    assert len(made) == 100
    found = np.array([a.time for a in made])
    assert np.allclose(found, trace.times[:100] * (0.2 / trace.times[100]))
    assert found[-1] < workload.end == pytest.approx(0.2)
    assert [len(a.prompt) for a in made] == [max(round(n * 0.44), 1) for n in trace.inputs[:100]]
    assert [a.max_new_tokens for a in made] == [max(round(n * 0.3), 1) for n in trace.outputs[:100]]


def test_a_replay_at_its_own_times_and_lengths() -> None:
    workload = workloads.make("trace:azure-code?rate=trace&duration=60&scale=1&text=heldout")
    made = list(workload.requests())
    trace = load_trace("azure-code")
    count = int((trace.times < 60).sum())
    assert [a.time for a in made] == trace.times[:count].tolist()
    assert [len(a.prompt) for a in made] == trace.inputs[:count].tolist()
    assert [a.max_new_tokens for a in made] == trace.outputs[:count].tolist()


def test_lengths_of_a_replay_can_be_replaced() -> None:
    uri = "trace:azure-code?duration=30&prompt_bytes=20-30&text=heldout"
    made = list(workloads.make(uri, output_tokens=7).requests())
    assert {a.max_new_tokens for a in made} == {7}
    assert all(20 <= len(a.prompt) <= 30 for a in made)


def test_a_short_trace_keeps_its_rate(tmp_path: Path) -> None:
    path = tmp_path / "short.csv"
    path.write_text("time_s,in_tokens,out_tokens\n" + "".join(f"{i},3,4\n" for i in range(5)))
    made = [a.time for a in workloads.make(f"trace:{path}?rate=0.5&duration=100").requests()]
    assert made == pytest.approx([0, 2, 4, 6, 8])
    path.write_text("time_s,in_tokens,out_tokens\n7,3,4\n")
    assert [a.time for a in workloads.make(f"trace:{path}").requests()] == [0]
