"""Tokens per second without a drafter and with each, over concurrency and controllers.

    python benchmarks/speculation.py --device cuda --drafter none --drafter ngram \
        --controller adaptive --concurrency 1 --concurrency 16 --output results.json

Held-out text, one prompt per request, all of one length; timed from the step at which every request
decodes to the first that ends, prompts and graph capture left out. Greedy by default, and then every
output must be that of the first drafter named, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from kvpolicy import Engine, EngineConfig, SamplingParams
from kvpolicy.engine.request import State
from kvpolicy.models.loader import DecodeModel
from kvpolicy.workloads.texts import load_corpus


def measure(
    config: EngineConfig, model: DecodeModel | None, given: argparse.Namespace, n: int
) -> Any:
    """(result, outputs, model)"""
    corpus = load_corpus("heldout")
    prompts = [corpus.piece((i + 0.5) / n, given.prompt_bytes) for i in range(n)]
    params = SamplingParams(max_new_tokens=given.tokens, temperature=given.temperature, seed=1)
    with Engine(config, model) as engine:
        engine.prepare(sampled=given.temperature > 0)
        engine.generate(prompts[:1], params.model_copy(update={"max_new_tokens": 4}))
        handles = [engine.submit(prompt, params) for prompt in prompts]
        requests = [handle._request for handle in handles]
        while not all(r.state is State.DECODE for r in requests):
            engine.step()
            if any(r.finished for r in requests):
                sys.exit("a request ended before all prompts were read: more --tokens")
        start, before = time.perf_counter(), sum(len(r.tokens) for r in requests)
        steps, base = engine.steps, engine.metrics()
        while not any(r.finished for r in requests):
            engine.step()
        seconds = time.perf_counter() - start
        tokens = sum(len(r.tokens) for r in requests) - before
        metrics = engine.metrics()
        outputs = [handle.result().logits_sha256 for handle in handles]
        fetched = metrics["fetched_rows"] - base["fetched_rows"]
        return (
            {
                "controller": config.controller,
                "drafter": config.drafter,
                "verification": config.verification,
                "verify_length": config.verify_length,
                "admission": config.admission,
                "concurrency": n,
                "tokens_per_s": round(tokens / seconds, 1),
                "ms_per_step": round(seconds / (engine.steps - steps) * 1e3, 3),
                "accepted_length": metrics["accepted_length"],
                "fetched_rows_per_token": round(fetched / tokens, 2),
                "staging_bytes": metrics["staging_bytes"],
                "ring_bytes": metrics["ring_bytes"],
                "speculation": metrics["speculation"],
            },
            outputs,
            engine.model,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--drafter", action="append")
    parser.add_argument("--controller", action="append")
    parser.add_argument("--concurrency", action="append", type=int)
    parser.add_argument("--verify-length", action="append", choices=("full", "scheduled"))
    parser.add_argument("--admission", choices=("all", "accepted"))
    parser.add_argument("--verification", default="standard")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompt-bytes", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--prefill-chunk", type=int, default=8192)
    parser.add_argument("--device-kv-mib", type=float, default=512.0)
    parser.add_argument("--no-cuda-graphs", action="store_true")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    results, model = [], None
    for n in given.concurrency or [1, 16, 64]:
        for controller in given.controller or ["static:device_buffer_rows=256", "adaptive"]:
            first = None
            for drafter in given.drafter or ["none", "ngram"]:
                for length in given.verify_length or ["full"] if drafter != "none" else ["full"]:
                    config = EngineConfig(
                        device=given.device,
                        controller=controller,
                        drafter=drafter,
                        verification=given.verification,
                        verify_length=length,
                        admission=given.admission,
                        max_concurrency=n,
                        prefill_chunk=given.prefill_chunk,
                        device_kv_mib=given.device_kv_mib,
                        host_kv_mib=2048,
                        cuda_graphs=not given.no_cuda_graphs,
                    )
                    found, outputs, model = measure(config, model, given, n)
                    first = first or outputs
                    found["outputs_equal"] = outputs == first
                    results.append(found)
                    print(json.dumps({**found, "speculation": None}), flush=True)
    document = {"command": " ".join(sys.argv), "results": results}
    if given.output:
        given.output.write_text(json.dumps(document, indent=1) + "\n")
    exact = given.temperature == 0.0 or given.verification == "coupled"
    if exact and not all(result["outputs_equal"] for result in results):
        sys.exit("outputs differ")


if __name__ == "__main__":
    main()
