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

    noise: Gumbel, float64 [r, K, c], over candidates or vocabulary, zero for greedy requests. Philox in
    plain torch is some hundred small operations, so it is called once for a block, not once a token.
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
        return _made(sampling, noise.view(-1, tokens, vocab))

    @staticmethod
    def of_candidates(
        sampling: RowSampling, anchors: Tensor, candidates: Tensor, coupled: bool
    ) -> Draws:
        """candidates: int64 [r, K, c], distinct."""
        seeds, at, distances, role = _flat(sampling, anchors, candidates.shape[1], coupled)
        noise = streams.gumbel_at(seeds, at, distances, role, candidates.flatten(0, 1))
        return _made(sampling, noise.view(candidates.shape))

    def choose(self, scores: Tensor, step: int) -> Tensor:
        """The column that each row draws: int64 [r]. Of equal scores the first.

        scores: float32 [r, c], logits of token ``step`` (0..K-1).
        """
        return first_of_highest(scaled(scores, self.sampling.temperature) + self.noise[:, step])

    def laws(self, scores: Tensor, columns: Tensor) -> Tensor:
        """What the columns were drawn from: float64 [r, K, c], all at once behind the walk.

        scores: float32 [r, K, c]; columns: int64 [r, K].
        """
        heat = self.sampling.temperature.repeat_interleave(scores.shape[1])
        law = normalised(scaled(scores.flatten(0, 1), heat).exp()).view(scores.shape)
        only = torch.zeros_like(law).scatter_(2, columns[..., None], 1.0)
        return torch.where((self.sampling.temperature == 0.0)[:, None, None], only, law)


def _made(sampling: RowSampling, noise: Tensor) -> Draws:
    """Greedy requests, whose scores are not scaled either, have no noise."""
    greedy = (sampling.temperature == 0.0)[:, None, None]
    return Draws(sampling, torch.where(greedy, 0.0, noise))


def _flat(
    sampling: RowSampling, anchors: Tensor, tokens: int, coupled: bool
) -> tuple[Tensor, Tensor, Tensor, Role]:
    """Seeds, anchors and distances, int64 [r * K], and the role."""
    distances = torch.arange(1, tokens + 1, device=anchors.device).repeat(anchors.shape[0])
    role = Role.TARGET if coupled else Role.DRAFT
    seeds = sampling.seeds.repeat_interleave(tokens)
    return seeds, anchors.repeat_interleave(tokens), distances, role
