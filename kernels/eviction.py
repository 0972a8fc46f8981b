"""Eviction rules of a hot cache: which slots to give to new rows.

A rule is a *key function* over one cache's slots. Of the candidates (occupied, not selected by the
current call) those with the smallest key are the victims, ties go to the lowest slot. Keys are
integers and depend on nothing but their inputs, so that live runs, replays and kernels agree.

Free slots are not a rule's business: the cache uses them first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# A CLOCK sweep spares slots used within this many steps on its first lap. On traces of tiny-dsa at
# 2 x top-k rows it misses 11.85 %, exact LRU 11.23 % (training/evaluate.py; table in the model card).
CLOCK_SPARE_STEPS = 5
# Odd multipliers of the counter-based draw.
DRAW_SLOT, DRAW_STEP, DRAW_CALL = 2654435761, 40503, 2246822519


def stamp_of(step: int, hit: bool) -> int:
    """Stamp of a row used at ``step``: hits rank above rows loaded in the same step (as SGLang's
    LRU order: stale, loaded, hits)."""
    return 2 * step + (1 if hit else 0)


@dataclass(slots=True)
class SweepState:
    """What a cache keeps between evictions, under every rule.

    hand: the slot after the last victim in key order, in [0, capacity). draws: how often victims
    were asked for.
    """

    hand: int = 0
    draws: int = 0


Key = Callable[[Tensor, int, int, int], Tensor]


@dataclass(frozen=True, slots=True)
class EvictionRule:
    """A named rule; :func:`register` makes it known.

    touch: a hit renews the stamp (:func:`stamp_of`; larger = used later).
    key(stamp int32 [cap], step, hand, draws) -> int64 [cap]: the smallest go first. hand and draws
    as in :class:`SweepState`, draws counting this call.
    device_key: the same function for the Triton backend, a ``@triton.jit`` function
    (slot, stamp, capacity, step, hand, draws) -> key of one slot, all int64. Without it the rule
    runs on the reference only.
    """

    name: str
    touch: bool
    key: Key
    device_key: Any = None

    def victims(
        self, stamp: Tensor, candidate: Tensor, count: int, step: int, state: SweepState
    ) -> Tensor:
        """The ``count`` candidates (fewer if there are fewer) that go, in ascending slot order.

        stamp: int32 [cap]; candidate: bool [cap]. Moves ``state`` on. Returns int64 [<= count].
        TypeError if the key function returns anything but int64 [cap].
        """
        state.draws += 1
        keys = self.key(stamp, step, state.hand, state.draws)
        if keys.dtype != torch.int64 or keys.shape != stamp.shape:
            raise TypeError(
                f"eviction rule {self.name!r}: its key is {keys.dtype} {list(keys.shape)}, "
                f"must be torch.int64 {list(stamp.shape)}"
            )
        slots = candidate.nonzero()[:, 0]
        taken = slots[torch.sort(keys[slots], stable=True).indices[:count]]
        if taken.numel():
            state.hand = (int(taken[-1]) + 1) % stamp.shape[0]
        return taken.sort().values


def stamp_key(stamp: Tensor, step: int, hand: int, draws: int) -> Tensor:
    """The oldest stamp goes first."""
    return stamp.long()


def clock_key(stamp: Tensor, step: int, hand: int, draws: int) -> Tensor:
    """A sweep from the hand: lap 0 takes slots unused for CLOCK_SPARE_STEPS, lap 1 any."""
    cap = stamp.shape[0]
    ahead = torch.arange(cap, device=stamp.device) - hand
    distance = torch.where(ahead < 0, ahead + cap, ahead)
    spared = step - (stamp.long() >> 1) < CLOCK_SPARE_STEPS
    return torch.where(spared, distance + cap, distance)


def random_key(stamp: Tensor, step: int, hand: int, draws: int) -> Tensor:
    """A counter-based shuffle: the same call in the same history draws the same slots."""
    slots = torch.arange(stamp.shape[0], device=stamp.device)
    mixed = (slots + 1) * DRAW_SLOT ^ (step * DRAW_STEP + draws * DRAW_CALL)
    return (mixed ^ (mixed >> 15)) * DRAW_CALL & 0x7FFFFFFF


RULES: dict[str, EvictionRule] = {
    "clock": EvictionRule("clock", touch=True, key=clock_key),
    "lru": EvictionRule("lru", touch=True, key=stamp_key),
    "fifo": EvictionRule("fifo", touch=False, key=stamp_key),
    "random": EvictionRule("random", touch=True, key=random_key),
}


def register(rule: EvictionRule) -> EvictionRule:
    """Make ``rule`` known under its name and return it. ValueError if the name is taken."""
    if rule.name in RULES:
        raise ValueError(f"eviction rule {rule.name!r} is already registered; choose another name")
    RULES[rule.name] = rule
    return rule


def lookup(name: str) -> EvictionRule:
    """The rule registered under ``name``. ValueError naming the known ones otherwise."""
    if name not in RULES:
        raise ValueError(f"unknown eviction rule {name!r}; allowed: {', '.join(RULES)}")
    return RULES[name]
