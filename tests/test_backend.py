"""Backends: which one runs, what is said where it cannot, and that Triton keeps the promise too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checking import CheckingModel
from micro import write_checkpoint
from torch import Tensor

from kvpolicy import Engine, EngineConfig, SamplingParams, UserError
from kvpolicy.engine.request import RequestOutput
from kvpolicy.kernels import backend as backend_module
from kvpolicy.kernels.backend import choose_backend
from kvpolicy.kernels.ops import make_ops
from kvpolicy.kernels.packing import Packed
from kvpolicy.memory.step import StepMemory
from kvpolicy.models.glm_dsa import GlmDsa
from kvpolicy.models.loader import DecodeModel, load_model

CPU = torch.device("cpu")
# 16 rows are chosen: of these prompts the first and the last see more.
PROMPTS = [b"def f(x):\n return x", b"z", bytes(range(18))]
PARAMS = [
    SamplingParams(max_new_tokens=3),
    SamplingParams(max_new_tokens=4, temperature=0.7, seed=5),
    SamplingParams(max_new_tokens=2, temperature=1.2, top_k=20, seed=5),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(Path(tmp_path_factory.mktemp("micro")))


@pytest.fixture(scope="module")
def micro(folder: Path, device: torch.device) -> GlmDsa:
    """The micro model on Triton kernels."""
    model = load_model(str(folder), device, "triton")
    assert isinstance(model, GlmDsa) and model.backend == "triton"
    return model


class Recording:
    """DecodeModel that keeps the logits of wanted rows."""

    def __init__(self, model: DecodeModel) -> None:
        self.model = model
        self.logits: list[Tensor] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.model, name)

    def forward(self, tokens: Tensor, memory: StepMemory, wanted: Tensor) -> Tensor:
        logits = self.model.forward(tokens, memory, wanted)
        self.logits.append(logits.cpu())
        return logits


def decode(
    model: object,
    device: torch.device,
    controller: str,
    chunk: int,
    which: slice = slice(None),
    kv_dtype: str = "float32",
) -> list[RequestOutput]:
    prompts, params = PROMPTS[which], PARAMS[which]
    config = EngineConfig(
        device=device.type,  # type: ignore[arg-type]
        backend="triton",
        controller=controller,
        prefill_chunk=chunk,
        max_concurrency=len(prompts),
        staging_rows=24,
        device_kv_mib=2,
        host_kv_mib=4,
        kv_dtype=kv_dtype,  # type: ignore[arg-type]
        cuda_graphs=isinstance(model, GlmDsa),  # models that look wait for the device
        validate=True,
    )
    with Engine(config, model=model) as engine:  # type: ignore[arg-type]
        outputs = engine.generate(prompts, params)
        record = engine.record()
        assert record["backend"] == engine.model.backend
        assert record["link"] is None  # too small a host pool to measure it
        return outputs


# --- the promise, on Triton kernels ---------------------------------------------------------------


def test_bits_do_not_depend_on_budget_batch_or_chunk(micro: GlmDsa, device: torch.device) -> None:
    """Each request alone and resident, and all together with 8 hot rows in chunks of 7; and every
    row that attention reads is the one that was written."""
    alone = [decode(micro, device, "resident", 32, slice(i, i + 1))[0] for i in range(3)]
    checked = CheckingModel(micro)
    together = decode(checked, device, "static:device_buffer_rows=8", 7)
    for one, other in zip(alone, together, strict=True):
        assert (one.tokens, one.logits_sha256) == (other.tokens, other.logits_sha256)
    assert checked.rows_checked > 500


def test_bits_of_bf16_rows_do_not_depend_on_the_budget(micro: GlmDsa, device: torch.device) -> None:
    first = slice(2, 3)
    resident = decode(micro, device, "resident", 32, first, "bf16")
    tight = decode(micro, device, "static:device_buffer_rows=0", 9, first, "bf16")
    assert resident[0].logits_sha256 == tight[0].logits_sha256


def test_it_computes_what_the_reference_computes(
    micro: GlmDsa, folder: Path, device: torch.device
) -> None:
    """The same tokens; logits of unit size differ by rounding only."""
    ours, plain = Recording(micro), Recording(GlmDsa(folder, device, "micro"))
    first = slice(0, 1)
    tokens = [decode(m, device, "hisparse", 32, first)[0].tokens for m in (ours, plain)]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 3
    for a, b in zip(ours.logits, plain.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_backend_whose_bits_depend_on_the_place_is_refused(
    micro: GlmDsa, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = make_ops("triton")

    class Placed(type(ops)):  # type: ignore[misc]
        def linear(self, x: Tensor, weight: Packed, residual: Tensor | None = None) -> Tensor:
            place = torch.arange(x.shape[0], device=x.device)[:, None]
            return ops.linear(x, weight, residual) + place * 1e-6

    monkeypatch.setattr(micro, "ops", Placed())
    with pytest.raises(UserError, match="depend on its place among others"):
        micro._check_rows()


# --- which backend --------------------------------------------------------------------------------


def test_auto_is_the_reference_on_a_cpu(folder: Path) -> None:
    assert load_model(str(folder), CPU).backend == "reference"
    assert choose_backend("auto", "cpu") == choose_backend("reference", "cuda") == "reference"


def test_triton_that_is_not_installed_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr(backend_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="backend = 'triton': triton is not installed here"):
        load_model(str(folder), CPU, "triton")
    assert choose_backend("auto", "cuda") == "reference"
    assert "triton is not installed here" in caplog.text


@pytest.mark.interpreter
def test_the_interpreter_does_not_run_on_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_backend("triton", "cpu") == "triton"
    assert choose_backend("auto", "cuda") == "reference"
    assert "triton interprets on the CPU (TRITON_INTERPRET=1) in this process" in caplog.text


def fresh(code: str) -> subprocess.CompletedProcess[str]:
    """A new process whose environment does not ask for the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.interpreter
def test_the_command_line_runs_the_interpreter(folder: Path) -> None:
    """TRITON_INTERPRET is set by the program, before triton is imported."""
    arguments = ["run", "--backend", "triton", "--device", "cpu", "--model", str(folder)]
    arguments += ["--max-new-tokens", "1", "--device-kv-mib", "2", "--json", "z"]
    done = fresh(
        f"import sys\nfrom kvpolicy.cli.start import main\nsys.argv[1:] = {arguments}\nmain()"
    )
    assert done.returncode == 0, done.stderr
    assert '"backend": "triton"' in done.stdout


@pytest.mark.interpreter
def test_triton_compiled_already_is_said(folder: Path) -> None:
    done = fresh(
        "import triton, torch\nfrom kvpolicy.models.loader import load_model\n"
        f"load_model({str(folder)!r}, torch.device('cpu'), 'triton')"
    )
    assert "UserError: backend = 'triton': triton compiles for a GPU in this process" in done.stderr
