"""The drafters that ship with tiny-dsa, through the engine, with held-out text as what the model says."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from forced import decode_text
from heldout import pieces
from results import keep

from kvpolicy.models.loader import DecodeModel, load_model
from kvpolicy.speculative.drafters.checkpoint import KINDS, embedded_folder, for_model

METHODS = tuple(KINDS)
# Acceptance of recordings and figures depends on these weights.
WEIGHTS_SHA256 = {
    "dflash": "2340945375bef3dd328c7c116806df149dc608973186655b2287d6785d0bf391",
    "dflash2": "f130be9bdbca92249d4d5022336b4ff19df12f01ee880b2aa957d4c5710719a9",
    "dspark": "43b6ceaf3666636c70aa90d1263118daad7630a70e821b97923e528d6e38d1c0",
}
# Tokens a cycle over 4,096..8,191 of the Python files, as the long form measures them.
LEAST = {"dflash": 3.0, "dflash2": 3.3, "dspark": 3.1}


@pytest.fixture(scope="module")
def model() -> DecodeModel:
    return load_model("tiny-dsa", torch.device("cpu"))


@pytest.mark.parametrize("method", METHODS)
def test_it_is_small_frozen_and_documented(method: str) -> None:
    folder = embedded_folder("tiny-dsa", method)
    assert folder is not None
    weights = (folder / "model.safetensors").read_bytes()
    assert len(weights) <= 3.9 * 2**20
    digest = hashlib.sha256(weights).hexdigest()
    assert digest == WEIGHTS_SHA256[method]
    card = (folder / "MODEL_CARD.md").read_text()
    assert digest in card and "accepted, given those before" in card
    found = json.loads((folder / "evaluation.json").read_text())["python"]
    assert found["match"] >= LEAST[method]
    if method != "dflash":
        assert found["match"] > found["match_without_head"]


@pytest.mark.parametrize("method", ["dflash2", "dspark"])
def test_it_guesses_held_out_python(model: DecodeModel, method: str) -> None:
    """200 bytes behind a prompt of 650; the long form takes whole files."""
    text = python_pieces()[3][1][:850]
    drafter = for_model(method, model)
    _, found = decode_text(model, text, 650, "resident", drafter=drafter)
    report = found["speculation"]
    assert isinstance(report, dict) and report["drafter_failures"] == 0
    assert found["accepted_length"] >= 2.4, found["accepted_length"]


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_accepted_length_on_held_out_python(
    model: DecodeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every Python file, bytes 4,096 to 8,191, as the model card has it; its head is worth it."""
    table: dict[str, dict[str, float]] = {}
    for method in METHODS:
        drafter = for_model(method, model)
        table[method] = {}
        for name, text in python_pieces():
            _, found = decode_text(model, text[:8192], 4096, "resident", drafter=drafter)
            table[method][name] = found["accepted_length"]
    means = {method: sum(rates.values()) / len(rates) for method, rates in table.items()}
    with capsys.disabled():
        print(f"\n  {means}")
    keep("tiny-drafters", {"first": 4096, "last": 8191}, {"mean": means, "files": table})
    for method, mean in means.items():
        assert mean >= LEAST[method]
    assert means["dflash2"] > means["dflash"] and means["dspark"] > means["dflash"]


def python_pieces() -> list[tuple[str, bytes]]:
    return [(name, text) for name, text in pieces() if ".py" in name]
