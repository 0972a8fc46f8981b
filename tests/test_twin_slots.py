"""Caches in one set of arrays behave as each alone: to the slot, the stamp and the hand."""

from __future__ import annotations

import numpy as np
import pytest

from kvpolicy.recording.caches import RULES, SlotCache
from kvpolicy.twin.slots import SlotPool

LANES, ENTRIES, K = 5, 90, 7


def both(rule: str) -> tuple[SlotPool, list[SlotCache]]:
    return SlotPool(RULES[rule], LANES, ENTRIES, ENTRIES), [
        SlotCache(RULES[rule], ENTRIES, lazy_at=lane) for lane in range(LANES)
    ]


def compare(pool: SlotPool, caches: list[SlotCache]) -> None:
    pool.check_integrity()
    for lane, cache in enumerate(caches):
        assert pool.held(lane).tolist() == cache.held.tolist()
        assert (pool.capacity[lane], pool.hand[lane], pool.age[lane], pool.draws[lane]) == (
            *(cache.capacity, cache._hand, cache._age, cache._draws),
        )


def wanted_by(random: np.random.Generator, step: int) -> list[np.ndarray]:
    """Entries near a place that moves, some anywhere; of some lanes fewer than K."""
    near = [np.unique((random.zipf(1.6, 12) + step // 3 + 11 * i) % ENTRIES) for i in range(LANES)]
    return [own[: int(random.integers(1, K + 1))] for own in near]


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("seed", range(3))
def test_pool_equals_single_caches(rule: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed:  # caches that are larger than what is looked at first
        monkeypatch.setattr("kvpolicy.twin.slots.WINDOW", 8 * seed)
        monkeypatch.setattr("kvpolicy.twin.slots.FEW", 4 * seed)
    random = np.random.default_rng(seed)
    pool, caches = both(rule)
    for step in range(150):
        for lane, cache in enumerate(caches):
            turn = random.random()
            if turn < 0.08 or not step:
                rows = int(random.integers(0, 40))
                cache.resize(rows)
                pool.resize(lane, rows)
            elif turn < 0.1 and cache.capacity:
                kept = np.sort(random.permutation(ENTRIES)[: cache.capacity // 2])
                cache.leave_full(cache.capacity, kept, kept[::2])
                pool.leave_full(lane, int(pool.capacity[lane]), kept, kept[::2])
        lanes = np.flatnonzero(random.random(LANES) < 0.8)
        if step % 40 == 39:  # nobody has a slot
            for lane, cache in enumerate(caches):
                cache.resize(0)
                pool.resize(lane, 0)
        each = wanted_by(random, step)
        padded = np.full((lanes.size, K), ENTRIES)
        for row, lane in zip(padded, lanes, strict=True):
            row[: each[lane].size] = each[lane]
        due = (step + lanes) % RULES[rule].lazy == 0
        missed = pool.resolve(lanes, padded, step, due)
        assert missed.tolist() == [caches[lane].resolve(each[lane], step).size for lane in lanes]
        new = np.array([(step * 3 + lane) % ENTRIES for lane in lanes], dtype=np.int64)
        fresh = np.array([e not in caches[lane].held for e, lane in zip(new, lanes, strict=True)])
        pool.offer(lanes[fresh], new[fresh], step, evict=bool(step % 5))
        for lane, entry in zip(lanes[fresh], new[fresh], strict=True):
            caches[lane].offer(np.array([entry]), step, evict=bool(step % 5))
        compare(pool, caches)
