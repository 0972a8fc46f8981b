"""DFlash2: the body with a dynamic convolution, and a selector that walks through candidates.

Source: z-lab's DFlash2. The candidates of a position are the highest logits of its row; which of them
is taken depends on the token before it, through two codebooks and the row's hidden state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.speculative.drafters.blockwise import Blockwise
from kvpolicy.speculative.drafters.body import DraftTarget, Weights, body_shapes
from kvpolicy.speculative.drafters.config import DrafterConfig
from kvpolicy.speculative.drafters.draws import Draws
from kvpolicy.speculative.drawing import RowSampling
from kvpolicy.speculative.proposal import Proposal, Sparse

SELECTOR = "candidate_selector"


class DFlash2(Blockwise):
    """Chooses among the likeliest tokens of each row by the token before it."""

    method = "dflash2"

    def __init__(self, config: DrafterConfig, weights: Weights, target: DraftTarget) -> None:
        super().__init__(config, weights, target)
        self.predecessors = weights[f"{SELECTOR}.predecessor_codebook"].float()
        self.successors = weights[f"{SELECTOR}.successor_codebook"].float()
        self.projection = target.ops.pack(weights[f"{SELECTOR}.hidden_projection.weight"])

    @staticmethod
    def shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
        return body_shapes(config) | {
            f"{SELECTOR}.predecessor_codebook": (config.vocab, config.rank),
            f"{SELECTOR}.successor_codebook": (config.vocab, config.rank),
            f"{SELECTOR}.hidden_projection.weight": (config.rank, config.hidden),
        }

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
        ids = logits.topk(self.config.candidates, dim=-1).indices.sort(dim=-1).values
        own = logits.gather(-1, ids)
        rank = self.config.rank
        projected = self.body.ops.linear(hidden.flatten(0, 1), self.projection).view(
            *hidden.shape[:2], rank
        )
        weighted = projected[:, :, None] * self.successors[ids]  # [r, K, c, rank]
        draws = Draws.of_candidates(sampling, positions, ids, coupled)
        previous, tokens, laws = anchors, [], []
        for k in range(self.tokens):
            # A product and a sum along the row: its bits do not depend on the number of requests.
            scores = own[:, k] + (weighted[:, k] * self.predecessors[previous][:, None]).sum(-1)
            column, law = draws.choose(scores, k)
            previous = ids[:, k].gather(1, column[:, None])[:, 0]
            tokens.append(previous)
            laws.append(law)
        return Proposal(torch.stack(tokens, 1), Sparse(ids, torch.stack(laws, 1)))
