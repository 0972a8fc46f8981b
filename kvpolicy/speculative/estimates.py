"""What older steps say about the next one, per seat: survivals, acceptance by position, misses per row.

Everything here is known before a step drafts, so a schedule may use all of it. A seat that another
request takes over starts anew: every row carries the generation of the request that wrote it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.speculative.schedule import UNIT

# Weights of one step in the running means: of a seat, of all seats together, and of the way back of a
# position that was not verified, without which one once given up would never be tried again. At 0.005
# a drafter that always fails is tried in one step of five where a batch of eight rows costs a fifth more.
SEAT, ALL, FORGET = 0.1, 0.05, 0.005
# What a further verify row misses of what the first one does, before it is measured: eight rows of a trained
# small model select 2 to 3 times the records of one.
SHARE = 0.2


class Estimates:
    """Device tensors of ``seats`` rows and one that is nobody's (index -1). K = ``width``.

    survival: int64 [seats + 1, K], of the seat's last step, in units of 2^-20. acceptance: float64, the
    chance that token k is kept if it is verified and those before it were kept. misses: float64 [seats
    + 1], records that a step fetches which verifies nothing; share: float64 [], what each further row
    adds to that, as a share of it (rows of a request select alike, so below 1). ``mean_acceptance``
    [K] and ``mean_misses`` [] are over all seats: what a new request begins with.
    """

    def __init__(self, seats: int, width: int, device: torch.device) -> None:
        shape = (seats + 1, width)
        self.survival = torch.full(shape, UNIT, dtype=torch.int64, device=device)
        self.acceptance = torch.ones(shape, dtype=torch.float64, device=device)
        self.misses = torch.zeros(seats + 1, dtype=torch.float64, device=device)
        self.generation = torch.full((seats + 1,), -1, dtype=torch.int64, device=device)
        self.mean_acceptance = torch.ones(width, dtype=torch.float64, device=device)
        self.mean_misses = torch.zeros((), dtype=torch.float64, device=device)
        self.share = torch.full((), SHARE, dtype=torch.float64, device=device)

    def begin(self, seats: Tensor, generations: Tensor) -> None:
        """Forget what other requests left on these seats. seats: int64 [r], -1 for nobody.
        generations: int64 [r], from 0, another number for every request that takes a seat."""
        same = self.generation[seats] == generations
        kept = same[:, None]
        self.survival[seats] = torch.where(kept, self.survival[seats], UNIT)
        self.acceptance[seats] = torch.where(kept, self.acceptance[seats], self.mean_acceptance)
        self.misses[seats] = torch.where(same, self.misses[seats], self.mean_misses)
        self.generation[seats] = generations

    def note(self, seats: Tensor, lengths: Tensor, accepted: Tensor, misses: Tensor) -> None:
        """What a step brought. lengths, accepted: int64 [r], verified and kept tokens. misses: int64 [r],
        records that the request fetched in it, for 1 + length rows."""
        live = seats >= 0
        index = torch.arange(self.survival.shape[1], device=seats.device)
        kept = index < accepted[:, None]
        # A token tells something if it was verified and all before it were kept.
        verified = index < lengths[:, None]
        seen = (index <= accepted[:, None]) & verified & live[:, None]
        old = self.acceptance[seats]
        told = old + SEAT * (kept.double() - old)
        back = torch.where(verified, old, old + FORGET * (self.mean_acceptance - old))
        self.acceptance[seats] = torch.where(seen, told, back)
        self._note_all(seen, kept, verified & live[:, None])
        self._note_misses(seats, live, lengths, misses)

    def _note_all(self, seen: Tensor, kept: Tensor, verified: Tensor) -> None:
        """Acceptance over all seats: ratios of whole sums."""
        tries, hits = seen.long().sum(0), (seen & kept).long().sum(0)
        mean = self.mean_acceptance
        told = mean + ALL * (hits.double() / tries.clamp_min(1).double() - mean)
        back = torch.where(verified.any(0), mean, mean + FORGET * (1.0 - mean))
        self.mean_acceptance.copy_(torch.where(tries > 0, told, back))

    def _note_misses(self, seats: Tensor, live: Tensor, lengths: Tensor, misses: Tensor) -> None:
        """misses = first (1 + share length): the share by least squares through what each seat's first row
        was thought to miss, then that from the share."""
        first = self.misses[seats].round().long()
        further = torch.where(live, lengths * (misses - first), 0).sum()
        scale = torch.where(live, lengths * lengths * first, 0).sum()
        found = (further.double() / scale.clamp_min(1).double()).clamp(0.0, 1.0)
        told = self.share + ALL * (found - self.share)
        self.share.copy_(torch.where(scale > 0, told, self.share))
        own = misses.double() / (1.0 + self.share * lengths)
        self.misses[seats] = self.misses[seats] + SEAT * (own - self.misses[seats])
        count, total = live.sum(), torch.where(live, own.round().long(), 0).sum()
        each = total.double() / count.clamp_min(1).double()
        told = self.mean_misses + ALL * (each - self.mean_misses)
        self.mean_misses.copy_(torch.where(count > 0, told, self.mean_misses))
