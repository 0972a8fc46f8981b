"""A block's tokens drawn one after the other, with all random numbers drawn at once before."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicy.kernels.sampling import first_of_highest, normalised, scaled
from kvpolicy.sampling import Role
from kvpolicy.speculative import streams
from kvpolicy.speculative.drawing import RowSampling


@dataclass(frozen=True, slots=True)
class Draws:
    """The same rule as :func:`kvpolicy.speculative.drawing.draw`, for K tokens of r requests.

    noise: Gumbel, float64 [r, K, c], over candidates or vocabulary. Philox in plain torch is some hundred
    small operations, so it is called once for a block, not once a token.
    """

    sampling: RowSampling
    noise: Tensor

    @staticmethod
    def of_vocabulary(
        sampling: RowSampling, anchors: Tensor, tokens: int, vocab: int, coupled: bool
    ) -> Draws:
        """anchors: int64 [r], positions of the last committed tokens. tokens: K."""
        seeds, at, distances, role = _flat(sampling, anchors, tokens, coupled)
        noise = streams.gumbel(seeds, at, distances, role, vocab)
        return Draws(sampling, noise.view(-1, tokens, vocab))

    @staticmethod
    def of_candidates(
        sampling: RowSampling, anchors: Tensor, candidates: Tensor, coupled: bool
    ) -> Draws:
        """candidates: int64 [r, K, c], distinct."""
        seeds, at, distances, role = _flat(sampling, anchors, candidates.shape[1], coupled)
        noise = streams.gumbel_at(seeds, at, distances, role, candidates.flatten(0, 1))
        return Draws(sampling, noise.view(candidates.shape))

    def choose(self, scores: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """A column per row, and the law that it was drawn from: int64 [r] and float64 [r, c].

        scores: float32 [r, c], logits of token ``step`` (0..K-1). Of equal scores the first column.
        """
        from_highest = scaled(scores, self.sampling.temperature)
        greedy = (self.sampling.temperature == 0.0)[:, None]
        noisy = from_highest + self.noise[:, step]
        column = first_of_highest(torch.where(greedy, scores.double(), noisy))
        only = torch.zeros_like(from_highest).scatter_(1, column[:, None], 1.0)
        return column, torch.where(greedy, only, normalised(from_highest.exp()))


def _flat(
    sampling: RowSampling, anchors: Tensor, tokens: int, coupled: bool
) -> tuple[Tensor, Tensor, Tensor, Role]:
    """Seeds, anchors and distances, int64 [r * K], and the role."""
    distances = torch.arange(1, tokens + 1, device=anchors.device).repeat(anchors.shape[0])
    role = Role.TARGET if coupled else Role.DRAFT
    seeds = sampling.seeds.repeat_interleave(tokens)
    return seeds, anchors.repeat_interleave(tokens), distances, role
