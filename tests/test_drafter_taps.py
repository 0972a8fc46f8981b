"""What a drafter reads of the target is what transformers calls hidden_states[layer + 1]."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drafting import small_config
from heldout import pieces
from torch import Tensor

from kvpolicy import Engine, EngineConfig, SamplingParams
from kvpolicy.models.checkpoint import checkpoint_folder
from kvpolicy.models.loader import load_model
from kvpolicy.speculative.drafters.checkpoint import with_random_weights

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore:::transformers")]
PROMPT, NEW, TAPS = 150, 20, (1, 3, 5, 6)


class Watched:
    """A model whose rows' tokens, positions and taps are kept."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.rows: list[tuple[int, int, Tensor, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, tokens: Tensor, memory: Any, wanted: Tensor) -> Tensor:
        return self.model.forward(tokens, memory, wanted)

    def forward_with_taps(self, tokens: Tensor, memory: Any, wanted: Tensor, taps: Any) -> Any:
        logits, found = self.model.forward_with_taps(tokens, memory, wanted, taps)
        kinds = [s.count for s in memory.segments for _ in range(s.count)]
        self.rows += zip(memory.positions.tolist(), tokens.tolist(), found, kinds, strict=True)
        return logits, found


def test_taps_equal_hidden_states_of_the_next_index() -> None:
    """In prompt chunks, in decode steps, and in verify rows that were kept; none equals its neighbour."""
    model = Watched(load_model("tiny-dsa", torch.device("cpu")))
    config = small_config("dflash", hidden=256, taps=TAPS, max_positions=32_768, window=64)
    drafter = with_random_weights(config, model.model)
    text = pieces()[0][1][:PROMPT]
    engine_config = EngineConfig(
        device="cpu", max_concurrency=1, prefill_chunk=64, staging_rows=2048, device_kv_mib=24,
        host_kv_mib=32, drafter=drafter,
    )  # fmt: skip
    with Engine(engine_config, model=model) as engine:  # type: ignore[arg-type]
        tokens = engine.generate([text], SamplingParams(max_new_tokens=NEW))[0].tokens
        sequence = [*text, *tokens]
    oracle = transformers.GlmMoeDsaForCausalLM.from_pretrained(
        checkpoint_folder("tiny-dsa"), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        states = oracle(
            torch.tensor([sequence]), use_cache=False, output_hidden_states=True
        ).hidden_states
    seen: dict[str, int] = {"chunk": 0, "verify": 0}
    for position, token, found, rows in model.rows:
        if token != sequence[position]:
            continue  # a rejected proposal
        seen["verify" if position >= PROMPT and rows > 1 else "chunk"] += 1
        for tap, layer in zip(found, TAPS, strict=True):
            torch.testing.assert_close(tap, states[layer + 1][0, position], rtol=2e-3, atol=2e-3)
            assert not torch.allclose(tap, states[layer][0, position], rtol=2e-2, atol=2e-2)
    # The last token is never fed, and the one before it has nothing to draft for.
    assert seen["chunk"] >= PROMPT and seen["verify"] >= NEW - 2
