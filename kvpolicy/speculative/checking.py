"""Whether a proposal can be used: a drafter's mistake must cost speed only, never a token."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.speculative.proposal import Dense, OneHot, Proposal, Sparse

# A law's mass may miss one by this much: float32 sums of a large vocabulary.
SLACK = 1e-3


class BadProposal(ValueError):
    """A proposal whose shape or kind is wrong: nothing of it can be used."""


def check_shape(
    proposal: object, requests: int, width: int, vocab: int, device: torch.device
) -> Proposal:
    """The proposal, if it has the form that it should have, on this device. BadProposal, saying what is
    wrong, if not."""
    if not isinstance(proposal, Proposal):
        raise BadProposal(f"of type {type(proposal).__name__}, not Proposal")
    tokens, law = proposal.tokens, proposal.law
    _expect("tokens", tokens, (requests, width), (torch.int64,))
    floats = (torch.float32, torch.float64)
    match law:
        case OneHot():
            pass
        case Sparse(candidates, drawn):
            _expect("candidates", candidates, (requests, width, None), (torch.int64,))
            _expect("probabilities", drawn, tuple(candidates.shape), floats)
        case Dense(drawn):
            _expect("probabilities", drawn, (requests, width, vocab), floats)
        case _:
            raise BadProposal(f"a law of type {type(law).__name__}")
    if proposal.confidence is not None:
        _expect("confidence", proposal.confidence, (requests, width), floats)
    for tensor in (tokens, proposal.confidence, *_tensors(law)):
        if tensor is not None and tensor.device != device:
            raise BadProposal(f"a tensor on {tensor.device}, not on {device}")
    return proposal


def _tensors(law: OneHot | Sparse | Dense) -> tuple[Tensor, ...]:
    match law:
        case Sparse(candidates, drawn):
            return (candidates, drawn)
        case Dense(drawn):
            return (drawn,)
    return ()


def _expect(
    name: str, value: object, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    if not isinstance(value, Tensor):
        raise BadProposal(f"{name} is {type(value).__name__}, not a tensor")
    fits = value.dim() == len(shape) and all(
        want in (None, have) for want, have in zip(shape, value.shape, strict=True)
    )
    if not fits or value.dtype not in dtypes:
        raise BadProposal(
            f"{name} is {value.dtype} {list(value.shape)}, not {dtypes[0]} {list(shape)}"
        )


def usable(proposal: Proposal, vocab: int) -> Tensor:
    """Which requests' proposals have sound numbers: bool [r]. Waits for nothing."""
    good = _within(proposal.tokens, vocab)
    match proposal.law:
        case Sparse(candidates, drawn):
            good &= _within(candidates.flatten(1), vocab) & _is_law(drawn)
        case Dense(drawn):
            good &= _is_law(drawn)
        case _:
            pass
    if proposal.confidence is not None:
        good &= torch.isfinite(proposal.confidence).all(dim=1)
    return good


def _within(ids: Tensor, vocab: int) -> Tensor:
    return ((ids >= 0) & (ids < vocab)).all(dim=1)


def _is_law(drawn: Tensor) -> Tensor:
    mass = drawn.double().sum(dim=-1)
    return ((drawn >= 0).all(dim=-1) & ((mass - 1.0).abs() <= SLACK)).all(dim=1)


def made_safe(proposal: Proposal, good: Tensor) -> Proposal:
    """The proposal with harmless numbers where it is of no use (its length must then be 0)."""

    def cleaned(values: Tensor, instead: float) -> Tensor:
        return torch.where(good.view(-1, *[1] * (values.dim() - 1)), values, instead)

    law = proposal.law
    match law:
        case Sparse(candidates, drawn):
            law = Sparse(cleaned(candidates, 0), cleaned(drawn, 0.0))
        case Dense(drawn):
            law = Dense(cleaned(drawn, 0.0))
        case _:
            pass
    confidence = proposal.confidence
    return Proposal(
        cleaned(proposal.tokens, 0), law, None if confidence is None else cleaned(confidence, 0.0)
    )
