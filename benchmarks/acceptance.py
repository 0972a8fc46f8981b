"""Accepted length of drafters in the engine, on continuations of the held-out Python that ships.

    python -P benchmarks/acceptance.py --drafter dspark --drafter dflash2 --temperature 0.6

Every file's first --prompt-bytes bytes are a prompt; --tokens tokens follow. A cycle's tokens count the
bonus token; nothing is cut (K proposed, K verified). Greedy text of a small model loops, which is easy
to draft: --temperature 0 says less than 0.6 or 1. Other weights: --drafter dspark:FOLDER.
"""

from __future__ import annotations

import argparse
import json
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

from kvpolicy import Engine, EngineConfig, SamplingParams


def prompts(size: int) -> list[bytes]:
    """The first bytes of every held-out Python file."""
    folder = files("kvpolicy.models").joinpath("tiny_dsa/heldout")
    names = sorted(p.name for p in folder.iterdir() if ".py" in p.name)
    return [folder.joinpath(name).read_bytes()[:size] for name in names]


def measure(drafter: str, args: argparse.Namespace) -> dict[str, object]:
    """One engine's run over all prompts."""
    texts = prompts(args.prompt_bytes)
    config = EngineConfig(
        device=args.device,
        drafter=drafter,
        verification=args.verification,
        controller="resident",
        bos=True,
        max_concurrency=len(texts),
        device_kv_mib=256,
        prefill_chunk=256,
    )
    params = [
        SamplingParams(temperature=args.temperature, seed=args.seed + i, max_new_tokens=args.tokens)
        for i in range(len(texts))
    ]
    with Engine(config) as engine:
        outputs = engine.generate(texts, params)
        found = engine.metrics()["speculation"]
    accepted = [1, *(a / found["cycles"] for a in found["accepted"])]
    return {
        "drafter": drafter,
        "temperature": args.temperature,
        "verification": args.verification,
        "prompts": len(texts),
        "prompt_bytes": args.prompt_bytes,
        "tokens": sum(len(o.tokens) for o in outputs),
        "cycles": found["cycles"],
        "accepted_length": round(found["committed_tokens"] / found["cycles"], 3),
        "survival": [round(a, 3) for a in accepted[1:]],
        "conditional": [round(b / a, 3) if a else 0.0 for a, b in pairwise(accepted)],
        "failures": found["drafter_failures"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--drafter", action="append", required=True)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--verification", default="standard")
    parser.add_argument("--prompt-bytes", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    results = []
    for drafter in args.drafter:
        results.append(measure(drafter, args))
        print(json.dumps(results[-1]), flush=True)
    if args.output:
        args.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
