"""Both backends on a CUDA device: the same promises as on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from abuse import PROMPTS as ABUSED
from abuse import SETTINGS, Setting, check, run_alone
from checking import CheckingModel
from heldout import pieces
from hypothesis import Phase, given, settings
from micro import write_checkpoint
from mix import PARAMS, PROMPTS
from scale import examples

from kvpolicy import Engine, EngineConfig, SamplingParams
from kvpolicy.engine.request import RequestOutput
from kvpolicy.models.dummy import DummyWeights
from kvpolicy.models.glm_dsa import GlmDsa
from kvpolicy.models.loader import load_model

pytestmark = pytest.mark.gpu
CONTROLLERS = ["resident", "hisparse:device_buffer_rows=16", "static:device_buffer_rows=0"]


def run(model: GlmDsa, controller: str, chunk: int, seats: int) -> list[RequestOutput]:
    config = EngineConfig(
        device="cuda",
        controller=controller,
        prefill_chunk=chunk,
        max_concurrency=seats,
        staging_rows=64,
        device_kv_mib=4,
        host_kv_mib=4,
        cuda_graphs=False,  # the checks wait for the device
        validate=True,
    )
    checked = CheckingModel(model)
    with Engine(config, model=checked) as engine:  # type: ignore[arg-type]
        outputs = engine.generate(PROMPTS, PARAMS)
    assert checked.rows_checked > 500
    return outputs


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_outputs_do_not_depend_on_budget_batch_or_chunk(tmp_path: Path, backend: str) -> None:
    model = GlmDsa(write_checkpoint(tmp_path), torch.device("cuda"), "micro", backend)
    alone = [o.logits_sha256 for o in run(model, "resident", 200, 1)]
    for controller in CONTROLLERS:
        for chunk, seats in ((7, 4), (64, 2)):
            got = [o.logits_sha256 for o in run(model, controller, chunk, seats)]
            assert got == alone, f"{controller}, chunk {chunk}, {seats} seats"


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_no_abuse_changes_a_bit(tmp_path_factory: pytest.TempPathFactory, backend: str) -> None:
    """Any controller, swaps, reloads, too little memory, forced preemptions, cancels and deadlines."""
    folder = write_checkpoint(tmp_path_factory.mktemp(backend))
    model = GlmDsa(folder, torch.device("cuda"), "micro", backend)
    # Books are checked at the end of each run: after every step it would take seconds a run here.
    values = {"device": "cuda", "backend": backend, "validate": False}
    alone = {which: run_alone(model, which, **values) for which in range(len(ABUSED))}

    @settings(max_examples=examples(8, 60), phases=(Phase.explicit, Phase.generate))
    @given(setting=SETTINGS)
    def run(setting: Setting) -> None:
        check(model, alone, setting, **values)

    run()


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_graphs_change_no_bit(tmp_path: Path, controller: str) -> None:
    """Captured or call by call, running ahead or step by step, with padded rows (7 seats) or without."""
    model = GlmDsa(write_checkpoint(tmp_path), torch.device("cuda"), "micro", "triton")
    values = {"device": "cuda", "device_kv_mib": 4, "host_kv_mib": 4, "controller": controller}
    found = []
    for graphs in (False, True):
        for clock, seats in (("steps", 1), ("steps", 7), ("wall", 4), ("wall", 7)):
            config = EngineConfig(
                **values, cuda_graphs=graphs, clock=clock, max_concurrency=seats, validate=True
            )
            with Engine(config, model=model) as engine:
                outputs = engine.generate(PROMPTS, PARAMS)
                assert engine.executor.decoder is not None
                assert bool(engine.executor.decoder.graphs) == graphs
            found.append([(o.tokens, o.finish_reason, o.logits_sha256) for o in outputs])
    assert all(each == found[0] for each in found)


def test_tiny_dsa_says_the_same_on_both_devices() -> None:
    """Greedy tokens of held-out text: each device and backend adds in its order, the argmax agrees."""
    prompts = [text[5000:6000] for _, text in pieces()[:2]]
    tokens = []
    for device, backend in (("cpu", "reference"), ("cuda", "reference"), ("cuda", "triton")):
        model = load_model("tiny-dsa", torch.device(device), backend)
        config = EngineConfig(device=device, controller="hisparse")  # type: ignore[arg-type]
        with Engine(config, model=model) as engine:
            outputs = engine.generate(prompts, SamplingParams(max_new_tokens=32))
        tokens.append([o.tokens for o in outputs])
    assert tokens[0] == tokens[1] == tokens[2]


# The sizes of a graph, and numbers of rows between them, which are padded.
ROWS = (1, 2, 3, 4, 7, 8, 16, 23, 32, 64, 100, 128, 200, 256)


@pytest.mark.parametrize("name", ["tiny-dsa", "glm-5.3"])
def test_any_number_of_rows_gives_the_same_bits(name: str) -> None:
    """Graphs of 1 to 256 rows, padded or not: the same logits as alone with the whole history on the
    device. Half of the requests are drawn, contexts lie on both sides of top-k (128 and 2,048)."""
    cuda, tiny = torch.device("cuda"), name == "tiny-dsa"
    if tiny:
        model = load_model(name, cuda, "triton")
        lengths, rows, kinds = (1, 90, 140, 700), 100, {"kv_dtype": "float32"}
    else:  # a group of four layers, 8-bit rows
        weights = DummyWeights(name, cuda, torch.bfloat16, 4, vocab=512)
        model = GlmDsa(weights, cuda, name, "triton", torch.bfloat16)
        lengths, rows, kinds = (1, 90, 300, 2200), 1500, {"kv_dtype": "fp8"}
    requests = [
        (bytes((i * 7 + n) % 251 for i in range(n)), SamplingParams(max_new_tokens=4, **drawn))
        for n in lengths
        for drawn in ({}, {"temperature": 0.8, "seed": n})
    ]

    config = EngineConfig(
        device="cuda",
        max_concurrency=max(ROWS),
        prefill_chunk=2048,
        device_kv_mib=8192,
        host_kv_mib=2048,
        **kinds,  # type: ignore[arg-type]
    )
    with Engine(config, model=model) as engine:
        assert engine.executor.decoder is not None

        def decode(many: list[int]) -> list[str]:
            prompts, params = zip(*(requests[i] for i in many), strict=True)
            return [output.logits_sha256 for output in engine.generate(prompts, params)]

        engine.set_controller("resident")
        alone = [decode([i])[0] for i in range(len(requests))]
        engine.set_controller(f"static:device_buffer_rows={rows}")
        for count in ROWS:
            # Long prompts are few: reading them is most of the time.
            many = [i % 8 if i < 16 else i % 4 for i in range(count)]
            assert decode(many) == [alone[i] for i in many], count
        assert engine.executor.decoder.graphs >= 9  # 1 to 256
