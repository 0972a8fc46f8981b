"""Held-out bits per byte, selection overlap and cache miss rates of an exported checkpoint.

    python training/evaluate.py --checkpoint kvpolicy/models/tiny_dsa \\
        --heldout training/build/heldout --out kvpolicy/models/tiny_dsa/evaluation.json

Weights as stored, arithmetic in fp32. Needs a GPU: 32 files of 32,768 tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import platform
import shlex
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import layers
import numpy as np
import torch
import torch.nn.functional as F
import triton
from cachesim import POLICIES, miss_table
from export import from_checkpoint, load_params
from model import Forward, Params, Pass, TinyConfig
from torch import Tensor

CONFIG = TinyConfig()
LENGTH, DENSE_LENGTH = 32_768, 8_192
RANGES = ((0, 1024), (1024, 4096), (4096, 8192), (8192, 16384), (16384, 32768))
REQUESTS = {"lib": 6, "test": 4, "doc": 4, "book": 2}
# The cache starts empty at position 3,840; misses count from 4,096 to 8,191.
TRACE_FIRST, COUNT_FROM, TRACE_END = 3_840, 4_096, 8_192
RATIOS = (1.0, 1.5, 2.0, 3.0, 4.0, 8.0)
LAGS = (1, 8, 64)
AGES = (0, 128, 512, 2048, TRACE_END)


def to_ids(text: bytes, length: int, device: str) -> tuple[Tensor, Tensor]:
    """Inputs (BOS first) and targets, each [length]."""
    tokens = torch.tensor([256, *text[:length]], device=device)
    return tokens[:-1], tokens[1:]


@torch.no_grad()
def bits(params: Params, text: bytes, run: Pass) -> tuple[np.ndarray, list[Tensor]]:
    """Bits of every byte [T] and the selections [T, k] of the index groups."""
    ids, target = to_ids(text, run.seq_len, params["embed"].device.type)
    result = Forward(params, CONFIG, run, None)(ids)
    logits = layers.head_logits(result.hidden, params["norm"], params["head"])
    loss = F.cross_entropy(logits, target, reduction="none") / np.log(2)
    return loss.double().cpu().numpy(), result.selected


def by_range(per_file: dict[str, list[np.ndarray]]) -> dict[str, dict[str, float]]:
    """Mean bits per byte by kind and position range."""
    pools = {**per_file, "python": per_file["lib"] + per_file["test"]}
    pools["all"] = [b for kind in per_file.values() for b in kind]
    table = {}
    for kind, arrays in pools.items():
        length = min(map(len, arrays))
        spans = [(a, b) for a, b in RANGES if b <= length]
        row = {f"{a}-{b}": float(np.mean([x[a:b].mean() for x in arrays])) for a, b in spans}
        row["all"] = float(np.mean([x.mean() for x in arrays]))
        table[kind] = {name: round(value, 4) for name, value in row.items()}
    return table


def overlap_statistics(traces: list[np.ndarray]) -> dict[str, object]:
    """Mean overlap at some lags and the age shares of selected rows; traces [S, k] each."""
    counted = [t[COUNT_FROM - TRACE_FIRST :] for t in traces]
    result: dict[str, object] = {}
    for lag in LAGS:
        values = [
            np.intersect1d(a, b, assume_unique=True).size / a.size
            for t in counted
            for a, b in zip(t[:-lag:8], t[lag::8], strict=False)
        ]
        result[f"lag_{lag}"] = round(float(np.mean(values)), 4)
    ages = np.concatenate([
        (np.arange(COUNT_FROM, TRACE_END)[:, None] - t).ravel() for t in counted
    ])  # fmt: skip
    shares = np.histogram(ages, bins=AGES)[0] / ages.size
    result["age_shares"] = {
        f"{a}-{b}": round(float(s), 4) for a, b, s in zip(AGES, AGES[1:], shares, strict=False)
    }
    return result


def miss_job(trace: np.ndarray) -> dict[str, list[float]]:
    """Miss rates of one request and index group."""
    capacities = [int(r * CONFIG.index_topk) for r in RATIOS]
    return miss_table(trace, TRACE_FIRST, capacities, COUNT_FROM - TRACE_FIRST)


def miss_rates(traces: list[list[np.ndarray]], workers: int) -> dict[str, object]:
    """Percent per policy, by group and weighted by the layers of the groups."""
    context = multiprocessing.get_context("spawn")
    jobs = [trace for group in traces for trace in group]
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        tables = list(pool.map(miss_job, jobs))
    requests, weights = len(traces[0]), [len(g) for g in CONFIG.groups]
    result: dict[str, object] = {"ratios": RATIOS, "rows": CONFIG.index_topk}
    for policy in POLICIES:
        rates = np.array([t[policy] for t in tables]).reshape(len(weights), requests, -1) * 100
        weighted = np.average(rates, axis=0, weights=weights)
        groups = zip(CONFIG.groups, rates.mean(1), strict=True)
        result[policy] = {
            "weighted": weighted.mean(0).round(2).tolist(),
            "weighted_min": weighted.min(0).round(2).tolist(),
            "weighted_max": weighted.max(0).round(2).tolist(),
            "groups": {f"{g[0]}-{g[-1]}": r.round(2).tolist() for g, r in groups},
        }
    return result


def machine(checkpoint: Path) -> dict[str, object]:
    """What ran, on what, with which weights."""
    weights = (checkpoint / "model.safetensors").read_bytes()
    return {
        "command": shlex.join(["python", *sys.argv]),
        "gpu": torch.cuda.get_device_name(), "python": platform.python_version(),
        "torch": torch.__version__, "triton": triton.__version__,
        "model_sha256": hashlib.sha256(weights).hexdigest(),
    }  # fmt: skip


def rounding_cost(state: Path, files: list[bytes], stored: list[float]) -> float:
    """Mean bits per byte that rounding the weights to bf16 costs on the files' first 8,192."""
    params = {n: p.cuda() for n, p in load_params(state).items()}
    run = Pass(DENSE_LENGTH, dense=False, dtype=torch.float32)
    exact = [bits(params, text, run)[0].mean() for text in files]
    return round(float(np.mean(stored) - np.mean(exact)), 5)


def evaluate(args: argparse.Namespace) -> dict[str, object]:
    """Run everything; returns the content of evaluation.json."""
    params = {n: p.cuda() for n, p in from_checkpoint(args.checkpoint, CONFIG).items()}
    sparse: dict[str, list[np.ndarray]] = defaultdict(list)
    dense: dict[str, list[np.ndarray]] = defaultdict(list)
    traces: list[list[np.ndarray]] = [[] for _ in CONFIG.groups]
    texts, per_file = [], {}
    for file in sorted(args.heldout.glob("*.txt")):
        kind, text = file.name.split("-")[0], file.read_bytes()
        loss, selected = bits(params, text, Pass(LENGTH, dense=False, dtype=torch.float32))
        dense[kind].append(
            bits(params, text, Pass(DENSE_LENGTH, dense=True, dtype=torch.float32))[0]
        )
        if len(sparse[kind]) < REQUESTS[kind]:
            for group, idx in zip(traces, selected, strict=True):
                group.append(idx[TRACE_FIRST:TRACE_END].cpu().numpy().astype(np.int16))
        sparse[kind].append(loss)
        texts.append(text)
        per_file[file.name] = round(float(loss.mean()), 4)
        print(f"{file.name} {per_file[file.name]:.4f}", flush=True)
    short = {k: [x[:DENSE_LENGTH] for x in v] for k, v in sparse.items()}
    result: dict[str, object] = {
        "machine": machine(args.checkpoint),
        "bpb_sparse": by_range(sparse), "bpb_sparse_8192": by_range(short),
        "bpb_dense_8192": by_range(dense), "bpb_files": per_file,
        "overlap": {
            f"{g[0]}-{g[-1]}": overlap_statistics(t)
            for g, t in zip(CONFIG.groups, traces, strict=True)
        },
    }  # fmt: skip
    if args.state is not None:
        stored = [float(x.mean()) for k in sorted(short) for x in short[k]]
        result["bf16_rounding_bpb"] = rounding_cost(args.state, texts, stored)
    result["miss_percent"] = miss_rates(traces, args.workers)
    return result


def main() -> None:
    """Parse the command line, evaluate, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--heldout", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--state", type=Path, help="training state, for the cost of rounding")
    parser.add_argument("--workers", type=int, default=16)
    args = parser.parse_args()
    result = evaluate(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: result[k] for k in ("bpb_sparse", "miss_percent")}, indent=1))


if __name__ == "__main__":
    main()
