"""Eviction rules of a hot cache: which slots to give to new rows.

A rule is a *key function* over one cache's slots, or the CLOCK sweep. Of the candidates (occupied, not
selected by the current call) those with the smallest key are the victims, ties go to the lowest slot.
Keys are integers and depend on nothing but their inputs, so that live runs, replays and kernels agree.

CLOCK (Corbato 1968, with last-use stamps in place of a reference bit) goes round from a hand: lap 1 takes
slots unused for *age* steps, lap 2 those unused for half of that, lap 3 any. The age tunes itself, per cache:
a sweep that needs lap 2 lowers it, one that ends early raises it. On selections of tiny-dsa (nine held-out
texts) at 2 x top-k rows it misses 11.1 % where exact LRU misses 10.9 %; without the lap between, 11.6 %. What
it costs follows the slots it passes, not the size of the cache.

Free slots are not a rule's business: the cache uses them first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Where CLOCK's spare age starts. It settles near 5 steps at 2 x top-k rows and near 27 at 4 x.
CLOCK_SPARE_STEPS = 5
# Above this age old and very old are alike, and an age that grew without bound in a cache that seldom
# misses would take as many sweeps of two laps to come down again.
CLOCK_MOST_STEPS = 1023
# A sweep that found its victims within this part of the cache passes too few slots to tell old from new.
CLOCK_EARLY = 3
# How much a second lap takes from the age: more than a step, since it is the long sweeps that cost.
CLOCK_LESS = 2
# Without a miss hits are stamped every so many steps only: at batch 128 the stamps are a quarter of the
# look-up's time, and a sweep asks for ages of several steps. With a miss they always are.
CLOCK_LAZY = 4
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
    were asked for. age: CLOCK spares slots used within so many steps on its first lap.
    """

    hand: int = 0
    draws: int = 0
    age: int = CLOCK_SPARE_STEPS


Key = Callable[[Tensor, int, int, int], Tensor]


@dataclass(frozen=True, slots=True)
class EvictionRule:
    """A named rule, known once it is in :data:`RULES`.

    touch: a hit renews the stamp (:func:`stamp_of`; larger = used later).
    key(stamp int32 [cap], step, hand, draws) -> int64 [cap]: the smallest go first. hand and draws
    as in :class:`SweepState`, draws counting this call. None: the CLOCK sweep.
    device_key: the same function for the Triton backend, a ``@triton.jit`` function
    (slot, stamp, capacity, step, hand, draws) -> key of one slot, all int64. Without it the rule
    runs on the reference only.
    lazy: a call without a miss renews stamps every so many steps (1: always), one with a miss always.
    """

    name: str
    touch: bool
    key: Key | None
    device_key: Any = None
    lazy: int = 1

    def __post_init__(self) -> None:
        """ValueError for a sweep without stamps, or a ``lazy`` below 1."""
        if self.key is None and not self.touch:
            raise ValueError(
                f"eviction rule {self.name!r}: a sweep (key = None) needs touch = True"
            )
        if self.lazy < 1:
            raise ValueError(f"eviction rule {self.name!r}: lazy = {self.lazy}: must be 1 or more")

    def victims(
        self,
        stamp: Tensor,
        candidate: Tensor,
        count: int,
        step: int,
        state: SweepState,
        tune: bool = True,
    ) -> Tensor:
        """The ``count`` candidates (fewer if there are fewer) that go: in the order of the sweep for
        CLOCK, else in ascending slot order.

        stamp: int32 [cap]; candidate: bool [cap]. Moves ``state`` on; tune: CLOCK's age too. Returns
        int64 [<= count]. TypeError if the key function returns anything but int64 [cap].
        """
        state.draws += 1
        keys = self._keys(stamp, step, state)
        slots = candidate.nonzero()[:, 0]
        taken = slots[torch.sort(keys[slots], stable=True).indices[:count]]
        if self.key is None and tune and count:
            _tune(state, keys[taken], count, stamp.shape[0])
        if taken.numel():
            state.hand = (int(taken[-1]) + 1) % stamp.shape[0]
        return taken if self.key is None else taken.sort().values

    def _keys(self, stamp: Tensor, step: int, state: SweepState) -> Tensor:
        if self.key is None:
            return sweep_key(stamp, step, state.hand, state.age)
        keys = self.key(stamp, step, state.hand, state.draws)
        if keys.dtype != torch.int64 or keys.shape != stamp.shape:
            raise TypeError(
                f"eviction rule {self.name!r}: its key is {keys.dtype} {list(keys.shape)}, "
                f"must be torch.int64 {list(stamp.shape)}"
            )
        return keys


def sweep_key(stamp: Tensor, step: int, hand: int, age: int) -> Tensor:
    """How many slots a sweep passes before it takes each: int64 [cap], in [0, 3 * cap)."""
    cap = stamp.shape[0]
    ahead = torch.arange(cap, device=stamp.device) - hand
    distance = torch.where(ahead < 0, ahead + cap, ahead)
    unused = step - (stamp.long() >> 1)
    laps = (unused < age).long() + (unused < (age + 1) // 2).long()
    return distance + laps * cap


def _tune(state: SweepState, passed: Tensor, count: int, capacity: int) -> None:
    """CLOCK's age after a sweep. passed: keys of the victims, ascending."""
    if passed.numel() < count or int(passed[-1]) >= capacity:
        state.age = max(1, state.age - CLOCK_LESS)
    elif (int(passed[-1]) + 1) * CLOCK_EARLY < capacity:
        state.age = min(CLOCK_MOST_STEPS, state.age + 1)


def stamp_key(stamp: Tensor, step: int, hand: int, draws: int) -> Tensor:
    """The oldest stamp goes first."""
    return stamp.long()


def random_key(stamp: Tensor, step: int, hand: int, draws: int) -> Tensor:
    """A counter-based shuffle: the same call in the same history draws the same slots."""
    slots = torch.arange(stamp.shape[0], device=stamp.device)
    mixed = (slots + 1) * DRAW_SLOT ^ (step * DRAW_STEP + draws * DRAW_CALL)
    return (mixed ^ (mixed >> 15)) * DRAW_CALL & 0x7FFFFFFF


RULES: dict[str, EvictionRule] = {
    "clock": EvictionRule("clock", touch=True, key=None, lazy=CLOCK_LAZY),
    "lru": EvictionRule("lru", touch=True, key=stamp_key),
    "fifo": EvictionRule("fifo", touch=False, key=stamp_key),
    "random": EvictionRule("random", touch=True, key=random_key),
}
