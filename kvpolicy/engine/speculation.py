"""Speculation inside a step: draft, what is verified of it, what is accepted, what the drafter keeps.

A drafter may be anybody's code. Whatever it does, the output stays what it is: proposals are only ever
compared with what the target says, and one that raises, or hands over what cannot be used, costs its
step the speculation (``failures``); after FAILURES of them the drafter is not asked again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from kvpolicy.engine.request import Request
from kvpolicy.engine.scheduler import Rows
from kvpolicy.engine.verify_schedule import VerifySchedule
from kvpolicy.errors import UserError, reason
from kvpolicy.kernels.paging import upload
from kvpolicy.memory.access import StepAccess
from kvpolicy.memory.draft_ring import DraftRings
from kvpolicy.memory.hierarchy import Hierarchy
from kvpolicy.memory.layout import RingShape
from kvpolicy.memory.step import StepMemory
from kvpolicy.models.loader import DecodeModel, DeviceModel, TappedModel
from kvpolicy.speculative.acceptance import Choose, Rule, accept, choose_greedy
from kvpolicy.speculative.checking import BadProposal, check_shape, made_safe, usable
from kvpolicy.speculative.drafter import Drafter
from kvpolicy.speculative.drawing import RowSampling
from kvpolicy.speculative.proposal import OneHot, Proposal

log = logging.getLogger(__name__)

# A drafter that has failed so often is not asked again: each failure costs a draft and a log line.
FAILURES = 16


Places = dict[tuple[int, int, bool], Proposal]
"""Where captured graphs look for what was drafted before them: by requests, rows of each, and whether
there is a confidence."""


class Counts:
    """What speculation did so far. cycles: verify steps of single requests. committed: tokens that they
    gave, the bonus token counted. proposed, verified, accepted: per position behind the anchor; proposed
    are sound tokens up to the request's limit. failures: proposals or contexts that could not be used.
    draft_seconds, verify_seconds: wall time on the host of drafting, and of steps that verified. On a
    GPU drafting counts as long as it takes to launch, and 0 where it is inside a captured graph; what the
    device then takes for it is in verify_seconds, which wait for the step."""

    def __init__(self, width: int) -> None:
        self.cycles = 0
        self.committed = 0
        self.proposed = [0] * width
        self.verified = [0] * width
        self.accepted = [0] * width
        self.failures = 0
        self.draft_seconds = 0.0
        self.verify_seconds = 0.0

    def note(self, proposed: int, verified: int, accepted: int) -> None:
        """One request's cycle."""
        self.cycles += 1
        self.committed += accepted + 1
        for counts, many in (
            (self.proposed, proposed),
            (self.verified, verified),
            (self.accepted, accepted),
        ):
            for position in range(many):
                counts[position] += 1

    @property
    def totals(self) -> tuple[int, int, int]:
        """Cycles, committed tokens, verify rows."""
        return self.cycles, self.committed, self.cycles + sum(self.verified)

    @property
    def accepted_length(self) -> float | None:
        """Tokens committed per cycle, bonus counted."""
        return self.committed / self.cycles if self.cycles else None

    def report(self) -> dict[str, object]:
        """Ready for JSON."""
        return {
            "cycles": self.cycles,
            "committed_tokens": self.committed,
            "proposed": list(self.proposed),
            "verified": list(self.verified),
            "accepted": list(self.accepted),
            "drafter_failures": self.failures,
            "draft_ms": self.draft_seconds * 1e3,
            "verify_ms": self.verify_seconds * 1e3,
        }


@dataclass(frozen=True, slots=True)
class Drafts:
    """Proposals of some requests. anchors: int64 [r], where their last committed tokens stand. lengths:
    how many proposed tokens of each are verified. proposed: how many sound ones there are of each, up to
    its limit. seats: int64 [r]. seconds: what drafting took."""

    requests: tuple[Request, ...]
    anchors: Tensor
    sampling: RowSampling
    proposal: Proposal
    lengths: tuple[int, ...]
    proposed: tuple[int, ...]
    seats: Tensor
    seconds: float = 0.0

    def fill(self, tokens: Tensor, rows: Rows) -> Tensor:
        """The tokens of a step's rows with the proposed ones in their place."""
        pairs = zip(rows.segments, self.lengths, strict=False)
        places = [
            (segment.start + 1 + i, r, i)
            for r, (segment, length) in enumerate(pairs)
            for i in range(length)
        ]
        if places:
            row, request, which = upload(list(zip(*places, strict=True)), tokens.device)
            tokens[row] = self.proposal.tokens[request, which]
        return tokens


@dataclass(frozen=True, slots=True)
class Verdict:
    """accepted: proposed tokens that each request keeps; tokens: these and the one behind them."""

    accepted: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]


class Speculator:
    """Drafts and verifies for an engine. width: K, proposed tokens per request at most.

    choose: plain sampling of the backend. UserError for a drafter that does not fit the model.
    """

    def __init__(
        self, drafter: Drafter, model: DecodeModel, rule: Rule, width: int | None, choose: Choose
    ) -> None:
        if width is not None and width > drafter.tokens:
            raise UserError(
                f"num_draft_tokens = {width}: drafter {drafter.name!r} proposes up to {drafter.tokens}"
            )
        if drafter.taps and not isinstance(model, TappedModel):
            raise UserError(
                f"drafter {drafter.name!r}: reads layers, which this model does not show"
            )
        layers = model.geometry.num_layers
        if any(not -1 <= tap < layers for tap in drafter.taps):
            raise UserError(f"drafter {drafter.name!r}: taps {drafter.taps} of {layers} layers")
        self.drafter = drafter
        self.width = width or drafter.tokens
        self.counts = Counts(self.width)
        self.cap = self.width
        self.schedule: VerifySchedule | None = None
        self._rings: DraftRings | None = None
        self._model, self._rule, self._choose = model, rule, choose

    def attach(self, memory: Hierarchy, schedule: VerifySchedule | None) -> None:
        """Use the rings of this memory, and a schedule of lengths (None: all that is proposed)."""
        self._rings, self.schedule = memory.tables.rings, schedule

    @property
    def ring(self) -> RingShape | None:
        """What the memory keeps for the drafter per request."""
        own = self.drafter
        return RingShape(own.window - 1, own.ring_width) if own.ring_width else None

    @property
    def active(self) -> bool:
        """Whether the drafter is still asked."""
        return self.counts.failures < FAILURES

    def limit(self, tokens: int | None) -> None:
        """Verify at most so many proposed tokens of a request from now on, None: as many as there are."""
        self.cap = self.width if tokens is None else min(tokens, self.width)

    # --- before the step -------------------------------------------------------------------------

    def draft(self, requests: Sequence[Request], memory: Hierarchy) -> Drafts:
        """Proposals for the next rows of decoding requests, and how much of them to verify."""
        started = time.perf_counter()
        device = memory.arena.device
        limits = self.limits(requests, memory)
        rows = [
            (memory.requests[r.id].seat, r.computed, r.token_at(r.computed), limit, r.id)
            for r, limit in zip(requests, limits, strict=True)
        ]
        columns = upload(list(zip(*rows, strict=True)), device)
        seats, anchors, tokens, most, numbers = columns
        sampling = sampling_of(requests, device)
        proposal, lengths = None, [0] * len(requests)
        proposed = lengths
        if self.active and max(limits):
            proposal = self.propose(memory, seats, anchors, tokens, sampling)
        if proposal is None:
            proposal = Proposal(tokens.new_zeros((len(requests), 0)), OneHot())
        else:
            proposal, found, sound = self.lengths(proposal, seats, numbers, most)
            lengths, fine = torch.stack([found, sound.long()]).tolist()
            width = proposal.width
            proposed = [min(n, width) * ok for n, ok in zip(limits, fine, strict=True)]
            if not all(fine):
                self.failed("proposed tokens or probabilities that are none")
        seconds = time.perf_counter() - started
        self.counts.draft_seconds += seconds
        told = tuple(lengths), tuple(proposed)
        return Drafts(tuple(requests), anchors, sampling, proposal, *told, seats, seconds)

    def limits(
        self, requests: Sequence[Request], memory: Hierarchy, most: int | None = None
    ) -> list[int]:
        """Most tokens to verify of each request: what it may still say, has room for, and a controller
        allows, and the schedule's width. most: what a step has room for, None: any."""
        cap = self.cap if most is None else min(self.cap, most)
        if self.schedule is not None:
            cap = self.schedule.cap(len(requests), cap)
        return [
            max(0, min(cap, r.tokens_left - 1, memory.requests[r.id].reserved - r.computed - 1))
            for r in requests
        ]

    def lengths(
        self, proposal: Proposal, seats: Tensor, numbers: Tensor, limits: Tensor
    ) -> tuple[Proposal, Tensor, Tensor]:
        """The proposal made safe, how much of it is verified (int64 [r]), and whether each request's was
        sound (bool [r]). numbers: of the requests. limits: int64 [r]. Waits for nothing."""
        sound = usable(proposal, self._model.vocab) | (limits == 0)
        found = torch.where(sound, limits, 0).clamp_max(proposal.width)
        proposal = made_safe(proposal, sound & (limits > 0))
        if self.schedule is not None and proposal.width:
            found = self.schedule.lengths(seats, numbers, found, proposal.confidence)
        return proposal, found, sound

    def propose(
        self,
        memory: Hierarchy,
        seats: Tensor,
        anchors: Tensor,
        tokens: Tensor,
        sampling: RowSampling,
    ) -> Proposal | None:
        """The next K tokens of each request, None where the drafter failed. seats (-1: nobody), anchors,
        tokens: int64 [r]."""
        own, rings = self.drafter, self._rings
        if rings is None:
            context = torch.zeros((len(seats), own.window, 0), device=seats.device)
            where = seats.new_full((len(seats), own.window), -1)
        else:
            context, where = rings.read(seats, anchors)
        try:
            found = own.propose(
                tokens, anchors, context, where, sampling, self._rule is Rule.COUPLED
            )
            checked = check_shape(found, len(seats), own.tokens, self._model.vocab, anchors.device)
        except BadProposal as error:
            self.failed(str(error))
        except Exception as error:
            self.failed(reason(error))
        else:
            return first_of(checked, self.width)
        return None

    def failed(self, what: str) -> None:
        """Note that the drafter did something that is of no use."""
        self.counts.failures += 1
        log.warning("drafter %r: %s; nothing is speculated", self.drafter.name, what)
        if self.counts.failures == FAILURES:
            log.error(
                "drafter %r failed %d times: it is not asked again", self.drafter.name, FAILURES
            )

    # --- in the step -----------------------------------------------------------------------------

    def forward(self, tokens: Tensor, memory: StepAccess, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [m, V] of the wanted rows, and what the drafter reads of every row."""
        taps = self.drafter.taps
        if taps:
            assert isinstance(self._model, TappedModel)
            logits, found = self._model.forward_with_taps(tokens, memory, wanted, taps)
            assert found is not None
            return logits, found
        model = cast(DeviceModel, self._model)  # one that is not only gets steps of the host
        return model.forward(tokens, memory, wanted), tokens.float()[:, None, None]

    def verify(self, logits: Tensor, drafts: Drafts) -> Verdict:
        """Accept. logits: float32 [sum of (1 + length), V], request by request. Waits for the device."""
        lengths, width = drafts.lengths, drafts.proposal.width
        rows, start = [], 0
        for length in lengths:
            rows += [start + min(i, length) for i in range(width + 1)]
            start += 1 + length
        answers = logits[upload(rows, logits.device)].view(len(lengths), width + 1, -1)
        verified = upload(lengths, logits.device)
        accepted, last = self.accepted(
            *(answers, drafts.proposal, verified, drafts.sampling, drafts.anchors),
            any(request.params.temperature > 0.0 for request in drafts.requests),
        )
        kept = torch.cat([accepted[:, None], last[:, None], drafts.proposal.tokens], dim=1).tolist()
        for proposed, length, (count, *_) in zip(drafts.proposed, lengths, kept, strict=True):
            self.counts.note(proposed, length, count)
        self.learn(drafts.seats, verified, accepted, width > 0)
        return Verdict(
            tuple(count for count, *_ in kept),
            tuple((*proposed[:count], token) for count, token, *proposed in kept),
        )

    def accepted(
        self,
        logits: Tensor,
        proposal: Proposal,
        lengths: Tensor,
        sampling: RowSampling,
        anchors: Tensor,
        sampled: bool,
    ) -> tuple[Tensor, Tensor]:
        """See ``kvpolicy.speculative.acceptance.accept``; rows of logits that are no numbers count as
        zeros. sampled: not all requests are greedy (which agree under every rule)."""
        finite = torch.isfinite(logits).all(dim=-1, keepdim=True)
        answers = torch.where(finite, logits, 0.0)
        rule, choose = (self._rule, self._choose) if sampled else (Rule.COUPLED, choose_greedy)
        return accept(answers, proposal, lengths, sampling, anchors, rule, choose)

    # --- behind the step -------------------------------------------------------------------------

    def learn(self, seats: Tensor, lengths: Tensor, accepted: Tensor, drafted: bool) -> None:
        """Tell the schedule what came of its lengths. Waits for nothing."""
        if self.schedule is not None and drafted:
            self.schedule.note(seats, lengths, accepted)

    def timed(
        self, width: int, rows: int, counts: Sequence[int], seconds: float, ragged: bool
    ) -> None:
        """A step has taken so many seconds, drafting included, see :meth:`VerifySchedule.timed`. counts: rows
        that each request has committed."""
        if self.schedule is not None:
            if ragged:  # all is drafted, and cut
                width = self.schedule.cap(len(counts), self.cap)
            self.schedule.timed(len(counts), width, rows, sum(counts), seconds, ragged)

    def keep_rows(
        self,
        taps: Tensor,
        seats: Tensor,
        positions: Tensor,
        stays: Tensor,
        accepted: Tensor,
        q: int,
    ) -> None:
        """As :meth:`keep`, for q rows of each request and masks of the device. stays: bool [p * q], rows that
        are committed. accepted: int64 [p]."""
        rings = self._rings
        if rings is None or not self.active:
            return
        if q > rings.rows:  # of rows that share a slot the last one
            row = torch.arange(q, device=taps.device)
            stays = stays & (row > accepted[:, None] - rings.rows).flatten()
        rings.write(seats, positions, self._context(taps, positions), stays)

    def keep(
        self,
        taps: Tensor,
        memory: StepMemory,
        requests: Sequence[Request],
        counts: Sequence[int],
    ) -> None:
        """Give the rings what the drafter keeps of committed rows: all that is accepted, of prompts the
        last ones. taps: float32 [n, m, hidden], of every row of the step. requests, counts: of each
        segment, whose it is and how many of its rows are committed."""
        rings = self._rings
        if rings is None or not self.active:
            return
        rows: list[int] = []
        for segment, request, count in zip(memory.segments, requests, counts, strict=True):
            # Rows that the prompt's end will have pushed out of the window need no context.
            least = 0 if segment.decode else request.prompt_end - rings.rows - segment.position
            first = max(0, count - rings.rows, least)
            rows.extend(range(segment.start + first, segment.start + count))
        if not rows:
            return
        index = upload(rows, taps.device)
        seats, positions = memory.seats[index], memory.positions[index]
        kept = self._context(taps[index], positions)
        rings.write(seats, positions, kept, torch.ones_like(seats, dtype=torch.bool))

    def _context(self, taps: Tensor, positions: Tensor) -> Tensor:
        """What the drafter keeps of rows: float32 [n, width], zeros where it failed."""
        shape = (len(positions), self.drafter.ring_width)
        try:
            kept = self.drafter.context(taps, positions)
            if kept.shape != shape:
                raise BadProposal(f"context() gave {list(kept.shape)}")
            return kept.float()
        except Exception as error:
            self.failed(reason(error))
            return torch.zeros(shape, device=taps.device)

    def placed(self, places: Places, size: int, q: int, proposal: Proposal) -> Proposal:
        """The proposal's tokens, and its confidence if it has one, at a place that stays, for a captured
        graph of so many requests and rows of each. A law has none: such a drafter counts as certain of its
        tokens, which keeps the target's law."""
        confidence = proposal.confidence
        key = size, q, confidence is not None
        place = places.get(key)
        if place is None:
            kept = None if confidence is None else confidence.clone()
            place = places[key] = Proposal(proposal.tokens.clone(), OneHot(), kept)
        place.tokens.copy_(proposal.tokens)
        if confidence is not None and place.confidence is not None:
            place.confidence.copy_(confidence)
        return place


def first_of(proposal: Proposal, width: int) -> Proposal:
    """The first ``width`` tokens of every request's proposal."""
    from kvpolicy.speculative.proposal import Dense, Sparse

    if proposal.width == width:
        return proposal
    law = proposal.law
    match law:
        case Sparse(candidates, drawn):
            law = Sparse(candidates[:, :width], drawn[:, :width])
        case Dense(drawn):
            law = Dense(drawn[:, :width])
        case _:
            pass
    confidence = proposal.confidence
    cut = None if confidence is None else confidence[:, :width]
    return Proposal(proposal.tokens[:, :width], law, cut)


def sampling_of(requests: Sequence[Request], device: torch.device) -> RowSampling:
    """How the tokens of requests are chosen, on the device."""
    params = [request.params for request in requests]
    seeds, top_k = upload([[p.seed for p in params], [p.top_k for p in params]], device)
    floats = torch.tensor(
        [[p.temperature for p in params], [p.top_p for p in params]], dtype=torch.float64
    ).to(device, non_blocking=True)
    return RowSampling(seeds, floats[0], top_k, floats[1])
