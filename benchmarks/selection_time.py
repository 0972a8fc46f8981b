"""How long selection sources take inside a CUDA graph, and that they choose the same as on the CPU.

    python benchmarks/selection_time.py [--out FILE]      # needs a CUDA device

Top-k 2048 of 100K for 1 to 256 requests: the process in Triton and in plain torch, a stretched recording,
and what recording one selector copies. Microseconds per call, medians of 9 replays of 20 calls.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from kvpolicy.geometry.presets import preset
from kvpolicy.kernels.backend import TRITON, prepare_triton
from kvpolicy.recording import Recording
from kvpolicy.selection import ProcessSource, RecordedSource
from kvpolicy.telemetry.record import run_record

CALLS, REPLAYS, CONTEXT = 20, 9, 100_000


def timed(call: Callable[[], object]) -> float:
    """Microseconds of one call among CALLS in a graph."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    found = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) * 1e3 / CALLS)
    return round(sorted(found)[REPLAYS // 2], 2)


def copied(recent: torch.Tensor, seats: torch.Tensor) -> torch.Tensor:
    """What a recorder keeps of one selector in a step."""
    return recent[:, 0].index_select(0, seats).to(torch.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    prepare_triton("cuda")
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    glm = preset("glm-5.3")
    selector, recording = glm.selectors[0], Recording("tiny-dsa-step")
    truth = {
        "process": ProcessSource(glm, cpu),
        "recording": RecordedSource(recording, glm, cpu, CONTEXT),
    }
    sources = {
        "process (triton)": ProcessSource(glm, cuda, backend=TRITON),
        "process (torch)": ProcessSource(glm, cuda),
        "recording": RecordedSource(recording, glm, cuda, CONTEXT),
    }
    results: dict[str, float] = {}
    for n in (1, 16, 128, 256):
        requests = torch.arange(n, device=cuda)
        visible = CONTEXT + requests
        for name, source in sources.items():
            chosen = source.select(selector, requests, visible)
            same = truth[name.partition(" ")[0]].select(selector, requests.cpu(), visible.cpu())
            assert torch.equal(chosen.cpu(), same), name
            results[f"{name} {n}"] = timed(partial(source.select, selector, requests, visible))
        recent = torch.zeros(n + 1, 1, selector.topk, dtype=torch.int64, device=cuda)
        results[f"recorder {n}"] = timed(partial(copied, recent, requests))
    document = {"microseconds": results, "record": run_record({}, "cuda", TRITON)}
    print(json.dumps(document, indent=2))
    if options.out is not None:
        options.out.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
