"""From the logits of the verify rows to kept tokens: what a drafter proposes becomes what a request says.

The target's law of every row, the bonus row included, is that of plain sampling, and the token behind a
prefix that was kept to the end of what was verified is chosen by the code of plain sampling with its
random numbers: a request that verifies nothing says what it would say without speculation.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import torch
from torch import Tensor

from kvpolicy.config import SamplingParams
from kvpolicy.kernels import acceptance as rules
from kvpolicy.kernels.sampling import first_of_highest, probabilities
from kvpolicy.sampling import Role, choose_token
from kvpolicy.speculative import streams
from kvpolicy.speculative.drawing import RowSampling
from kvpolicy.speculative.proposal import Dense, Proposal, Sparse

Choose = Callable[[Tensor, RowSampling, Tensor], Tensor]
"""Plain sampling of rows: (logits float32 [n, V], how [n], positions int64 [n]) -> tokens int64 [n]."""


class Rule(StrEnum):
    """How proposals are verified. Requests at temperature 0 are greedy under every rule."""

    STANDARD = "standard"
    BLOCK = "block"
    COUPLED = "coupled"


def choose_on_host(logits: Tensor, sampling: RowSampling, positions: Tensor) -> Tensor:
    """Tokens as the reference backend chooses them, row by row on the host. A row that is not all
    finite gets token 0."""
    rows = logits.cpu().numpy()
    finite = torch.isfinite(logits).all(dim=-1).tolist()
    numbers = (sampling.seeds, sampling.temperature, sampling.top_k, sampling.top_p, positions)
    tokens = []
    for i, (seed, heat, top_k, top_p, at) in enumerate(
        zip(*(x.tolist() for x in numbers), strict=True)
    ):
        params = SamplingParams(seed=seed, temperature=heat, top_k=top_k, top_p=top_p)
        tokens.append(choose_token(rows[i], params, at) if finite[i] else 0)
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)


def choose_greedy(logits: Tensor, sampling: RowSampling, positions: Tensor) -> Tensor:
    """Tokens where every request is known to be greedy, on any backend."""
    return first_of_highest(logits)


def choose_on_device(logits: Tensor, sampling: RowSampling, positions: Tensor) -> Tensor:
    """Tokens as the Triton backend chooses them; no number visits the host."""
    from kvpolicy.kernels.triton.sampling import sample

    heat, top_k, top_p = sampling.temperature, sampling.top_k, sampling.top_p
    return sample(logits, sampling.seeds, positions, heat, top_k, top_p)


def accept(
    logits: Tensor,
    proposal: Proposal,
    lengths: Tensor,
    sampling: RowSampling,
    anchors: Tensor,
    rule: Rule,
    choose: Choose,
) -> tuple[Tensor, Tensor]:
    """How many proposed tokens each request keeps, and the token behind them.

    logits: float32 [r, K + 1, V]; row i is the target's answer behind the anchor and i proposed tokens,
    so it decides position ``anchor + 1 + i``; rows beyond a request's length are not looked at, but
    must be numbers. lengths: int64 [r], how many proposed tokens were verified, 0..K; it may depend on
    a proposed token only as :mod:`kvpolicy.speculative.schedule` does. anchors: int64 [r], positions
    of the last committed tokens. choose: plain sampling of the backend. Returns (accepted int64 [r],
    next_token int64 [r]): tokens[:accepted] are kept, next_token follows. The caller cuts at stop
    bytes. Fixed shapes, no wait for the device with :func:`choose_on_device` (which also runs the fused
    kernel), the same bits in any batch.
    """
    if rule is Rule.COUPLED:
        return accept_chosen(logits, proposal.tokens, lengths, sampling, anchors, choose)
    count, width = proposal.tokens.shape
    last = rules.row_of(logits, lengths)
    bonus = choose(last, sampling, anchors + 1 + lengths)
    if width == 0:
        return torch.zeros_like(lengths), bonus
    each = sampling.repeated(width)
    verified = logits[:, :width].reshape(count * width, -1)
    target = probabilities(verified, each.temperature, each.top_k, each.top_p)
    target = target.view(count, width, -1)
    candidates, proposed = law_of(proposal)
    if choose is choose_on_device:
        from kvpolicy.kernels.triton.acceptance import accept_and_draw

        return accept_and_draw(
            target,
            proposal.tokens,
            candidates,
            proposed,
            lengths,
            sampling.seeds,
            anchors,
            bonus,
            roles=(int(Role.ACCEPT), int(Role.RESIDUAL)),
            shift=streams.ROLE_BITS,
            block=rule is Rule.BLOCK,
        )
    uniform = streams.uniforms(sampling.seeds, anchors, width, Role.ACCEPT)
    accepted, weight, own = rules.accept(
        target, proposal.tokens, candidates, proposed, lengths, uniform, rule is Rule.BLOCK
    )
    noise = streams.gumbel(sampling.seeds, anchors, accepted + 1, Role.RESIDUAL, logits.shape[-1])
    corrected = rules.draw(weight, own, noise)
    return accepted, torch.where(accepted == lengths, bonus, corrected)


def accept_chosen(
    logits: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    sampling: RowSampling,
    anchors: Tensor,
    choose: Choose,
) -> tuple[Tensor, Tensor]:
    """Keep what plain sampling would have said: greedy requests, and coupled ones. The result is that
    of decoding without a drafter, bit for bit, whatever was proposed and verified."""
    count, rows, vocabulary = logits.shape
    positions = anchors[:, None] + 1 + torch.arange(rows, device=logits.device)
    flat = logits.reshape(count * rows, vocabulary)
    chosen = choose(flat, sampling.repeated(rows), positions.reshape(-1)).view(count, rows)
    accepted = rules.agreeing(tokens, chosen, lengths)
    return accepted, rules.row_of(chosen, accepted)


def law_of(proposal: Proposal) -> tuple[Tensor | None, Tensor]:
    """(candidates [r, K, c] or None for the vocabulary, probabilities [r, K, c])."""
    match proposal.law:
        case Sparse(candidates, drawn):
            return candidates, drawn
        case Dense(drawn):
            return None, drawn
        case _:
            tokens = proposal.tokens[..., None]
            return tokens, torch.ones_like(tokens, dtype=torch.float64)
