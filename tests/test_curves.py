"""Miss curves by stack distances, against caches that are really simulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from heldout import pieces
from hypothesis import given
from hypothesis import strategies as st
from observations import request

from kvpolicy.config import EngineConfig, SamplingParams
from kvpolicy.control.curves import KEEP, STICK, Entries, MissSampler
from kvpolicy.controllers.static import Static
from kvpolicy.engine.engine import Engine

K = 16
Step = tuple[Entries, int]


def reuse(seed: int, steps: int, prompt: int = 600) -> Iterator[Step]:
    """Selections as a decode has them: four fifths stay, the rest are of any age up to 500; (entries,
    entries committed before the step)."""
    draw = np.random.default_rng(seed)
    chosen = draw.choice(prompt, K, replace=False)
    for step in range(steps):
        length = prompt + step
        ages = (500 ** draw.random(2 * K)).astype(np.int64) - 1
        kept = chosen[draw.random(K) < 0.8]
        fresh = np.setdiff1d(length - 1 - ages, kept)
        chosen = np.concatenate((kept, draw.permutation(fresh)))[:K]
        yield np.sort(chosen), length


def simulate(trace: list[Step], rows: int, seed: int = 0) -> tuple[float, float]:
    """A least-recently-used cache of so many rows, cold at the start: (misses, steps), counted once
    it can be full, older steps for less. Rows used in one step are in no particular order."""
    draw = np.random.default_rng(seed)
    stamp: dict[int, float] = {}
    misses = steps = 0.0
    known = 0
    seen: set[int] = set()
    for time, (entries, length) in enumerate(trace):
        if known:
            new = range(known, length)
            stamp.update((e, time - 0.5 + draw.random() / 4) for e in new)
            seen.update(new)
        known = length
        stamp = dict(sorted(stamp.items(), key=lambda item: -item[1])[:rows])
        misses, steps = misses * KEEP, steps * KEEP
        if len(seen) >= rows:
            steps += 1
            misses += sum(e not in stamp for e in entries.tolist())
        stamp.update((e, time + draw.random() / 4) for e in entries.tolist())
        seen.update(entries.tolist())
    return misses, steps


def measured(trace: list[Step], topk: int = K, entries: int = 2000) -> MissSampler:
    sampler = MissSampler((topk,), entries)
    sampler.begin(1)
    for step, (chosen, length) in enumerate(trace):
        sampler.note(0, step, chosen, length)
    return sampler


@given(entries=st.lists(st.integers(0, 12), min_size=1, max_size=120))
def test_one_entry_a_step_is_exact(entries: list[int]) -> None:
    """No ties: the misses of every budget are those of the cache, step for step."""
    sampler = MissSampler((2,), 16)
    sampler.begin(1)
    trace = [(np.array([e], dtype=np.int64), 13) for e in entries]
    for step, (chosen, _) in enumerate(trace):
        sampler.note(0, step, chosen)
    curve = sampler.curves()[0]
    assert curve.rows[:2] == (0, 1) or len(entries) == 1
    for rows, misses in zip(curve.rows, curve.misses, strict=True):
        want, steps = simulate(trace, rows)
        least = min(m / s for m, s in (simulate(trace, r) for r in curve.rows if r <= rows) if s)
        assert misses == pytest.approx(least), "and never rising"
        assert want / steps >= misses - 1e-9


def test_selections_of_a_decode() -> None:
    """Within 2 % of simulated caches at every budget from half a top-k to 20 x top-k."""
    trace = list(reuse(0, 800))
    curve = measured(trace).curves()[0]
    assert curve.rows[0] == 0 and curve.misses[0] == K
    checked = 0
    for rows, misses in zip(curve.rows[1:], curve.misses[1:], strict=True):
        if rows <= 20 * K:
            want = [simulate(trace, rows, seed) for seed in range(3)]
            mean = sum(m for m, _ in want) / sum(s for _, s in want)
            assert misses == pytest.approx(mean, rel=0.02), rows
            checked += 1
    assert checked > 15


def test_a_new_history_biases_nothing() -> None:
    """Twenty requests followed for 60 steps each tell what one followed for 1,200 does."""
    short = MissSampler((K,), 2000)
    for number in range(20):
        short.begin(number)
        for step, (chosen, length) in enumerate(reuse(number, 60)):
            short.note(0, step, chosen, length)
    curve = short.curves()[0]
    long = measured(list(reuse(99, 1200))).curves()[0]
    known = [rows for rows in curve.rows if rows <= 8 * K]
    assert len(known) > 10
    for rows in known:
        one = float(np.interp(rows, curve.rows, curve.misses))
        other = float(np.interp(rows, long.rows, long.misses))
        assert one == pytest.approx(other, rel=0.08), rows


def test_committed_rows_are_no_misses() -> None:
    """The newest entry enters the cache when it is committed, not when it is selected."""
    trace = [(np.array([length - 1], dtype=np.int64), length) for length in range(50, 150)]
    told = measured(trace).curves()[0]
    assert dict(zip(told.rows, told.misses, strict=True))[K] == 0.0
    blind = MissSampler((K,), 2000)
    blind.begin(1)
    for step, (chosen, _) in enumerate(trace):
        blind.note(0, step, chosen)
    curve = blind.curves()[0]
    assert dict(zip(curve.rows, curve.misses, strict=True))[K] == 1.0


def test_two_selectors_of_one_store_are_one_step() -> None:
    """Their misses add up; what the first fetched the second finds."""
    sampler = MissSampler((K,), 100)
    sampler.begin(1)
    for step in range(200):
        sampler.note(0, step, np.arange(0, K) + step % 2 * K)
        sampler.note(0, step, np.arange(0, K) + step % 2 * K)
    curve = sampler.curves()[0]
    values = dict(zip(curve.rows, curve.misses, strict=True))
    assert values[0] == 2 * K
    assert values[K] == pytest.approx(K, rel=0.02)
    assert values[2 * K] == 0


def test_old_steps_fade() -> None:
    """Half of what is known is gone after 512 steps, however often somebody asks."""
    trace = list(reuse(1, 512))
    once, often = MissSampler((K,), 2000), MissSampler((K,), 2000)
    for sampler in (once, often):
        sampler.begin(1)
        for step, (chosen, length) in enumerate(trace):
            sampler.note(0, step, chosen, length)
            if sampler is often:
                sampler.choose([request(1, (100,), (8,))])
                sampler.curves()
    assert once.curves() == often.curves()
    assert once.curves()[0].steps == pytest.approx(0.5 / (1 - KEEP))


def test_what_is_not_judged_any_more_is_left_out() -> None:
    """Larger budgets than a new history can judge keep their estimate, until it is too old."""
    sampler = measured(list(reuse(1, 400)))
    before = sampler.curves()[0]
    sampler.begin(2)
    for step in range(100):
        sampler.note(0, step, np.arange(K))
    still = sampler.curves()[0]
    assert still.rows[-1] > 8 * K and still.rows == before.rows[: len(still.rows)]
    for step in range(100, 6000):
        sampler.note(0, step, np.arange(K))
    assert sampler.curves()[0].rows == (0, K // 2, K)


def test_nothing_seen_is_an_empty_curve() -> None:
    assert all(not curve.rows for curve in MissSampler((4, 8), 100).curves())


def test_who_is_followed() -> None:
    """One while it decodes and for its turn, then the next by number, round and round."""
    sampler = MissSampler((K,), 2000)
    views = [request(i, (100,), (8,), decoding=i != 2) for i in (1, 2, 3, 7)]
    assert sampler.choose([]) is None and sampler.choose(views[1:2]) is None
    assert sampler.choose(views) == 1
    sampler.begin(1)
    assert sampler.choose(views) == 1
    assert sampler.choose(views[1:]) == 3
    for step in range(STICK):
        sampler.note(0, step, np.arange(K))
    assert sampler.choose(views) == 3
    sampler.begin(7)
    assert sampler.choose(views) == 7
    assert sampler.choose([replace(v, decoding=v.request_id < 7) for v in views]) == 1
    full = [replace(v, budget=v.max_rows) for v in views]
    assert sampler.choose(full) is None and sampler.choose([*full, views[0]]) == 7
    assert MissSampler((K,), 2000).choose(full) == 1, "nothing is known yet"


class Watched(Static):
    """Static, and the curves are measured beside it."""

    wants_curves = True


@pytest.mark.full
def test_the_curve_is_what_a_real_cache_does() -> None:
    """tiny-dsa through the engine: the rows that an LRU cache of 2 x top-k fetches per step."""
    text = max(pieces(), key=lambda piece: len(piece[1]))[1][:2048]
    config = EngineConfig(eviction="lru", device="cpu", clock="steps")
    with Engine(config) as engine:
        engine.set_controller(Watched())
        handle = engine.submit(text, SamplingParams(max_new_tokens=500))
        while len(handle._request.tokens) < 100:
            engine.step()
        before = engine.metrics()["fetched_rows"]
        while not handle.done:
            engine.step()
        steps = len(handle._request.tokens) - 100
        fetched = (engine.metrics()["fetched_rows"] - before) / steps
        curves = engine.control.log[-1].observation.curves
        stores = engine.control.stores
    expected = sum(
        float(np.interp(2 * s.topk, c.rows, c.misses)) * s.layers
        for s, c in zip(stores, curves, strict=True)
    )
    assert expected == pytest.approx(fetched, rel=0.1), (expected, fetched)
