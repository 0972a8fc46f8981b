"""A drafter of your own: it remembers which token followed which, nothing else.

    python examples/custom_drafter.py

It reads no layer, so its draft ring holds what it asks for: the token ids. What it proposes changes speed,
never the output. To offer it under a name, point an entry point of the group ``kvpolicy.drafters`` at a
function ``(model, tokens) -> drafter``.
"""

from __future__ import annotations

import torch
from torch import Tensor

import kvpolicy
from kvpolicy.speculative.drawing import RowSampling
from kvpolicy.speculative.proposal import OneHot, Proposal


class Bigram:
    """Proposes what followed the last occurrence of the token before, token after token."""

    name = "bigram"
    taps: tuple[int, ...] = ()  # layers to read; none: it is given token ids instead
    ring_width = 1  # numbers kept per committed token
    capturable = True  # asks the host nothing: may be part of a CUDA graph

    def __init__(self, tokens: int = 3, window: int = 128) -> None:
        self.tokens, self.window = tokens, window

    def context(self, taps: Tensor, positions: Tensor) -> Tensor:
        return taps[:, 0]

    def propose(
        self,
        anchors: Tensor,
        positions: Tensor,
        context: Tensor,
        context_positions: Tensor,
        sampling: RowSampling,
        coupled: bool,
    ) -> Proposal:
        known = torch.where(context_positions >= 0, context[..., 0].long(), -1)
        text = torch.cat([known, anchors[:, None]], dim=1)
        column = torch.arange(text.shape[1] - 1, device=text.device)
        token, proposed = anchors, []
        for _ in range(self.tokens):
            seen = torch.where(text[:, :-1] == token[:, None], column, -1).max(dim=1).values
            following = text.gather(1, (seen + 1)[:, None])[:, 0]
            token = torch.where(seen >= 0, following, token)
            proposed.append(token)
        return Proposal(torch.stack(proposed, dim=1), OneHot())


def main() -> None:
    params = kvpolicy.SamplingParams(max_new_tokens=32)
    prompt = b"for i in range(10):\n    print(i)\n" * 3
    outputs = []
    for drafter in ("none", Bigram()):
        config = kvpolicy.EngineConfig(device="cpu", drafter=drafter)
        with kvpolicy.Engine(config) as engine:
            outputs.append(engine.generate([prompt], params)[0])
            metrics = engine.metrics()
            print(f"{getattr(drafter, 'name', drafter)}: {metrics['steps']} steps")
    print(f"accepted length {metrics['accepted_length']:.2f}, bonus counted")
    assert outputs[0].logits_sha256 == outputs[1].logits_sha256


if __name__ == "__main__":
    main()
