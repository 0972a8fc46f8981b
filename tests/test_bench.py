"""`kvpolicy bench`: a smoke of each benchmark on the CPU, and that it notices what it should."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from micro import write_checkpoint
from torch import Tensor
from typer.testing import CliRunner, Result

from kvpolicy.bench import sizes as bench_sizes
from kvpolicy.bench.kernels import GROUPS, measure_kernels
from kvpolicy.bench.load import Load, fill, with_memory
from kvpolicy.bench.parts import KERNELS, PARTS, PartClock, part_of
from kvpolicy.bench.sizes import sizes_of
from kvpolicy.bench.step import busy_and_gaps
from kvpolicy.bench.stores import RULE, StoreCase, Stores, host_pattern
from kvpolicy.bench.timing import Rates, Stopwatch
from kvpolicy.cli.main import app
from kvpolicy.config import EngineConfig
from kvpolicy.engine.engine import Engine
from kvpolicy.geometry.presets import preset
from kvpolicy.kernels.ops import make_ops
from kvpolicy.kernels.retrieve import retrieve

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
SMALL = ("--device", "cpu", "--prompt-tokens", "40", "--warm", "1", "--steps", "2")
RECORD = {"backend", "versions", "device_name", "commit", "command", "bench"}


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("micro") / "model"))


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def document(*arguments: str) -> dict[str, Any]:
    result = invoke(*arguments, "--json")
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict) and found["benchmark"] == arguments[0]
    assert set(found["record"]) >= RECORD
    return found


# --- kernels -----------------------------------------------------------------------------------------


def test_kernels_are_checked_and_timed(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    found = document(
        *("kernels", "--device", "cpu", "--batches", "2", "--repeats", "1", "--output", str(path))
    )
    assert json.loads(path.read_text()) == found
    assert set(found["rates"]) == {"copy_per_s", "link_per_s", "flops_per_s"}
    assert found["rates"]["link_per_s"] is None and found["rates"]["copy_per_s"] > 0
    groups = {"attention", "indexer", "linear", "norm", "retrieve", "publish", "source"}
    assert {result["group"] for result in found["results"]} == groups
    for result in found["results"]:
        assert result["error"] is None and result["batch"] == 2
        assert result["us"] > 0 and result["floor_us"] > 0
        assert result["share"] == pytest.approx(result["floor_us"] / result["us"])
    moved = {r["link_bytes"] for r in found["results"] if "14 % missing" in r["name"]}
    row = preset("micro-glm").stores[0].row_bytes("float32")
    assert moved == {2 * 2 * row, 2 * 2 * 4 * row}  # requests x misses x layers x bytes of a row
    bench = found["record"]["bench"]
    assert (bench["model"], bench["dtype"], bench["batches"]) == ("micro-glm", "float32", [2])


def test_the_table_of_kernels(micro: str) -> None:
    fixed = ("--device", "cpu", "--repeats", "1", "--batches", "1,3", "--model", micro)
    result = invoke("kernels", *fixed, "--only", "norm,linear", "--dtype", "bfloat16")
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("device copy ")
    assert lines[2].split()[:3] == ["kernel", "batch", "us"]
    assert [line.split()[0] for line in lines[3:]].count("rms") == 2 and len(lines) == 3 + 2 + 14


def test_a_wrong_kernel_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        """Norms that are off by a hundredth."""

        def __init__(self, backend: str, dtype: torch.dtype) -> None:
            self._ops = make_ops(backend, dtype)

        def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
            return self._ops.rms_norm(x, weight, eps) * 1.01

        def __getattr__(self, name: str) -> Any:
            return getattr(self._ops, name)

    monkeypatch.setattr(bench_sizes, "make_ops", Wrong)
    result = invoke("kernels", "--device", "cpu", "--only", "norm", "--repeats", "1", "--json")
    assert result.exit_code == 1
    assert "rms norm, 64 wide, batch 1: WrongResult: norm: relative error" in result.stderr
    assert all(r["us"] is None and r["error"] for r in json.loads(result.stdout)["results"])


def test_wrong_products_selections_and_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        def __init__(self, backend: str, dtype: torch.dtype) -> None:
            self._ops = make_ops(backend, dtype)

        def gated(self, x: Tensor, weights: Any) -> Tensor:
            return self._ops.gated(x, weights) + 1e-6 * len(x)  # right, but not alone

        def index_top_k(self, *arguments: Any) -> Tensor:
            chosen = self._ops.index_top_k(*arguments)
            return torch.arange(chosen.shape[1]).expand_as(chosen)

        def sparse_mla(self, query: Tensor, view: Tensor, at: Tensor, *rest: Any) -> Tensor:
            return self._ops.sparse_mla(query, view, at.roll(1, 1).flip(0), *rest)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._ops, name)

    monkeypatch.setattr(bench_sizes, "make_ops", Wrong)
    sizes = sizes_of("micro-glm", (4,), None, CPU, "reference", None)
    report = measure_kernels(sizes, 1, ("attention", "indexer", "linear"))
    assert [t.name.split(",")[0] for t in report.wrong] == [
        *("attention", "indexer and top-k", "gate_up")
    ]
    assert "depend on the 4 rows" in str(report.wrong[2].error)


def test_wrong_retrieval() -> None:
    case = StoreCase(2, 2, 64, 32, 16, 512, states=1)
    buffer = host_pattern(case.host_words + 1024, CPU)
    stores = Stores(case, buffer.bytes.view(torch.int32), CPU)
    stores.check(retrieve)

    def elsewhere(*arguments: Any) -> Tensor:
        return retrieve(*arguments).flip(0)

    def stale(store: Any, *rest: Any) -> Tensor:
        other = replace(store, host=torch.zeros_like(store.host))
        return retrieve(other, *rest)

    def uncounted(store: Any, *rest: Any) -> Tensor:
        return retrieve(replace(store, counts=store.counts.clone()), *rest)

    for wrong, says in ((elsewhere, "host's|locations"), (stale, "host's"), (uncounted, "counted")):
        with pytest.raises(AssertionError, match=says):
            stores.check(wrong)
    before = retrieve(stores.stores[0], stores.rows, stores.chosen[0], RULE)
    stores.reset()
    after = retrieve(stores.stores[0], stores.rows, stores.chosen[0], RULE)
    assert torch.equal(before, after)  # a reset puts everything back


def test_misses_are_as_asked() -> None:
    for per_mille, misses in ((0, 0), (140, 2), (500, 8)):
        case = StoreCase(3, 1, 64, 32, 16, 512, per_mille=per_mille, states=1)
        stores = Stores(case, torch.zeros(case.host_words + 64, dtype=torch.int32), CPU)
        retrieve(stores.stores[0], stores.rows, stores.chosen[0], RULE)
        assert stores.stores[0].counts[:, 2].tolist() == [misses] * 3
        assert case.missed_bytes == 3 * misses * 64


def test_floors_are_the_longest() -> None:
    rates = Rates(copy=1e9, link=1e8, flops=1e12)
    assert rates.floor_us(1000, 0, 0) == pytest.approx(1.0)
    assert rates.floor_us(1000, 1000, 0) == pytest.approx(10.0)
    assert rates.floor_us(1000, 1000, 10**9) == pytest.approx(1000.0)
    assert Rates(1e9, None, 1e12).floor_us(1000, 10**9, 0) == pytest.approx(1.0)


def test_a_watch_takes_the_median_of_reset_rounds() -> None:
    state = {"resets": 0, "calls": 0}

    def call() -> None:
        state["calls"] += 1

    def reset() -> None:
        state["resets"] += 1

    us = Stopwatch(CPU, 5).micros([call] * 3, reset)
    assert us > 0 and state == {"resets": 5, "calls": 2 + 5 * 3}


@pytest.mark.interpreter
def test_kernels_in_triton() -> None:
    sizes = sizes_of("micro-glm", (1,), None, CPU, "triton", None)
    report = measure_kernels(sizes, 1, ("linear", "norm", "memory"))
    assert not report.wrong, report.wrong
    assert any("resolve alone" in timing.name for timing in report.timings)


# --- parts of a step ---------------------------------------------------------------------------------


def test_every_kernel_that_is_launched_has_a_part() -> None:
    """Named kernels are there, and each that is launched is named: a renamed one would count as another
    part without a word."""
    kernels, called = set(), set()
    for path in sorted((ROOT / "kernels" / "triton").glob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and any(
                "triton.jit" in ast.unparse(d) for d in node.decorator_list
            ):
                kernels.add(node.name)
                called |= {
                    inner.func.id
                    for inner in ast.walk(node)
                    if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name)
                }
    assert set(KERNELS) <= kernels
    launched = {name for name in kernels if name.startswith("_")} - called
    assert launched <= set(KERNELS), launched - set(KERNELS)
    assert set(KERNELS.values()) <= set(PARTS)


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("_resolve", "retrieve"),
        ("_fetch", "fetch"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "linear"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "sampling"),
        ("void at::native::vectorized_elementwise_kernel<4>", "norms, elementwise"),
        ("Memcpy HtoD (Pinned -> Device)", "norms, elementwise"),
    ],
)
def test_parts_by_name(kernel: str, part: str) -> None:
    assert part_of(kernel) == part


def test_busy_time_and_gaps() -> None:
    assert busy_and_gaps([]) == (0.0, 0.0)
    apart = [(0.0, 10.0), (12.0, 20.0), (30.0, 31.0)]
    assert busy_and_gaps(apart, longest=5.0) == (19.0, 2.0)
    overlapping = [(5.0, 15.0), (0.0, 10.0), (6.0, 7.0), (14.0, 14.5)]
    assert busy_and_gaps(overlapping, longest=5.0) == (15.0, 0.0)


def test_a_part_clock_counts_time_once() -> None:
    clock = PartClock(CPU)
    inner = clock.timed("linear", lambda: torch.randn(200_000).sort())
    outer = clock.timed("host", lambda: [inner() for _ in range(3)])
    outer()
    assert set(clock.seconds) == {"linear", "host"}
    assert clock.seconds["host"] < 0.2 * clock.seconds["linear"]


def test_steps_are_taken_apart(micro: str) -> None:
    found = document("step", *SMALL, "--model", micro, "--concurrency", "1,2")
    assert [result["concurrency"] for result in found["results"]] == [1, 2]
    for result in found["results"]:
        assert result["method"] == "calls" and result["running"] == result["concurrency"]
        assert result["context"] >= 40 and result["step_ms"] > 0 and result["host_ms"] > 0
        used = {part for part, ms in result["parts"].items() if ms > 0}
        assert {"indexer", "retrieve", "attention", "linear", "publish"} <= used
        assert set(result["parts"]) == set(PARTS) - {"host"}
    assert found["record"]["bench"]["prompt_tokens"] == 40


def test_a_slice_with_contexts_that_nobody_computed() -> None:
    model = ("--model", "micro-glm", "--dummy-weights", "--layers", "4", "--selection", "process")
    sizes = ("--context", "300", "--prompt-tokens", "4", "--concurrency", "2", "--vocab", "256")
    fixed = ("--device", "cpu", "--warm", "1", "--steps", "2")
    found = document("step", *fixed, *model, *sizes)
    assert found["results"][0]["running"] == 2 and found["results"][0]["context"] >= 300
    assert found["record"]["bench"]["context"] == 300


def test_the_engine_is_as_before_when_its_step_was_taken_apart(micro: str) -> None:
    from kvpolicy.bench.step import measure_step

    load = Load(prompt=40, reading=2, warm=1, steps=2)
    config = EngineConfig(model=micro, device="cpu", prefill_chunk=32)
    with Engine(config) as engine:
        model: Any = engine.model
    ops = model.ops
    measure_step(config, model, load, 2, share=1.0)
    assert model.ops is ops and "forward" not in vars(model)


def test_the_picture_of_steps(micro: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "step.png"
    result = invoke("step", *SMALL, "--model", micro, "--concurrency", "2", "--picture", str(path))
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0][-2:] == ["2", "requests"] and ["step,", "wall", "time"] in [
        x[:3] for x in lines
    ]


# --- end to end --------------------------------------------------------------------------------------


def test_controllers_beside_each_other(micro: str) -> None:
    found = document(
        *("end-to-end", *SMALL, "--model", micro, "--concurrency", "1,3", "--rounds", "2"),
        *("--memory-share", "1"),
        *("--controller", "resident", "--controller", "static:device_buffer_rows=16"),
    )
    cells = {(c["concurrency"], c["controller"]): c for c in found["results"]}
    assert list(cells) == [
        (n, name) for n in (1, 3) for name in ("resident", "static:device_buffer_rows=16")
    ]
    for (_, name), cell in cells.items():
        assert len(cell["rounds"]) == 2 and cell["tokens_per_s"] > 0
        running = cell["running"]
        assert cell["tokens_per_s"] == pytest.approx(running * 1e3 / cell["tpot_ms"], rel=0.5)
        assert (cell["miss_rate"] == 0) == (name == "resident")
    assert cells[1, "resident"]["running"] == 1
    assert cells[3, "static:device_buffer_rows=16"]["running"] == 3
    assert found["record"]["bench"]["controllers"] == ["resident", "static:device_buffer_rows=16"]


def test_the_table_of_controllers(micro: str) -> None:
    fixed = ("--model", micro, "--concurrency", "2", "--rounds", "1", "--memory-share", "1")
    result = invoke("end-to-end", *SMALL, *fixed)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    lines = result.stdout.splitlines()
    assert lines[0].split()[-2:] == ["x", "resident"]
    names = ["resident", "hisparse", "static", "adaptive"]
    assert [line.split()[0] for line in lines[1:]] == names
    assert lines[1].split()[-1] == "1.000"


def test_memory_is_what_all_requests_take(micro: str) -> None:
    load = Load(prompt=300, reading=40, warm=1, steps=4)
    config = EngineConfig(model=micro, device="cpu", controller="resident", max_concurrency=4)
    with Engine(config) as engine:
        model = engine.model
    for share, fits in ((1.0, 4), (0.4, 3)):
        own = with_memory(config, model, load, 4, share)
        with Engine(own, model) as engine:
            ran = fill(engine, load, 4)
            assert ran == 4 if fits == 4 else 1 <= ran <= fits


# --- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "what to measure is missing"),
        (("kernel",), "unknown benchmark 'kernel'"),
        (("kernels", "--only", "moe"), "--only 'moe': allowed, by commas: attention, indexer"),
        (("kernels", "--batches", "0"), "--batches '0': must be numbers from 1 to 4096"),
        (("kernels", "--batches", "a"), "--batches 'a'"),
        (("kernels", "--repeats", "0"), "--repeats 0: must be at least 1"),
        (("kernels", "--context", "63"), "--context 63: micro-glm allows 64 to 512"),
        (("kernels", "--model", "nothing"), "unknown model 'nothing'"),
        (("kernels", "--dtype", "float16"), "dtype = 'float16'"),
        (("kernels", "--device", "tpu"), "device = 'tpu'"),
        (("kernels", "--output", "/no/such/folder/a.json"), "does not exist"),
        (("step", "--concurrency", "1,x"), "--concurrency '1,x'"),
        (("step", "--steps", "-1"), "--steps -1: must be at least 1"),
        (("step", "--prompt-tokens", "99999999"), "the model's context is 32768"),
        (("step", "--picture", "/no/such/folder/a.png"), "--picture"),
        (("step", "--controller", "nobody"), "unknown controller 'nobody'"),
        (("step", "--device-kv-mib", "5"), "go together"),
        (("step", "--context", "100"), "--context 100: goes with --dummy-weights"),
        (("step", "--layers", "4"), "layers = 4: goes with dummy_weights"),
        (("end-to-end", "--controller", "nobody"), "unknown controller 'nobody'"),
        (("end-to-end", "--memory-share", "2"), "--memory-share 2: must be a number from 0 to 1"),
        (("end-to-end", "--rounds", "0"), "--rounds 0: must be at least 1"),
        (("step", "--device-kv-mib", "0.01", "--host-kv-mib", "1"), "MiB"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], says: str) -> None:
    device = ("--device", "cpu") if arguments and "--device" not in arguments else ()
    result = invoke(*arguments, *device)
    assert result.exit_code == 2, result.output
    assert says in result.stderr and result.stderr.count("\n") == 1, result.stderr


def test_bench_is_in_the_help() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert "bench" in result.stdout.split()
    for kind in ("kernels", "step", "end-to-end"):
        assert kind in invoke("--help").stdout
        assert "--json" in invoke(kind, "--help").stdout


def test_matplotlib_is_not_needed_but_for_the_picture(tmp_path: Path) -> None:
    """A process in which matplotlib, rich's terminal and triton are not asked for."""
    script = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from kvpolicy.cli.main import app\n"
        "app(['bench', 'kernels', '--device', 'cpu', '--only', 'norm', '--repeats', '1', '--json'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["results"]
    assert set(GROUPS) >= {"norm"}
