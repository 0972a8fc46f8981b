"""Prompt look-up: propose what followed when the last tokens stood in the context before.

A drafter without weights (Saxena, "Prompt Lookup Decoding", 2023). It reads no layer, so its ring holds
token ids, one number a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.speculative.drawing import RowSampling
from kvpolicy.speculative.proposal import OneHot, Proposal


class NGram:
    """The longest match of the last 1 to ``most`` tokens in the window, the latest of equal ones; where the
    copied text ends it goes on from its own proposals. Nothing found: the last token again.

    tokens: K. window: W, tokens that it looks back.
    """

    name = "ngram"
    taps: tuple[int, ...] = ()
    ring_width = 1
    capturable = True

    def __init__(self, tokens: int = 7, window: int = 256, most: int = 6) -> None:
        self.tokens, self.window, self.most = tokens, window, most

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
        text = torch.cat([known, anchors[:, None]], dim=1)  # [r, W + 1], the anchor last
        width = text.shape[1]
        # length[r, j]: how many of the last tokens equal those that end at column j.
        length, alive = torch.zeros_like(text), torch.ones_like(text, dtype=torch.bool)
        for back in range(min(self.most, width - 1)):
            shifted = torch.full_like(text, -2)
            shifted[:, back:] = text[:, : width - back]
            alive = alive & (shifted == text[:, -1 - back, None]) & (shifted >= 0)
            length += alive
        score = length[:, :-1] * width + torch.arange(width - 1, device=text.device)
        best = score.argmax(dim=1) if width > 1 else torch.zeros_like(anchors)
        found = (score.gather(1, best[:, None])[:, 0] >= width) if width > 1 else anchors < 0
        period = torch.where(found, width - 1 - best, 1)[:, None]
        ahead = torch.arange(self.tokens, device=text.device)[None] % period
        tokens = text.gather(1, width - period + ahead)
        return Proposal(tokens, OneHot())
