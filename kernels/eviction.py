"""Eviction rules of a hot cache: which slots to give to new rows.

A rule sees one request's slots: ``stamp`` (larger = used later; see :func:`stamp_of`), ``candidate``
(may be taken: not selected by the current step), and returns ``count`` of them. Every rule is a
deterministic function of its inputs, ties go to the lowest slot, so that live runs, replays and
kernels agree. ``touch`` says whether a hit renews the stamp.

Free slots are not a rule's business: the cache uses them first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# A CLOCK sweep spares slots used within this many steps on its first lap. On traces of tiny-dsa at
# 2 x top-k rows it misses 11.85 %, exact LRU 11.23 % (training/evaluate.py; table in the model card).
CLOCK_SPARE_STEPS = 5


def stamp_of(step: int, hit: bool) -> int:
    """Stamp of a row used at ``step``: hits rank above rows loaded in the same step (as SGLang's
    LRU order: stale, loaded, hits)."""
    return 2 * step + (1 if hit else 0)


@dataclass(slots=True)
class SweepState:
    """What a rule keeps per hot cache between calls."""

    hand: int = 0
    draws: int = 0


Victims = Callable[[Tensor, Tensor, int, int, SweepState], Tensor]


@dataclass(frozen=True, slots=True)
class EvictionRule:
    """A named rule. victims(stamp [cap], candidate [cap], count, step, state) -> slots [<= count]."""

    name: str
    touch: bool
    victims: Victims


def _oldest(stamp: Tensor, candidate: Tensor, count: int, step: int, state: SweepState) -> Tensor:
    slots = candidate.nonzero()[:, 0]
    order = torch.sort(stamp[slots], stable=True).indices
    return slots[order[:count]]


def _clock(stamp: Tensor, candidate: Tensor, count: int, step: int, state: SweepState) -> Tensor:
    """Sweep from the hand: lap 1 spares slots used within CLOCK_SPARE_STEPS, lap 2 takes any."""
    cap = stamp.shape[0]
    turn = (torch.arange(cap, device=stamp.device) + state.hand) % cap
    allowed = candidate[turn]
    old = step - (stamp[turn] >> 1) >= CLOCK_SPARE_STEPS
    first = (allowed & old).nonzero()[:, 0]
    second = (allowed & ~old).nonzero()[:, 0]
    taken = torch.cat([first, second])[:count]
    if taken.numel():
        state.hand = int((turn[taken[-1]] + 1) % cap)
    return turn[taken]


def _random(stamp: Tensor, candidate: Tensor, count: int, step: int, state: SweepState) -> Tensor:
    """A counter-based shuffle: the same call in the same history draws the same slots."""
    slots = candidate.nonzero()[:, 0]
    state.draws += 1
    mixed = (slots + 1) * 2654435761 ^ (step * 40503 + state.draws * 2246822519)
    mixed = (mixed ^ (mixed >> 15)) * 2246822519 & 0x7FFFFFFF
    return slots[torch.sort(mixed, stable=True).indices[:count]]


RULES: dict[str, EvictionRule] = {
    "clock": EvictionRule("clock", touch=True, victims=_clock),
    "lru": EvictionRule("lru", touch=True, victims=_oldest),
    "fifo": EvictionRule("fifo", touch=False, victims=_oldest),
    "random": EvictionRule("random", touch=True, victims=_random),
}
