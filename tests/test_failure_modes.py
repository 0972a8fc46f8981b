"""docs/failure-modes.md: that every test it names is there, and tests that only it asked for."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cache_tables import CPU, Seat, copy_tables, make_tables, random_call
from checking import CheckingModel
from kernel_cases import AttentionCase, IndexCase, randn
from micro import micro_model
from quick_model import QUICK, QuickModel
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvpolicy import Engine, EngineConfig, SamplingParams
from kvpolicy.kernels.eviction import RULES
from kvpolicy.kernels.memory_ops import memory_ops
from kvpolicy.kernels.ops import make_ops
from kvpolicy.memory import accounting
from kvpolicy.memory.request import GROWTH_TOKENS
from kvpolicy.models.loader import DecodeModel

ROOT = Path(__file__).resolve().parents[1]
HEADER = ["failure", "seen in", "property here", "test"]
NONE = "—"


def rows() -> list[list[str]]:
    """Cells of all table rows of the page but the headers. A table of failures that nobody else can have
    says not where they were seen."""
    found = []
    for line in (ROOT / "docs" / "failure-modes.md").read_text().splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if len(cells) == len(HEADER) - 1:
                cells.insert(1, HEADER[1] if cells[0] == HEADER[0] else NONE)
            if cells != HEADER and not all(re.fullmatch(r":?-+:?|—", cell) for cell in cells):
                found.append(cells)
    return found


def functions(file: Path) -> set[str]:
    nodes = ast.parse(file.read_text()).body if file.is_file() else []
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("cells", rows(), ids=lambda cells: cells[0][:40])
def test_every_named_test_exists(cells: list[str]) -> None:
    assert len(cells) == len(HEADER)
    _, source, holds, tests = cells
    assert source == NONE or re.search(r"#\d+|commit [0-9a-f]{7}|\d+\.\d+\.\d+", source)
    assert holds
    names = re.findall(r"`([^`]+)`", tests)
    assert bool(names) == (tests != NONE), "write `tests/file.py::name`, or a dash"
    for name in names:
        path, _, function = name.partition("::")
        assert function in functions(ROOT / path), f"there is no test {name}"


def test_the_page_speaks_of_every_kind() -> None:
    assert len(rows()) >= 25
    assert sum(cells[3] == NONE for cells in rows()) <= 8


# --- what the page names and no other file tests --------------------------------------------------


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> DecodeModel:
    return micro_model(Path(tmp_path_factory.mktemp("micro")))


def engine_of(model: Any, **values: Any) -> Engine:
    base = {"device": "cpu", "clock": "steps", "device_kv_mib": 2, "host_kv_mib": 4}
    return Engine(EngineConfig(**{**base, **values}), model=model)


@contextmanager
def filled(monkeypatch: pytest.MonkeyPatch, byte: int) -> Iterator[None]:
    """New memory that nobody has written holds this byte everywhere."""

    def fill(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def new(*args: Any, **kwargs: Any) -> Tensor:
            out = make(*args, **kwargs)
            out.view(-1).view(torch.uint8).fill_(byte)
            return out

        return new

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", fill(torch.empty))
        patch.setattr(torch, "empty_like", fill(torch.empty_like))
        yield


def outputs_of_all_kernels(device: torch.device) -> list[Tensor]:
    """Every output of every Triton kernel that is defined."""
    from kvpolicy.kernels.triton.norms import layer_norm

    ops, index = make_ops("triton"), IndexCase(device)
    x, weight = randn(device, 16, 33), randn(device, 21, 33, seed=1)
    scores = index.scores(ops)
    seen = torch.arange(scores.shape[1], device=device) < index.visible[:, None]
    found = [
        ops.linear(x, ops.pack(weight)),
        ops.head_linear(randn(device, 16, 3, 20), randn(device, 3, 20, 9, seed=1)),
        ops.rms_norm(x, weight[0], 1e-6),
        layer_norm(x, weight[0], weight[1], 1e-6),
        scores.masked_fill(~seen, 0.0),
        index.top_k(ops, 40),
        index.top_k(ops, 16),
        AttentionCase(device).run(ops),
    ]
    rng = np.random.default_rng(3)
    seats = [Seat(30, 9), Seat(12, 0), Seat(17, 17, full=True), Seat(40, 25)]
    arena, tables = make_tables(seats, rng)
    _, tables = copy_tables(arena, tables, device)
    resolve = memory_ops("triton").resolve
    for step in range(4):
        call = random_call(rng, seats, step)
        moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in call.items()}
        result = resolve(tables, rule=RULES["lru"], **moved)
        found += [result.location, result.missed]
    return [out.to(CPU) for out in found]


def test_kernels_leave_nothing_of_their_outputs_unwritten(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same outputs whatever lay there: zeros, or bytes of NaN and -1."""
    runs = []
    for byte in (0x00, 0xFF):
        with filled(monkeypatch, byte):
            assert bool((torch.empty(3, dtype=torch.uint8) == byte).all())
            runs.append(outputs_of_all_kernels(device))
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)
        assert not a.is_floating_point() or bool(a.isfinite().all())


@pytest.mark.parametrize("controller", ["resident", "static:device_buffer_rows=19"])
def test_numbers_of_one_kind_are_none_of_another(micro: DecodeModel, controller: str) -> None:
    """Entries, slots, locations, host words, seats, segments and request numbers share no value: what
    takes one for another reads a foreign row, and every row is compared."""
    checked = CheckingModel(micro)
    with engine_of(checked, controller=controller, max_concurrency=6) as engine:
        memory = engine.memory
        low = memory.arena.frames.allocate(100, "nobody")
        memory.host.extents.allocate(1 << 20)
        for number in (70, 71, 72):  # hold the lowest seats
            memory.admit(number, 60, (20,) * len(memory.layout.stores))
        engine._next_id = 1000
        prompts = [bytes(range(n, n + 60)) for n in range(3)]
        handles = [engine.submit(p, SamplingParams(max_new_tokens=20)) for p in prompts]
        for _ in range(8):
            engine.step()
        for segment, handle in enumerate(handles):
            own = memory.requests[handle.id]
            entries = own.committed_entries(0)
            locations = own.hot[0].locate(torch.arange(min(entries, own.hot[0].capacity)))
            assert min(own.region.row_base) > int(locations.min()) > own.max_tokens > own.seat
            assert own.seat > segment and handle.id > int(own.max_tokens)
        for handle in handles:
            handle.result()
        assert checked.rows_checked > 3000
        memory.arena.frames.release(low, "nobody")
        memory.check_integrity()


def test_rows_are_on_the_host_when_their_step_ends(micro: DecodeModel) -> None:
    """Write-through: whatever a hot cache drops afterwards is durable, layer by layer, to the bit."""
    checked = CheckingModel(micro)
    with engine_of(checked, controller="static:device_buffer_rows=3", validate=True) as engine:
        handle = engine.submit(bytes(range(70)), SamplingParams(max_new_tokens=12))
        compared = 0
        while engine.step() and not handle.done:
            own = engine.memory.requests[handle.id]
            for at, layout in enumerate(engine.memory.layout.stores):
                for i, layer in enumerate(layout.store.layers):
                    host = own.region.rows[at][: own.committed, i]
                    assert torch.equal(host, checked.truth[handle.id, layer][: own.committed])
                    compared += own.committed
        assert compared > 2000


def test_a_full_host_fails_no_step() -> None:
    """The host holds two requests to the last line: they grow, are preempted and come back, others
    wait, and only admission ever asks for host memory."""
    params = SamplingParams(max_new_tokens=90)
    with engine_of(QuickModel()) as probe:
        layout = probe.memory.layout
    size = 2 * accounting.host_bytes(layout, 120)
    with engine_of(QuickModel(), host_kv_mib=size / 2**20, validate=True) as engine:
        handles = [engine.submit(bytes(range(30)), params) for _ in range(4)]
        for step in range(60):
            engine.step()
            assert engine.memory.usage().host_free == 0
            if step % 9 == 8:
                engine.residents.preempt(engine.scheduler.running[-1], engine.steps)
        assert len({handle.result().logits_sha256 for handle in handles}) == 1
        assert set(engine.metrics()["deferred_admissions"]) == {"host"}


# --- what a step costs beside the model -----------------------------------------------------------


class New(TorchDispatchMode):
    """Counts elements of tensors that operations make; views and in-place results are not new."""

    def __init__(self) -> None:
        super().__init__()
        self.on = self.active = False
        self.elements = self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.on:
            known = {
                t.untyped_storage().data_ptr() for t in tree_leaves(args) if isinstance(t, Tensor)
            }
            for made in tree_leaves(out):
                if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in known:
                    self.elements += made.numel()
        return out

    def note_call(self, frame: Any, event: str, arg: Any) -> None:
        self.calls += self.on and event == "call" and "kvpolicy" in frame.f_code.co_filename


class Watched:
    """QuickModel of a long context; of what it does, retrieval alone is counted."""

    def __init__(self, counter: New) -> None:
        self.model, self.counter = QuickModel(), counter
        self.geometry = replace(QUICK, max_context=8192)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, tokens: Tensor, memory: Any, wanted: Tensor) -> Tensor:
        counter, waves = self.counter, memory.waves

        def counted(selector: Any) -> Iterator[Any]:
            iterator = waves(selector)
            while True:
                counter.on = counter.active
                wave = next(iterator, None)
                counter.on = False
                if wave is None:
                    return
                yield wave

        counter.on = False
        memory.waves = counted
        try:
            return self.model.forward(tokens, memory, wanted)
        finally:
            counter.on = counter.active


def step_cost(controller: str, context: int) -> tuple[int, int]:
    """(elements made, calls inside kvpolicy) of the decode steps of two requests that lie in one
    lot of growth and a little more; the model's own work is left out."""
    counter = New()
    model = Watched(counter)
    values = {
        "control_interval": 4,
        "prefill_chunk": 512,
        "staging_rows": 3000,
        "device_kv_mib": 8,
        "host_kv_mib": 16,
    }
    with engine_of(model, controller=controller, **values) as engine:
        params = SamplingParams(max_new_tokens=200)
        handles = [engine.submit(bytes(i % 256 for i in range(context)), params) for _ in range(2)]
        while any(len(handle._request.tokens) < 4 for handle in handles):
            engine.step()
        with counter:
            counter.on = counter.active = True
            sys.setprofile(counter.note_call)
            try:
                for _ in range(GROWTH_TOKENS + 6):
                    engine.step()
            finally:
                sys.setprofile(None)
                counter.on = counter.active = False
        for handle in handles:
            handle.cancel()
    return counter.elements, counter.calls


@pytest.mark.parametrize("controller", ["resident", "static:device_buffer_rows=30", "adaptive"])
def test_a_steps_bookkeeping_does_not_grow_with_the_context(controller: str) -> None:
    """Scheduling, growth, control, retrieval and commit of contexts of 250 and of 2,500 tokens."""
    short, long = step_cost(controller, 250), step_cost(controller, 2500)
    assert min(short) > 1000
    for a, b in zip(short, long, strict=True):
        assert b <= 1.1 * a, (short, long)
