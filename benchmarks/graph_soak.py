"""Random load on decode steps that are CUDA graphs: arrivals, cancels, swaps, preemptions, budgets.

    python -P benchmarks/graph_soak.py --json FILE                        # 30,000 steps of tiny-dsa on a GPU
    python -P benchmarks/graph_soak.py --device cpu --steps 60 --variants 3 --most-tokens 30   # anywhere

Every request that ends by itself is compared, tokens and the hash of all its logits, with what it gave
alone under `resident`. Every --check steps the books are checked, and each row on the device against the
host's. At the end all memory must be as at the start. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvpolicy import Engine, EngineConfig, SamplingParams
from kvpolicy.engine.handle import RequestHandle
from kvpolicy.workloads.texts import load_corpus

SWAP_EVERY, CANCEL_SHARE, QUEUE = 120, 0.1, 4


@dataclass(frozen=True)
class Expected:
    """A request and what it gives when it has the engine to itself."""

    prompt: bytes
    params: SamplingParams
    tokens: tuple[int, ...]
    logits_sha256: str | None


def config(options: argparse.Namespace, controller: str, seats: int, mib: float) -> EngineConfig:
    return EngineConfig(
        device=options.device,
        controller=controller,
        max_concurrency=seats,
        prefill_chunk=512,
        device_kv_mib=mib,
        host_kv_mib=128,
    )


def alone(options: argparse.Namespace, draw: random.Random) -> list[Expected]:
    """Requests of all kinds, each decoded alone, whole history on the device."""
    text = load_corpus("heldout")
    found = []
    with Engine(config(options, "resident", 1, 64)) as engine:
        for number in range(options.variants):
            prompt = text.piece(draw.random(), draw.choice((1, 15, 64, 300, 900)))
            params = SamplingParams(
                max_new_tokens=draw.randint(options.most_tokens // 4, options.most_tokens),
                temperature=draw.choice((0.0, 0.8)),
                seed=number,
            )
            output = engine.generate([prompt], params)[0]
            found.append(Expected(prompt, params, tuple(output.tokens), output.logits_sha256))
    return found


def spec(draw: random.Random) -> str:
    """A controller to swap to."""
    rows = draw.choice((0, 1, 100, 128, 200, 256, 500, 1024))
    kinds = ("adaptive", "hybrid", "resident", f"random:seed={draw.randrange(99)}")
    return draw.choice(
        (
            *kinds,
            f"static:device_buffer_rows={rows}",
            f"hisparse:device_buffer_rows={max(rows, 130)}",
        )
    )


class Soak:
    """One engine and what happens to it. counts: of everything that was done."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.draw = random.Random(options.seed)
        self.expected = alone(options, self.draw)
        self.options, self.counts = options, Counter[str]()
        self.live: list[tuple[Expected, RequestHandle]] = []
        self.wrong: list[str] = []
        self.seconds: list[float] = []
        self.engine = Engine(config(options, "adaptive", options.seats, options.device_kv_mib))
        self.start = self.books()

    def books(self) -> dict[str, Any]:
        """All that must be at the end as it was at the start."""
        memory = self.engine.memory
        return {
            "usage": memory.usage(),
            "owners": memory.arena.frames.owners(),
            "host": memory.host.extents.largest,
            "requests": dict(memory.requests),
        }

    def run(self) -> dict[str, Any]:
        engine, most = self.engine, 0
        early = None
        while engine.totals.decode_steps < self.options.steps:
            self.happen()
            began = time.perf_counter()
            engine.step()
            self.seconds.append(time.perf_counter() - began)
            self.collect()
            if engine.steps % self.options.check == 0:
                engine.check_integrity()
                self.counts["integrity checks"] += 1
                most = torch.cuda.memory_allocated() if engine.device.type == "cuda" else 0
                early = most if early is None else early
                print(f"{engine.totals.decode_steps} steps, {dict(self.counts)}", flush=True)
        for _, handle in self.live:
            handle.cancel()
        engine.check_integrity()
        return self.result(early or 0, most)

    def happen(self) -> None:
        """What comes from outside between two steps."""
        while len(self.live) < self.options.seats + QUEUE:
            expected = self.draw.choice(self.expected)
            self.live.append((expected, self.engine.submit(expected.prompt, expected.params)))
            self.counts["requests"] += 1
        if self.draw.random() < 1 / SWAP_EVERY:
            self.engine.set_controller(spec(self.draw))
            self.counts["swaps"] += 1
        if self.draw.random() < CANCEL_SHARE / 50:
            self.draw.choice(self.live)[1].cancel()
            self.counts["cancels"] += 1

    def collect(self) -> None:
        for expected, handle in [pair for pair in self.live if pair[1].done]:
            self.live.remove((expected, handle))
            output = handle.result()
            if output.finish_reason == "cancelled":
                continue
            self.counts["compared"] += 1
            if (tuple(output.tokens), output.logits_sha256) != (
                expected.tokens,
                expected.logits_sha256,
            ):
                self.wrong.append(f"request {output.id} at step {self.engine.steps}")

    def result(self, early: int, late: int) -> dict[str, Any]:
        engine, metrics = self.engine, self.engine.metrics()
        seconds = sorted(self.seconds)
        return {
            "decode_steps": engine.totals.decode_steps,
            "graphs": engine.executor.decoder.graphs if engine.executor.decoder else 0,
            "counts": {**self.counts, "preemptions": metrics["preemptions"]},
            "generated_tokens": metrics["generated_tokens"],
            "wrong": self.wrong,
            "memory_as_at_the_start": self.books() == self.start,
            "allocated_bytes": {"first check": early, "last check": late},
            "step_ms": {
                "p50": seconds[len(seconds) // 2] * 1e3,
                "p99": seconds[len(seconds) * 99 // 100] * 1e3,
                "longest": seconds[-1] * 1e3,
            },
            "seed": self.options.seed,
            "record": engine.record(),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, value in {
        "device": "cuda", "steps": 30_000, "seats": 16, "device_kv_mib": 24.0, "check": 1000,
        "variants": 16, "most_tokens": 2000, "seed": 0,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    soak = Soak(options)
    with soak.engine:
        result = soak.run()
    print(json.dumps({k: v for k, v in result.items() if k != "record"}, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["wrong"] or not result["memory_as_at_the_start"] else 0


if __name__ == "__main__":
    sys.exit(main())
