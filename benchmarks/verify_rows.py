"""Rows that a verify step selects, its different ones, and those fetched, for K = 0..7 and some budgets.

    python benchmarks/verify_rows.py --drafter dflash2 --device cuda --output results.json

Held-out text, sampled with coupled verification: every run says the same tokens. Per verify step of one
request, rows of all layers counted; prompts left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from kvpolicy import Engine, EngineConfig, SamplingParams
from kvpolicy.models.loader import DecodeModel
from kvpolicy.workloads.texts import load_corpus


def measure(given: argparse.Namespace, model: DecodeModel | None, width: int, times: int) -> tuple:
    """(line of the table, fingerprints, model, top-k)"""
    config = EngineConfig(
        device=given.device,
        drafter=given.drafter if width else "none",
        num_draft_tokens=width or None,
        verification="coupled",
        controller=f"static:device_buffer_rows={times * 128}",
        admission=given.admission,
        clock="steps",
        prefill_chunk=1024,
        device_kv_mib=256,
        host_kv_mib=1024,
    )
    corpus = load_corpus("heldout")
    texts = [
        corpus.piece((i + 0.5) / given.prompts, given.prompt_bytes) for i in range(given.prompts)
    ]
    params = SamplingParams(max_new_tokens=given.tokens, temperature=given.temperature, seed=1)
    with Engine(config, model) as engine:
        assert engine.memory.layout.topk == 128
        outputs = engine.generate(texts, params)
        metrics = engine.metrics()
        spoken = metrics["speculation"]
        tokens = sum(len(output.tokens) for output in outputs)
        cycles = spoken["cycles"] if spoken else tokens - len(outputs)
        line = {
            "k": width,
            "budget": times,
            "tokens_per_cycle": metrics["accepted_length"] or 1.0,
            **{
                name: round(metrics[f"{name}_rows"] / cycles, 1)
                for name in ("selected", "unique", "fetched")
            },
            "fetched_per_token": round(metrics["fetched_rows"] / (tokens - len(outputs)), 2),
        }
        return line, [output.logits_sha256 for output in outputs], engine.model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--drafter", default="dflash2")
    parser.add_argument("--admission", choices=("all", "accepted"))
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-bytes", type=int, default=3000)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--k", type=int, action="append")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    lines, model, first = [], None, None
    for times in (1, 2, 4, 8):
        for width in given.k or range(8):
            line, outputs, model = measure(given, model, width, times)
            first = first or outputs
            assert outputs == first, "outputs differ"
            lines.append(line)
            print(json.dumps(line), flush=True)
    if given.output:
        document = {"command": " ".join(sys.argv), "drafter": given.drafter, "table": lines}
        given.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
