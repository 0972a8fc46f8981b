"""What the cost of fetching changes in the schedule of verification: a simulation, seeded, on a CPU.

Synthetic throughout: acceptance, misses and step times are drawn from simple processes, given below;
nothing of it was measured on a model. The choices are made by the shipped scheduler. Each row of the table
is one situation, each column a way to choose how many of 7 proposed tokens are verified:

    none         no drafter at all
    all          all seven
    threshold    those before the first with a confidence below 0.5
    confidence   the schedule with the cost of a step's rows only (DSpark)
    joint        the same with the measured cost of fetching what the rows miss

    python benchmarks/verification_schedule.py [--steps 600] [--seed 0] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvpolicy.speculative.costs import StepCosts, staircase
from kvpolicy.speculative.schedule import sure_tokens
from kvpolicy.speculative.scheduler import VerificationScheduler

K = 7
# Chance that a token is kept if those before it were, in the middle of the requests.
BASE = torch.tensor([0.80, 0.76, 0.73, 0.70, 0.68, 0.66, 0.65], dtype=torch.float64)
# Logits: how far requests and moments differ, and how far a confidence is from the truth.
SPREAD, DRIFT, NOISE = 1.0, 0.1, 0.5
# Seconds: a step, more for each row; drafting, more for each request; a record from the host (42 million/s).
STEP, ROW, DRAFT, DRAFT_ROW, RECORD = 8e-3, 20e-6, 0.5e-3, 5e-6, 24e-9
# Records that a step without verification misses per request, all stores together, warm and cold; what a
# further row adds; steps in which a cold cache gets warm.
WARM, COLD, SHARE, WARMING = 2_000, 30_000, 0.2, 200.0


@dataclass(frozen=True)
class Situation:
    """requests: at a time. cold: caches start empty, and a request is replaced when it is warm. link: how
    many times slower than free the link is."""

    name: str
    requests: int
    cold: bool
    link: float


SITUATIONS = [
    Situation(f"{requests:3d} requests, {name}", requests, cold, link)
    for requests in (1, 16, 64)
    for name, cold, link in (
        ("warm", False, 1.0),
        ("cold", True, 1.0),
        ("warm, link 8x slower", False, 8.0),
        ("cold, link 8x slower", True, 8.0),
    )
]


class World:
    """What happens whatever is chosen: the same draws for every way of choosing."""

    def __init__(self, situation: Situation, seed: int) -> None:
        self.own, self.source = situation, torch.Generator().manual_seed(seed)
        count = situation.requests
        self.ease = torch.randn(count, generator=self.source, dtype=torch.float64) * SPREAD
        self.age = torch.randint(0, int(WARMING), (count,), generator=self.source)
        self.generation = torch.arange(count)
        rows = count * (K + 1)
        sizes = [2**n for n in range(rows.bit_length() + 1)]
        self.verify_seconds = staircase({n: STEP + ROW * n for n in sizes}, rows)
        self.draft_seconds = {n: DRAFT + DRAFT_ROW * n for n in range(1, count + 1)}

    def next(self) -> tuple[Tensor, Tensor, Tensor]:
        """Confidences [r, K], what is kept of K tokens [r], first-row misses [r]."""
        count = self.own.requests
        shock = torch.randn(count, generator=self.source, dtype=torch.float64)
        self.ease = (1 - DRIFT) * self.ease + SPREAD * (1 - (1 - DRIFT) ** 2) ** 0.5 * shock
        logits = torch.logit(BASE) + self.ease[:, None]
        error = torch.randn(count, K, generator=self.source, dtype=torch.float64) * NOISE
        passed = torch.rand(count, K, generator=self.source, dtype=torch.float64) < logits.sigmoid()
        kept = passed.long().cumprod(1).sum(1)
        first = torch.full((count,), float(WARM))
        if self.own.cold:
            self.age += 1
            done = self.age >= WARMING
            self.generation = torch.where(done, self.generation + count, self.generation)
            self.age = torch.where(done, 0, self.age)
            first = WARM + (COLD - WARM) * (-self.age / (WARMING / 4)).exp()
        return (logits + error).sigmoid().float(), kept, first


Choose = Callable[[Tensor], Tensor]


def measure(situation: Situation, way: str, steps: int, seed: int) -> dict[str, float]:
    """One way of choosing in one situation: tokens per second, verified tokens and records per token."""
    world, count = World(situation, seed), situation.requests
    device, record = torch.device("cpu"), RECORD * situation.link
    costs = StepCosts.empty(count, K, device)
    costs.set_verify({n: s for n, s in enumerate(world.verify_seconds) if n})
    costs.set_draft(world.draft_seconds)
    costs.set_record(record if way == "joint" else 0.0)
    scheduler = VerificationScheduler(count, K, costs, device)
    seats, caps = torch.arange(count), torch.full((count,), K)
    seconds = tokens = verified = records = 0.0
    for _ in range(steps):
        confidence, kept, first = world.next()
        if way in ("confidence", "joint"):
            lengths = scheduler.lengths(seats, world.generation, caps, confidence)
        elif way == "threshold":
            lengths = sure_tokens(confidence, 0.5)
        else:
            lengths = caps if way == "all" else caps * 0
        accepted = torch.minimum(kept, lengths)
        misses = (first * (1 + SHARE * lengths)).long()
        scheduler.note(seats, lengths, accepted, misses)
        seconds += world.verify_seconds[count + int(lengths.sum())] + float(misses.sum()) * record
        seconds += 0.0 if way == "none" else world.draft_seconds[count]
        tokens += count + int(accepted.sum())
        verified += int(lengths.sum())
        records += float(misses.sum())
    return {
        "tokens_per_s": tokens / seconds,
        "verified_per_request": verified / steps / count,
        "records_per_token": records / tokens,
    }


WAYS = ("none", "all", "threshold", "confidence", "joint")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    print("synthetic: tokens/s (tokens verified per request and step)")
    print(f"{'':32s}" + "".join(f"{way:>18s}" for way in WAYS))
    for situation in SITUATIONS:
        row = {way: measure(situation, way, options.steps, options.seed) for way in WAYS}
        found[situation.name.strip()] = row
        cells = [f"{x['tokens_per_s']:.0f} ({x['verified_per_request']:.1f})" for x in row.values()]
        print(f"{situation.name:32s}" + "".join(f"{cell:>18s}" for cell in cells), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"synthetic": True, "results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
