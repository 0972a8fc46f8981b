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
        ids, own, weighted = self.candidates(hidden, logits)
        draws = Draws.of_candidates(sampling, positions, ids, coupled)
        previous, columns, scores = anchors, [], []
        for k in range(self.tokens):
            scores.append(self.path_scores(own[:, k], weighted[:, k], previous))
            columns.append(draws.choose(scores[k], k))
            previous = ids[:, k].gather(1, columns[k][:, None])[:, 0]
        chosen = torch.stack(columns, 1)
        law = Sparse(ids, draws.laws(torch.stack(scores, 1), chosen))
        return Proposal(ids.gather(2, chosen[..., None])[..., 0], law)

    def candidates(self, hidden: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of every position: ids int64 [r, K, c], ascending, their logits float32 [r, K, c], and what
        the selector knows of them before the walk, float32 [r, K, c, rank].

        hidden: narrow [r, K, d]; logits: float32 [r, K, V].
        """
        ids = logits.topk(self.config.candidates, dim=-1).indices.sort(dim=-1).values
        projected = self.body.ops.linear(hidden.flatten(0, 1), self.projection)
        projected = projected.view(*hidden.shape[:2], 1, self.config.rank)
        return ids, logits.gather(-1, ids), projected * self.successors[ids]

    def path_scores(self, own: Tensor, weighted: Tensor, previous: Tensor) -> Tensor:
        """Scores float32 [r, c] of one position's candidates behind the token ``previous`` int64 [r]."""
        # A product and a sum along the row: its bits do not depend on the number of requests.
        return own + (weighted * self.predecessors[previous][:, None]).sum(-1)
