"""DFlash: every row of the block predicts on its own. The baseline of the other two."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.speculative.drafters.blockwise import Blockwise
from kvpolicy.speculative.drafters.body import body_shapes
from kvpolicy.speculative.drafters.config import DrafterConfig
from kvpolicy.speculative.drafters.draws import Draws
from kvpolicy.speculative.drawing import RowSampling
from kvpolicy.speculative.proposal import Dense, Proposal


class DFlash(Blockwise):
    """Fills in the rows of a block independently of each other."""

    method = "dflash"

    @staticmethod
    def shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
        return body_shapes(config)

    def propose(
        self,
        anchors: Tensor,
        positions: Tensor,
        context: Tensor,
        context_positions: Tensor,
        sampling: RowSampling,
        coupled: bool,
    ) -> Proposal:
        hidden = self.body.block(anchors, positions, context, context_positions)
        logits = self.body.logits(hidden)
        draws = Draws.of_vocabulary(sampling, positions, self.tokens, self.config.vocab, coupled)
        tokens = torch.stack([draws.choose(logits[:, k], k) for k in range(self.tokens)], 1)
        return Proposal(tokens, Dense(draws.laws(logits, tokens)))
