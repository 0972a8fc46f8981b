"""Choosing a token from one row of logits: greedy, or sampled with counter-based noise.

Sampling is Gumbel-max: argmax(logit / temperature + Gumbel noise) draws from the softmax
(Gumbel, 1954; Maddison et al., 2014). The noise of a token depends on (request seed, position,
role, token id) only, so a request draws the same tokens alone, in any batch and after preemption.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from kvpolicy.config import SamplingParams
from kvpolicy.kernels.philox import uniforms

Row = NDArray[np.float64]


class Role(IntEnum):
    """Separate random streams of one request at one position."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def gumbel(seed: int, position: int, role: Role, count: int) -> Row:
    """Standard Gumbel noise for ``count`` token ids: float64 [count]."""
    noise: Row = -np.log(-np.log(uniforms(seed, position, role, count)))
    return noise


def allowed(logits: Row, params: SamplingParams) -> NDArray[np.bool_]:
    """Token ids that top-k and top-p leave. logits: float64 [vocab], already divided by temperature.

    top-k keeps the k largest, ties to the lowest id. top-p keeps the shortest prefix, in order of
    probability within the top-k, that reaches top_p.
    """
    keep = np.ones(logits.shape[0], dtype=bool)
    if not 0 < params.top_k < logits.shape[0] and params.top_p >= 1.0:
        return keep
    order = np.argsort(-logits, kind="stable")
    if 0 < params.top_k < logits.shape[0]:
        order = order[: params.top_k]
    if params.top_p < 1.0:
        weight = np.exp(logits[order] - logits[order[0]])
        before = np.concatenate([[0.0], np.cumsum(weight)[:-1]])
        order = order[before < params.top_p * weight.sum()]
    keep[:] = False
    keep[order] = True
    return keep


def choose_token(row: NDArray[np.float32], params: SamplingParams, position: int) -> int:
    """The token at ``position`` (its index in the request). row: float32 [vocab], finite."""
    if params.temperature == 0.0:
        return int(np.argmax(row))  # the first of equal maxima: the lowest id
    # From the maximum down, so that the smallest temperature overflows to -inf, never to +inf.
    with np.errstate(over="ignore"):
        logits = (row.astype(np.float64) - row.max()) / params.temperature
    noisy = logits + gumbel(params.seed, position, Role.TARGET, logits.shape[0])
    return int(np.argmax(np.where(allowed(logits, params), noisy, -np.inf)))
