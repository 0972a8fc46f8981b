"""A true-geometry slice under several controllers, side by side in one engine: tokens per second of decoding.

    python -P benchmarks/slice.py --json FILE        # one group of GLM-5.3's layers, 128 x 100K, on an H200
    python -P benchmarks/slice.py --device cpu --model micro-glm --vocab 256 --context 80 --batch 3 \\
        --fit-rows 32 --sweep 16,32 --warm 2 --steps 3                       # in a second, anywhere

Dummy weights, contexts that nobody computed, selections of ``--selection`` while the indexer does its work
(docs/selection-sources.md). All requests stay; the controller is swapped under load, WARM steps pass, STEPS
are timed. Controllers take turns, forwards and backwards. All have the same device memory: what
``--batch`` requests with ``--fit-rows`` hot rows each take, or ``--device-kv-mib``. HiSparse is timed at
every size of ``--sweep`` and the best of them counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from kvpolicy import Engine, EngineConfig, SamplingParams
from kvpolicy.engine.executor import Launched
from kvpolicy.engine.scheduler import Batch
from kvpolicy.geometry.dsa import whole_groups
from kvpolicy.geometry.presets import preset
from kvpolicy.memory import accounting
from kvpolicy.memory.accounting import Reserve
from kvpolicy.memory.layout import Layout
from kvpolicy.memory.request import GROWTH_TOKENS

MIB = 1 << 20
# Requests whose device copies are compared with the host's at the end: each takes some 0.2 s at 100K.
CHECKED = 4


@dataclass(frozen=True)
class Settings:
    """What is measured. fit_rows: hot rows per request that size the device memory, unless device_kv_mib
    does. sweep: buffer rows of HiSparse. seconds: no round begins after this."""

    model: str = "glm-5.3"
    layers: int = 4
    vocab: int = 1024
    kv_dtype: str = "fp8"
    dtype: str = "bfloat16"
    selection: str = "process"
    device: str = "cuda"
    context: int = 100_000
    batch: int = 128
    fit_rows: int = 4096
    device_kv_mib: float | None = None
    sweep: tuple[int, ...] = (2048, 3072, 4096)
    controllers: tuple[str, ...] = ("adaptive",)
    warm: int = 60
    steps: int = 100
    rounds: int = 2
    seconds: float = 1e9

    @property
    def specs(self) -> list[str]:
        """Controllers in their order."""
        return [f"hisparse:device_buffer_rows={n}" for n in self.sweep] + list(self.controllers)

    @property
    def tokens(self) -> int:
        """Most tokens of a request."""
        turns = self.rounds * len(self.specs)
        return self.context + 8 + turns * (self.warm + self.steps + 1)

    def layout(self) -> Layout:
        return Layout(whole_groups(preset(self.model), self.layers), self.kv_dtype)

    def device_mib(self) -> float:
        """Device memory in which ``batch`` requests have ``fit_rows`` hot rows per store to the end."""
        layout, each = self.layout(), (self.fit_rows,) * len(self.layout().stores)
        reserve = Reserve(self.batch * layout.topk, 2 * self.batch, self.batch)
        shared = accounting.staging_frames(layout, reserve)
        shared += accounting.inflight_frames(layout, reserve)
        own = accounting.request_frames(layout, self.tokens + GROWTH_TOKENS)
        own += accounting.hot_frames(layout, each, self.tokens)
        growth = sum(s.key.frames(s.store.entries(GROWTH_TOKENS)) + 1 for s in layout.stores)
        frames = shared + self.batch * own + growth * (self.batch + 1)
        return frames * layout.frame_bytes / MIB

    def config(self) -> EngineConfig:
        host = self.batch * (accounting.host_bytes(self.layout(), self.tokens) + 4096)
        return EngineConfig(
            model=self.model,
            dummy_weights=True,
            layers=self.layers,
            vocab=self.vocab,
            selection=self.selection,
            device=self.device,
            controller=self.specs[0],
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            device_kv_mib=self.device_kv_mib or self.device_mib(),
            host_kv_mib=host / MIB + 1,
            max_concurrency=self.batch,
            prefill_chunk=self.batch,
        )


@dataclass
class Clock:
    """Where the device's time goes: a pair of events around each launch."""

    engine: Engine
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def __post_init__(self) -> None:
        launch = self.engine.executor.launch

        def timed(batch: Batch, step: int) -> Launched:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            launched = launch(batch, step)
            end.record()
            self.events.append((start, end))
            return launched

        if self.engine.device.type == "cuda":
            self.engine.executor.launch = timed  # type: ignore[method-assign]

    def spent(self) -> dict[str, float]:
        """Milliseconds of a step on the device, and between two steps; the events begin anew."""
        events, self.events = self.events, []
        if not events:
            return {}
        inside = [start.elapsed_time(end) for start, end in events]
        gaps = [one[1].elapsed_time(two[0]) for one, two in pairwise(events)]
        return {"device_ms": statistics.median(inside), "gap_ms": statistics.median(gaps or [0.0])}


def synchronize(engine: Engine) -> None:
    if engine.device.type == "cuda":
        torch.cuda.synchronize()


def measure(engine: Engine, clock: Clock, settings: Settings, spec: str) -> dict[str, Any]:
    """One controller's turn."""
    engine.set_controller(spec)
    for _ in range(settings.warm):
        engine.step()
    synchronize(engine)
    clock.spent()
    before, counters = engine.memory.counted().decode, engine.metrics()
    start = time.perf_counter()
    for _ in range(settings.steps):
        engine.step()
    synchronize(engine)
    seconds = time.perf_counter() - start
    spent = clock.spent()
    found, after = engine.memory.counted().decode.since(before), engine.metrics()
    rows = [hot.capacity for r in engine.memory.requests.values() for hot in r.hot]
    return {
        "tokens_per_s": settings.batch * settings.steps / seconds,
        "step_ms": seconds / settings.steps * 1e3,
        **spent,
        "miss_rate": found.miss_rate_selected,
        "staged_rate": found.staged_rows / max(found.selected_rows, 1),
        "fetched_mb_per_step": found.host_to_device_bytes / settings.steps / 1e6,
        "rows": sum(rows) / len(rows),
        "running": len(engine.scheduler.running),
        **{
            name: after[name] - counters[name]
            for name in (
                "controller_fallbacks",
                "controller_projections",
                "preemptions",
                "shortages",
            )
        },
    }


def summary(turns: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians by controller, and each over the best HiSparse."""
    medians = {
        spec: {key: statistics.median(t[key] for t in each) for key in each[0]}
        for spec, each in turns.items()
        if each
    }
    rates = {spec: each["tokens_per_s"] for spec, each in medians.items()}
    best = max((s for s in rates if s.startswith("hisparse")), key=rates.__getitem__, default=None)
    over = {} if best is None else {spec: rate / rates[best] for spec, rate in rates.items()}
    return {"controllers": medians, "best_hisparse": best, "over_best_hisparse": over}


def run(settings: Settings, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Build the engine, fill it, measure. Returns what is written as JSON."""
    start = time.perf_counter()

    def note(what: str) -> None:
        say(f"[{time.perf_counter() - start:6.1f} s] {what}")

    turns: dict[str, list[dict[str, Any]]] = {spec: [] for spec in settings.specs}
    with Engine(settings.config()) as engine:
        note(f"engine of {engine.config.device_kv_mib:,.0f} + {engine.config.host_kv_mib:,.0f} MiB")
        params = SamplingParams(max_new_tokens=settings.tokens - settings.context)
        for i in range(settings.batch):  # contexts grow in lots, not all at once
            length = settings.context - i % min(GROWTH_TOKENS, settings.context // 2)
            engine.submit(b"x", params, context=length)
        while len(engine.scheduler.running) < settings.batch or engine.totals.decode_steps < 2:
            engine.step()
        synchronize(engine)
        note(f"{settings.batch} requests of {settings.context:,} tokens decode")
        clock = Clock(engine)
        for number in range(settings.rounds):
            for spec in settings.specs[:: -1 if number % 2 else 1]:
                if number and time.perf_counter() - start > settings.seconds:
                    note("no time is left")
                    break
                found = measure(engine, clock, settings, spec)
                turns[spec].append(found)
                note(line(spec, found))
        rates, record = summary(turns), engine.record()
        for spec, ratio in rates["over_best_hisparse"].items():
            note(f"{spec:36s} {ratio:.3f} x the best hisparse")
        result = {**rates, "settings": asdict(settings), "turns": turns, "record": record}
        for held in list(engine.memory.requests.values())[:CHECKED]:
            held.check_integrity()
        note(f"device copies of {min(CHECKED, settings.batch)} requests equal the host's")
    note("closed")
    return result


def line(spec: str, found: dict[str, Any]) -> str:
    """One turn as text."""
    device = (
        f", device {found['device_ms']:.2f} + {found['gap_ms']:.2f}" if "device_ms" in found else ""
    )
    return (
        f"{spec:36s} {found['tokens_per_s']:9,.0f} tokens/s {found['step_ms']:7.2f} ms{device}, misses "
        f"{found['miss_rate']:6.2%}, {found['fetched_mb_per_step']:7.1f} MB/step, {found['rows']:,.0f} rows, "
        f"{found['controller_fallbacks']} fallbacks, {found['preemptions']} preempted"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    standard = Settings()
    for name, value in asdict(standard).items():
        option = f"--{name.replace('_', '-')}"
        if name == "controllers":
            parser.add_argument(option, action="append", help="may be given several times")
        elif name == "sweep":
            parser.add_argument(
                option, type=lambda t: tuple(int(n) for n in t.split(",") if n), default=value
            )
        else:
            parser.add_argument(option, type=float if value is None else type(value), default=value)
    parser.add_argument("--json", type=Path)
    options = vars(parser.parse_args())
    path = options.pop("json")
    options["controllers"] = tuple(options["controllers"] or standard.controllers)
    result = run(Settings(**options), lambda text: print(text, flush=True))
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
