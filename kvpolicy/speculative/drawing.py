"""Draws of a drafter: a token per request, and the law that it was drawn from, from the same numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicy.kernels.sampling import first_of_highest, normalised, scaled
from kvpolicy.sampling import Role
from kvpolicy.speculative import streams


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How the tokens of each request are chosen, as ``SamplingParams`` says. seeds, top_k: int64 [r].
    temperature (0: greedy), top_p: float64 [r]."""

    seeds: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor

    def repeated(self, times: int) -> RowSampling:
        """Each request ``times`` times in a row, for as many rows of logits."""
        parts = (self.seeds, self.temperature, self.top_k, self.top_p)
        return RowSampling(*(part.repeat_interleave(times) for part in parts))


def draw(
    scores: Tensor,
    candidates: Tensor | None,
    sampling: RowSampling,
    anchors: Tensor,
    distance: int,
    coupled: bool,
) -> tuple[Tensor, Tensor]:
    """Draw the token at ``anchor + distance`` of each request: (tokens int64 [r], its law float64 [r, c]).

    scores: float32 [r, c], logits of the ``candidates`` (int64 [r, c], distinct) or, where they are None,
    of the vocabulary. The law is the softmax at the request's temperature, without its top-k and top-p;
    greedy requests take the first of the highest scores, with all mass on it. coupled: with the
    noise of the target's own choice at that position, so that equal laws choose equal tokens.
    """
    role = Role.TARGET if coupled else Role.DRAFT
    distances = torch.full_like(anchors, distance)
    if candidates is None:
        noise = streams.gumbel(sampling.seeds, anchors, distances, role, scores.shape[-1])
    else:
        noise = streams.gumbel_at(sampling.seeds, anchors, distances, role, candidates)
    from_highest = scaled(scores, sampling.temperature)
    greedy = (sampling.temperature == 0.0)[:, None]
    chosen = first_of_highest(torch.where(greedy, scores.double(), from_highest + noise))[:, None]
    only = torch.zeros_like(from_highest).scatter_(1, chosen, 1.0)
    law = torch.where(greedy, only, normalised(from_highest.exp()))
    tokens = chosen if candidates is None else candidates.gather(1, chosen)
    return tokens[:, 0], law
