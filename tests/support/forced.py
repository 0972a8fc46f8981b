"""Teacher forcing through the real engine: the next token is the text's, and logits are kept."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvpolicy import Engine, EngineConfig, SamplingParams
from kvpolicy.memory.step import StepMemory
from kvpolicy.models.loader import DecodeModel


class ForcedModel:
    """DecodeModel whose wanted rows put all weight on the next byte of ``text``.

    nats: of every computed row's next byte under the real model, in position order (one request).
    """

    def __init__(self, model: DecodeModel, text: bytes) -> None:
        self.model = model
        self.text = torch.tensor(list(text))
        self.nats: list[Tensor] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.model, name)

    def forward(self, tokens: Tensor, memory: StepMemory, wanted: Tensor) -> Tensor:
        return self.forward_with_taps(tokens, memory, wanted, ())[0]

    def forward_with_taps(
        self, tokens: Tensor, memory: StepMemory, wanted: Tensor, taps: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        every = torch.arange(memory.rows)
        logits, tapped = self.model.forward_with_taps(tokens, memory, every, taps)  # type: ignore[attr-defined]
        following = memory.positions + 1
        known = following < self.text.shape[0]
        targets = self.text[following[known]]
        self.nats.append(
            torch.nn.functional.cross_entropy(logits[known], targets, reduction="none")
        )
        forced = torch.full((len(wanted), self.model.vocab), -100.0)
        for i, row in enumerate(wanted.tolist()):
            forced[i, self.text[min(int(following[row]), self.text.shape[0] - 1)]] = 100.0
        return forced, tapped

    def bits_per_byte(self) -> float:
        """Mean over all bytes but the first."""
        return float(torch.cat(self.nats).mean()) / math.log(2)


def decode_text(
    model: DecodeModel,
    text: bytes,
    prompt_bytes: int,
    controller: str,
    eviction: str | None = None,
    drafter: object = "none",
) -> tuple[ForcedModel, dict[str, float]]:
    """Decode ``text`` after its first ``prompt_bytes``, byte by byte or as far as a drafter guesses it; the
    model and the metrics."""
    forced = ForcedModel(model, text)
    config = EngineConfig(
        device="cpu",
        controller=controller,
        eviction=eviction,  # type: ignore[arg-type]
        drafter=drafter,
        max_concurrency=1,
        prefill_chunk=256,
        staging_rows=4096,
        device_kv_mib=64,
    )
    with Engine(config, model=forced) as engine:  # type: ignore[arg-type]
        params = SamplingParams(max_new_tokens=len(text) - prompt_bytes)
        output = engine.generate([text[:prompt_bytes]], params)[0]
        assert bytes(output.tokens) == text[prompt_bytes:]
        return forced, engine.metrics()
