"""DSpark: the body in shift layout, a Markov head that corrects its logits, and a confidence head.

Source: DSpark (arXiv 2607.05147, section 3). The correction of token k, and the confidence in it, are
functions of the row's hidden state and of the token before it, never of token k itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.speculative.drafters.blockwise import Blockwise
from kvpolicy.speculative.drafters.body import DraftTarget, Weights, body_shapes
from kvpolicy.speculative.drafters.config import DrafterConfig
from kvpolicy.speculative.drafters.draws import Draws
from kvpolicy.speculative.drawing import RowSampling
from kvpolicy.speculative.proposal import Dense, Proposal


class DSpark(Blockwise):
    """Draws one token after the other: a bias by the token before it is added to each row's logits."""

    method = "dspark"

    def __init__(self, config: DrafterConfig, weights: Weights, target: DraftTarget) -> None:
        super().__init__(config, weights, target)
        if config.rank:
            self.markov_in = weights["markov_head.markov_w1.weight"]
            self.markov_out = target.ops.pack(weights["markov_head.markov_w2.weight"])
        if config.confidence:
            self.sure_weight = weights["confidence_head.proj.weight"].float()[0]
            self.sure_bias = weights["confidence_head.proj.bias"].float()
            ones = (1.0,) * self.tokens
            self.calibration = torch.tensor(
                [config.calibration.get(mode, ones) for mode in ("greedy", "sampled")],
                device=self.sure_bias.device,
            )

    @staticmethod
    def shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
        shapes = body_shapes(config)
        if config.rank:
            shapes["markov_head.markov_w1.weight"] = (config.vocab, config.rank)
            shapes["markov_head.markov_w2.weight"] = (config.vocab, config.rank)
        if config.confidence:
            shapes["confidence_head.proj.weight"] = (1, config.hidden + config.rank)
            shapes["confidence_head.proj.bias"] = (1,)
        return shapes

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
        before, scores = [anchors], []
        for k in range(self.tokens):
            scores.append(self.corrected(logits[:, k], before[k]))
            before.append(draws.choose(scores[k], k))
        tokens = torch.stack(before[1:], 1)
        law = Dense(draws.laws(torch.stack(scores, 1), tokens))
        if not self.config.confidence:
            return Proposal(tokens, law)
        sure = self.confidence_logits(hidden, torch.stack(before[:-1], 1))
        return Proposal(tokens, law, self.calibrated(sure, sampling))

    def corrected(self, logits: Tensor, previous: Tensor) -> Tensor:
        """Logits float32 [r, V] of a token behind the token ``previous`` int64 [r]."""
        if not self.config.rank:
            return logits
        return self.body.ops.linear(self.markov_in[previous], self.markov_out, logits)

    def confidence_logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logits float32 [r, K] of the chance that a token is accepted, given those before it.

        hidden: narrow [r, K, d]. previous: int64 [r, K], the token before each.
        """
        parts = [hidden.float()]
        if self.config.rank:
            parts.append(self.markov_in[previous].float())
        # A product and a sum along the row: its bits do not depend on the number of requests.
        return (torch.cat(parts, -1) * self.sure_weight).sum(-1) + self.sure_bias

    def calibrated(self, logit: Tensor, sampling: RowSampling) -> Tensor:
        """Sequential temperature scaling: float32 [r, K]. logit: float32 [r, K]."""
        greedy, sampled = self.calibration
        own = torch.where((sampling.temperature == 0.0)[:, None], greedy, sampled)
        return torch.sigmoid(logit / own)
