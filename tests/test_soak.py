"""A long random life of one engine: every output right, all books balanced, nothing left at the end."""

from __future__ import annotations

import resource
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from results import keep
from soak import DECISION_SECONDS, MIB, Expected, Soak, config, variants

from kvpolicy.controllers.decider import LOG_LENGTH, MOST_STUCK

STEPS, LONG = 1500, 100_000
# The decision log fills up and latencies are kept: a few MiB.
GROWTH_MIB = 16


@pytest.fixture(scope="module")
def expected() -> list[Expected]:
    return variants(16)


@dataclass(frozen=True)
class Life:
    """soak: what was run, its engine closed. peaks: MiB that the process took at most, after the first
    tenth and at the end."""

    soak: Soak
    seconds: float
    peaks: tuple[int, int]


def peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def live(
    steps: int, every: int, expected: list[Expected], folder: Path, ask_in_threads: bool
) -> Life:
    """Live so many steps, with every assertion there is."""
    threads = threading.active_count()
    soak = Soak(1, expected, every, folder, ask_in_threads)
    started = time.perf_counter()
    soak.run(steps // 10)
    early = peak_mib()
    soak.run(steps)
    soak.drain()
    seconds = time.perf_counter() - started
    engine = soak.engine
    engine.check_integrity()
    assert soak.books() == soak.start
    assert len(engine.control.log) == LOG_LENGTH and engine.control.decisions > LOG_LENGTH
    metrics = engine.metrics()
    assert metrics["device_kv_bytes_peak"] <= engine.memory.arena.buffer.numel() <= MIB * 2**20
    assert metrics["preemptions"] > soak.counts["forced preemptions"] > 0
    for name in ("shortages", "expired", "controller_fallbacks", "controller_projections"):
        assert metrics[name] > 0, name
    for name in ("swaps", "reloads", "cancels", "length", "checks"):
        assert soak.counts[name] > 0, name
    engine.close()
    # One thread that asks, and those of controllers that were replaced while they slept.
    assert soak.most_threads <= threads + 1 + MOST_STUCK
    end = time.perf_counter() + 10
    while threading.active_count() > threads and time.perf_counter() < end:
        time.sleep(DECISION_SECONDS)
    assert threading.active_count() == threads
    return Life(soak, seconds, (early, peak_mib()))


def test_a_random_life(expected: list[Expected], tmp_path: Path) -> None:
    """The short form: 1,500 steps, with integrity checked after each."""
    live(STEPS, 1, expected, tmp_path, ask_in_threads=False)


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_a_long_random_life(
    expected: list[Expected], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """100,000 steps; the process must not grow after the first tenth."""
    life = live(LONG, 100, expected, tmp_path, ask_in_threads=True)
    soak, (early, end) = life.soak, life.peaks
    assert end - early < GROWTH_MIB
    metrics = soak.engine.metrics()
    names = ("steps", "preemptions", "shortages", "expired", "reduced_admissions", "request_waves")
    names += ("controller_decisions", "controller_projections", "controller_fallbacks")
    names += ("device_kv_bytes_peak", "deferred_admissions", "longest_wait_steps")
    results = {
        **{name: metrics[name] for name in names},
        **dict(sorted(soak.counts.items())),
        "device_kv_bytes": int(MIB * 2**20),
        "most_threads": soak.most_threads,
        "process_peak_mib": {"after the first tenth": early, "at the end": end},
        "seconds": round(life.seconds, 1),
    }
    keep("soak", config("adaptive").model_dump(by_alias=True), results)
    with capsys.disabled():
        print("\nsoak:", ", ".join(f"{name} {value}" for name, value in results.items()))
