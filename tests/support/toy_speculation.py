"""A target and a drafter that are tables, small enough to enumerate: the next token's logits depend on the
two tokens before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicy.kernels.sampling import normalised, probabilities, scaled

LAWS = ("dense", "sparse", "onehot")


@dataclass(frozen=True)
class Toy:
    """target, draft: float32 [V * V, V] logits by state. confidence: float32 [V * V], what the drafter says
    of the token that comes next; a function of the state, so never of that token."""

    target: Tensor
    draft: Tensor
    confidence: Tensor

    @property
    def width(self) -> int:
        return self.target.shape[1]

    def after(self, state: Tensor, token: Tensor) -> Tensor:
        """The state behind another token."""
        return state % self.width * self.width + token

    def candidates(self, state: Tensor) -> Tensor:
        """The two or more tokens that a sparse drafter considers: int64 [n, c]."""
        most = max(2, self.width // 2)
        return self.draft[state].topk(most, dim=-1).indices


def toy(width: int, seed: int, spread: float = 1.3) -> Toy:
    source = torch.Generator().manual_seed(seed)
    target = torch.randn(width * width, width, generator=source) * spread
    draft = target + torch.randn(width * width, width, generator=source) * spread
    confidence = torch.rand(width * width, generator=source)
    return Toy(target, draft, confidence)


def target_law(toy: Toy, temperature: float, top_k: int, top_p: float) -> Tensor:
    """float64 [V * V, V]: the production law of every state."""
    many = toy.target.shape[0]
    return probabilities(
        toy.target,
        torch.full((many,), temperature, dtype=torch.float64),
        torch.full((many,), top_k),
        torch.full((many,), top_p, dtype=torch.float64),
    )


def draft_law(toy: Toy, law: str, temperature: float) -> tuple[Tensor | None, Tensor]:
    """(candidates [V * V, c] or None, probabilities [V * V, c]) of every state; one-hot: the likeliest."""
    states = torch.arange(toy.draft.shape[0])
    if law == "dense":
        heat = torch.full((states.numel(),), temperature, dtype=torch.float64)
        return None, normalised(scaled(toy.draft, heat).exp())
    if law == "sparse":
        ids = toy.candidates(states)
        heat = torch.full((states.numel(),), temperature, dtype=torch.float64)
        return ids, normalised(scaled(toy.draft.gather(1, ids), heat).exp())
    ids = toy.draft.argmax(dim=-1, keepdim=True)
    return ids, torch.ones_like(ids, dtype=torch.float64)
