"""Rows fetched per committed token, plain against speculative, for each rule of which fetched rows may stay.

    python benchmarks/admission.py --drafter ngram --output benchmarks/results/admission.json

A real engine decodes held-out text with the drafter; what every verify row selected, and how many were
accepted, is kept. The rules are then replayed on it, with LRU caches of 1, 2, 4 and 8 times top-k records
per store: selections do not depend on what a cache held, so this is exact for these rules. ``plain`` takes
the committed rows one by one. Rules:

    all       every fetched row may displace another
    demoted   as all, but what was fetched for rejected rows alone goes first in the next step: the engine's
              ``accepted``
    untouched as all, but a hit of rejected rows alone does not count as a use
    both      demoted and untouched
    anchor    rows that only proposed tokens want are staged and dropped; free slots take them
    refetched as anchor, and the accepted rows' misses are fetched again at commit
    kept      as anchor, and the accepted rows' misses stay, as if staging kept them until commit
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvpolicy import Engine, EngineConfig, SamplingParams
from kvpolicy.memory.step import StepMemory
from kvpolicy.workloads.texts import load_corpus

RULES = ("all", "demoted", "untouched", "both", "anchor", "refetched", "kept")
TIMES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Cycle:
    """A verify step of one request and store. rows: what each verify row selected of the committed
    entries. accepted: rows that stay."""

    request: int
    store: int
    rows: tuple[tuple[int, ...], ...]
    accepted: int
    position: int


class Cache:
    """Least recently used, of ``capacity`` rows; dicts keep the order of last use."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.rows = capacity, dict[int, None]()

    def missing(self, entries: Iterable[int]) -> list[int]:
        return [entry for entry in entries if entry not in self.rows]

    def touch(self, entries: Iterable[int]) -> None:
        for entry in entries:
            if entry in self.rows:
                del self.rows[entry]
                self.rows[entry] = None

    def add(self, entries: Iterable[int], keep: frozenset[int]) -> None:
        """Each displaces the one unused for longest that is not in ``keep``, if there is any."""
        victims = iter([entry for entry in self.rows if entry not in keep])
        for entry in entries:
            if len(self.rows) >= self.capacity:
                victim = next(victims, None)
                if victim is None:
                    return
                del self.rows[victim]
            self.rows[entry] = None

    def add_free(self, entries: Iterable[int]) -> None:
        for entry in entries:
            if len(self.rows) < self.capacity:
                self.rows[entry] = None

    def demote(self, entries: Iterable[int]) -> None:
        last = [entry for entry in entries if entry in self.rows]
        self.rows = dict.fromkeys([*last, *(e for e in self.rows if e not in set(last))])


def union(rows: Iterable[tuple[int, ...]]) -> list[int]:
    return list(dict.fromkeys(entry for row in rows for entry in row))


def step(cache: Cache, cycle: Cycle, rule: str) -> int:
    """One verify step: rows fetched."""
    every, kept = union(cycle.rows), union(cycle.rows[: cycle.accepted])
    missing = cache.missing(every)
    fetched = len(missing)
    first = set(cycle.rows[0])
    if rule in ("all", "demoted", "untouched", "both"):
        cache.touch(kept if rule in ("untouched", "both") else every)
        cache.add(missing, frozenset(every))
        if rule in ("demoted", "both"):
            cache.demote(set(missing) - set(kept))
    else:
        cache.touch(cycle.rows[0])
        cache.add([e for e in missing if e in first], frozenset(every))
        cache.touch(kept)
        if rule != "anchor":
            late = [e for e in missing if e in set(kept) - first]
            fetched += len(late) * (rule == "refetched")
            cache.add(late, frozenset(kept))
        cache.add_free(e for e in missing if e not in cache.rows)
    new = range(cycle.position, cycle.position + cycle.accepted)
    cache.add(new, frozenset())
    return fetched


def plain(cache: Cache, cycle: Cycle) -> int:
    """The same committed rows, one step each."""
    fetched = 0
    for i, row in enumerate(cycle.rows[: cycle.accepted]):
        missing = cache.missing(row)
        fetched += len(missing)
        cache.touch(row)
        cache.add(missing, frozenset(row))
        cache.add([cycle.position + i], frozenset())
    return fetched


def collect(
    drafter: str, device: str, prompts: int, prompt_bytes: int, tokens: int, temperature: float
) -> tuple:
    """(cycles, layers of each store, top-k, metrics) of a real run."""
    cycles: list[Cycle] = []
    config = EngineConfig(
        device=device,
        controller="resident",
        prefill_chunk=256,
        drafter=drafter,
        device_kv_mib=128,
        host_kv_mib=256,
        clock="steps",
        verification="coupled",
    )
    with Engine(config) as engine:
        engine.executor.verifier = None  # steps that the host shapes say what they accepted
        memory = engine.memory
        commit = memory.commit

        def noted(step: StepMemory, accepted: list[int]) -> None:
            for request, segment, count in zip(step.requests, step.segments, accepted, strict=True):
                if segment.decode:
                    for selector in memory.layout.geometry.selectors:
                        own = step.selection(selector)[segment.start : segment.stop].tolist()
                        rows = tuple(
                            tuple(e for e in row if 0 <= e < segment.position) for row in own
                        )
                        store = memory.layout.of(selector).index
                        cycles.append(
                            Cycle(request.request_id, store, rows, count, segment.position)
                        )
            commit(step, accepted)

        memory.commit = noted  # type: ignore[method-assign]
        corpus = load_corpus("heldout")
        texts = [corpus.piece((i + 0.5) / prompts, prompt_bytes) for i in range(prompts)]
        engine.generate(
            texts, SamplingParams(max_new_tokens=tokens, temperature=temperature, seed=1)
        )
        layers = [s.store.n_layers for s in memory.layout.stores]
        return cycles, layers, memory.layout.topk, engine.metrics()


def table(cycles: list[Cycle], layers: list[int], topk: int) -> list[dict]:
    """Rows per committed token, layers counted, by rule and budget."""
    committed = sum(c.accepted for c in cycles if c.store == 0)
    found = []
    for times in TIMES:
        line: dict = {"budget": times}
        for rule in ("plain", *RULES):
            caches: dict[tuple[int, int], Cache] = {}
            fetched = 0
            for cycle in cycles:
                key = (cycle.request, cycle.store)
                cache = caches.setdefault(key, Cache(times * topk))
                many = plain(cache, cycle) if rule == "plain" else step(cache, cycle, rule)
                fetched += many * layers[cycle.store]
            line[rule] = round(fetched / committed, 2)
        found.append(line)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--prompt-bytes", type=int, default=2500)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    cycles, layers, topk, metrics = collect(
        *(given.drafter, given.device, given.prompts, given.prompt_bytes),
        *(given.tokens, given.temperature),
    )
    result = {
        "command": " ".join(sys.argv),
        "drafter": given.drafter,
        "accepted_length": metrics["accepted_length"],
        "topk": topk,
        "rows_per_committed_token": table(cycles, layers, topk),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if given.output:
        given.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
