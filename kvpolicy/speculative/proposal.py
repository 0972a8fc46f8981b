"""What a drafter hands over: tokens, the law that they were drawn from, and how sure it is.

r requests, K proposed tokens each, c candidates per token, V tokens in the vocabulary. Token k of a
request (k = 0..K-1) stands for position ``anchor + 1 + k``, where the anchor is the last committed
token's position. Everything lies on the device and has a fixed shape, so that a cycle can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class OneHot:
    """The token was certain given the tokens before it: a greedy drafter, or one whose law was not
    kept. It is then accepted with the target's own probability."""


@dataclass(frozen=True, slots=True)
class Sparse:
    """A law over a few candidates, zero elsewhere.

    candidates: int64 [r, K, c], ids in [0, V), distinct where the probability is not zero.
    probabilities: float32 or float64 [r, K, c], each row sums to one.
    """

    candidates: Tensor
    probabilities: Tensor


@dataclass(frozen=True, slots=True)
class Dense:
    """A law over the vocabulary. probabilities: float32 or float64 [r, K, V], each row sums to one."""

    probabilities: Tensor


Law = OneHot | Sparse | Dense


@dataclass(frozen=True, slots=True)
class Proposal:
    """K tokens for each of r requests.

    tokens: int64 [r, K]. law: what token k was drawn from, given the tokens before it; computed from
    the numbers of the draw itself, at the draft's own temperature (greedy requests of a mixed batch:
    all mass on the token). confidence: float32 [r, K], an estimate of P(token k is accepted, given that
    those before it are), or None. It must be a function of tokens 0..k-1, never of token k or later
    ones: a cut that looks at its own token changes the law of the output.
    """

    tokens: Tensor
    law: Law
    confidence: Tensor | None = None

    @property
    def width(self) -> int:
        """K, the proposed tokens per request."""
        return self.tokens.shape[1]
