"""Acceptance of the drafters on held-out text, and calibration of DSpark's confidence.

    python training/evaluate_drafters.py --drafters kvpolicy/models \\
        --heldout training/build/heldout --out training/build/drafters.json

The text is the trajectory: a drafter stands at every position of 4,096..8,191 of a file, through the code
that serves it (``kvpolicy.speculative.drafters``), in fp32. *match*: greedy drafts against the text, walked
in cycles of accepted + 1. *law*: the overlap of draft and target at temperature 0.6, prefixes from the
text; *agree*: the same at temperature 0, 1 where both take the same token. Temperatures of the confidence
are fitted on every second file and judged on the others.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from export import from_checkpoint
from layers import head_logits
from model import Forward, Pass, TinyConfig
from torch import Tensor

from kvpolicy.kernels.sampling import first_of_highest
from kvpolicy.models.glm_dsa import GlmDsa
from kvpolicy.models.loader import load_model
from kvpolicy.speculative.drafters.blockwise import Blockwise
from kvpolicy.speculative.drafters.checkpoint import load
from kvpolicy.speculative.drafters.dflash2 import DFlash2
from kvpolicy.speculative.drafters.dspark import DSpark

TARGET = TinyConfig()
METHODS = ("dflash", "dflash2", "dspark")
FIRST, LENGTH = 4_096, 8_192
TEMPERATURE = 0.6
BINS, GRID = 15, np.geomspace(0.25, 4.0, 97)


@dataclass
class Text:
    """A held-out file. ids: int64 [T]; taps: fp32 [T, m, d]; logits: fp32 [T, V], row i decides i + 1."""

    name: str
    kind: str
    ids: Tensor
    taps: Tensor
    logits: Tensor


@dataclass
class Found:
    """Of every anchor of a file, in order: accepted of the greedy draft with and without its head, the
    overlaps per token at TEMPERATURE and at 0, [n, K] each, and confidence logits on text prefixes [n, K]."""

    anchors: np.ndarray
    accepted: np.ndarray
    body: np.ndarray
    overlap: np.ndarray
    agree: np.ndarray
    sure: np.ndarray | None = None
    recall: list[float] = field(default_factory=list)


@torch.no_grad()
def read(path: Path, params: dict[str, Tensor], taps: tuple[int, ...], length: int) -> Text:
    """Run the target over a file, in fp32 with sparse attention."""
    device = params["embed"].device
    ids = torch.tensor([256, *path.read_bytes()[: length - 1]], device=device)
    run = Pass(len(ids), False, triton=device.type == "cuda", dtype=torch.float32, taps=taps)
    result = Forward(params, TARGET, run, None)(ids)
    logits = head_logits(result.hidden, params["norm"], params["head"])
    return Text(path.stem, path.name.split("-")[0], ids, torch.stack(result.taps, 1), logits)


def softmax(logits: Tensor) -> Tensor:
    """The law at TEMPERATURE."""
    return torch.softmax(logits / TEMPERATURE, -1)


@dataclass
class Drafted:
    """Of a batch of anchors: greedy tokens [r, K] with and without the head, overlaps at TEMPERATURE and at 0
    [r, K], confidence logits [r, K], and how often the text's token is among the candidates [K]."""

    tokens: Tensor
    body: Tensor
    overlap: Tensor
    agree: Tensor
    sure: Tensor | None = None
    recall: Tensor | None = None


def look(
    drafter: Blockwise, hidden: Tensor, logits: Tensor, text: Tensor, target: Tensor
) -> Drafted:
    """text: int64 [r, K + 1], the anchor and what follows; target: its logits [r, K, V]."""
    law, best, body = softmax(target), target.argmax(-1), logits.argmax(-1)
    if not isinstance(drafter, DFlash2 | DSpark):
        overlap = torch.minimum(softmax(logits), law).sum(-1)
        return Drafted(body, body, overlap, (body == best).float())
    drafted, overlap, agree = [text[:, 0]], [], []
    recall = None
    if isinstance(drafter, DFlash2):
        ids, own, weighted = drafter.candidates(hidden, logits)
        recall = (ids == text[:, 1:, None]).any(-1).float().mean(0)
    for k in range(drafter.tokens):
        for previous in (drafted[-1], text[:, k]):
            if isinstance(drafter, DFlash2):
                scores = drafter.path_scores(own[:, k], weighted[:, k], previous)
                token = ids[:, k].gather(1, first_of_highest(scores)[:, None])[:, 0]
                theirs = law[:, k].gather(1, ids[:, k])
            else:
                scores = drafter.corrected(logits[:, k], previous)
                token, theirs = first_of_highest(scores), law[:, k]
            if previous is drafted[-1]:
                following = token
        drafted.append(following)
        overlap.append(torch.minimum(softmax(scores), theirs).sum(-1))
        agree.append((token == best[:, k]).float())
    both = (torch.stack(parts, 1) for parts in (overlap, agree))
    sure = None
    if isinstance(drafter, DSpark):
        sure = drafter.confidence_logits(hidden, text[:, :-1])
    return Drafted(torch.stack(drafted[1:], 1), body, *both, sure, recall)


@torch.no_grad()
def measure(drafter: Blockwise, text: Text, anchors: Tensor, batch: int) -> Found:
    """Draft at every anchor of a file."""
    device, width, count = text.ids.device, drafter.window - 1, drafter.tokens
    kept = drafter.context(text.taps, torch.arange(len(text.ids), device=device))
    back, ahead = torch.arange(-width, 0, device=device), torch.arange(count + 1, device=device)
    parts: list[Drafted] = []
    accepted: dict[str, list[Tensor]] = {"tokens": [], "body": []}
    for own in anchors.split(batch):
        at = own[:, None] + back
        context, where = kept[at.clamp(min=0)], torch.where(at >= 0, at, -1)
        tokens = text.ids[own[:, None] + ahead]
        hidden = drafter.body.block(tokens[:, 0], own, context, where)
        target = text.logits[own[:, None] + ahead[:-1]]
        found = look(drafter, hidden, drafter.body.logits(hidden), tokens, target)
        for name, drafts in (("tokens", found.tokens), ("body", found.body)):
            right = (drafts == tokens[:, 1:]).long().cumprod(1).sum(1)
            accepted[name].append(right.cpu())
        parts.append(found)

    def joined(name: str) -> np.ndarray | None:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else torch.cat(values).double().cpu().numpy()

    recall = [p.recall for p in parts if p.recall is not None]
    overlap, agree = joined("overlap"), joined("agree")
    assert overlap is not None and agree is not None
    return Found(
        anchors.cpu().numpy(), torch.cat(accepted["tokens"]).numpy(),
        torch.cat(accepted["body"]).numpy(), overlap, agree, joined("sure"),
        torch.stack(recall).mean(0).tolist() if recall else [],
    )  # fmt: skip


def walk(found: Found, accepted: np.ndarray) -> tuple[float, np.ndarray]:
    """(tokens a cycle with the bonus, accepted of each cycle) along a file; anchors are consecutive."""
    step, lengths = 0, []
    while step < len(accepted):
        lengths.append(int(accepted[step]))
        step += lengths[-1] + 1
    return float(np.mean(lengths)) + 1.0, np.array(lengths)


def conditional(lengths: np.ndarray, tokens: int) -> list[float]:
    """P(token k accepted | those before it were)."""
    reached = [(lengths >= k).sum() for k in range(tokens + 1)]
    return [round(float(b / max(a, 1)), 3) for a, b in pairwise(reached)]


def calibration_error(predicted: np.ndarray, observed: np.ndarray) -> float:
    """Expected calibration error over BINS equal bins."""
    place = np.minimum((predicted * BINS).astype(int), BINS - 1)
    total = 0.0
    for number in range(BINS):
        inside = place == number
        if inside.any():
            total += inside.mean() * abs(predicted[inside].mean() - observed[inside].mean())
    return float(total)


def survival(logit: np.ndarray, temperatures: list[float]) -> np.ndarray:
    """Products of calibrated confidences up to each token: [n, K]."""
    return np.cumprod(1.0 / (1.0 + np.exp(-logit / np.array(temperatures))), axis=1)


def fit_temperatures(logit: np.ndarray, observed: np.ndarray) -> list[float]:
    """Sequential temperature scaling: per token the temperature whose prefix product has the least error
    against the observed survival [n, K], those before it fixed (DSpark, arXiv 2607.05147)."""
    chosen: list[float] = []
    for k in range(logit.shape[1]):
        before = survival(logit[:, :k], chosen)[:, -1] if k else np.ones(len(logit))
        errors = [
            calibration_error(before / (1.0 + np.exp(-logit[:, k] / t)), observed[:, k])
            for t in GRID
        ]
        chosen.append(round(float(GRID[int(np.argmin(errors))]), 4))
    return chosen


def calibrate(found: list[Found], tokens: int) -> dict[str, object]:
    """Fit on every second file, judge on the others: greedy and sampled requests."""
    result: dict[str, object] = {}
    for name in ("greedy", "sampled"):
        logit, observed, test = [], [], []
        for number, one in enumerate(found):
            assert one.sure is not None
            logit.append(one.sure)
            observed.append(np.cumprod(one.agree if name == "greedy" else one.overlap, axis=1))
            test.append(np.full(len(one.anchors), number % 2 == 1))
        x, y, late = (np.concatenate(parts) for parts in (logit, observed, test))
        temperatures = fit_temperatures(x[~late], y[~late])
        ones = [1.0] * tokens
        result[name] = {"temperatures": temperatures} | {
            f"ece_{label}": [
                round(calibration_error(survival(x[late], t)[:, i], y[late][:, i]), 4)
                for i in range(tokens)
            ]
            for label, t in (("before", ones), ("after", temperatures))
        }
    return result


def summary(found: list[Found], texts: list[Text], tokens: int, python: bool) -> dict[str, object]:
    """Tables over some files. Walks need every anchor; without them those rows are left out."""
    pairs = [
        (f, t) for f, t in zip(found, texts, strict=True) if (t.kind in ("lib", "test")) == python
    ]
    if not pairs:
        return {}
    overlap, agree = (
        np.concatenate([getattr(f, n) for f, _ in pairs]) for n in ("overlap", "agree")
    )
    recall = [f.recall for f, _ in pairs if f.recall]
    table: dict[str, object] = {
        "files": len(pairs),
        "law_overlap": overlap.mean(0).round(3).tolist(),
        "law_tokens": round(float(1.0 + np.cumprod(overlap, 1).sum(1).mean()), 3),
        "agree": agree.mean(0).round(3).tolist(),
        "agree_tokens": round(float(1.0 + np.cumprod(agree, 1).sum(1).mean()), 3),
        "recall": np.mean(recall, 0).round(4).tolist() if recall else [],
    }
    if (np.diff(pairs[0][0].anchors) > 1).any():
        return table
    heads = [walk(f, f.accepted) for f, _ in pairs]
    bodies = [walk(f, f.body)[0] for f, _ in pairs]
    lengths = np.concatenate([lengths for _, lengths in heads])
    rates = [rate for rate, _ in heads]
    return table | {
        "match": round(float(np.mean(rates)), 3),
        "match_harmonic": round(len(rates) / sum(1 / r for r in rates), 3),
        "match_range": [round(min(rates), 2), round(max(rates), 2)],
        "match_without_head": round(float(np.mean(bodies)), 3),
        "match_conditional": conditional(lengths, tokens),
        "match_survival": [round(float((lengths >= k).mean()), 3) for k in range(1, tokens + 1)],
    }


def main() -> None:
    """Evaluate every drafter that is there."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    here = Path(__file__).resolve().parent
    parser.add_argument("--target", type=Path, default=here.parent / "kvpolicy/models/tiny_dsa")
    parser.add_argument("--drafters", type=Path, default=here.parent / "kvpolicy/models")
    parser.add_argument("--heldout", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", default=["lib", "test", "doc"])
    parser.add_argument("--files", type=int, default=1000, help="at most so many of a kind")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--stride", type=int, default=1, help="of anchors; more than 1: no match")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    args = parser.parse_args()
    device = torch.device(args.device)
    model = load_model(str(args.target), device)
    assert isinstance(model, GlmDsa)
    folders = [args.drafters / f"tiny_dsa_{m}" for m in args.methods]
    drafters = [load(f, model) for f in folders if (f / "model.safetensors").is_file()]
    params = {n: p.to(device) for n, p in from_checkpoint(args.target, TARGET).items()}
    paths = [p for k in args.kinds for p in sorted(args.heldout.glob(f"{k}-*"))[: args.files]]
    texts = [read(p, params, drafters[0].taps, LENGTH) for p in paths]
    nll = [float(torch.nn.functional.cross_entropy(t.logits[:-1], t.ids[1:])) for t in texts]
    result: dict[str, object] = {
        "files": {t.name: round(n / math.log(2), 4) for t, n in zip(texts, nll, strict=True)}
    }
    for drafter in drafters:
        anchors = torch.arange(FIRST, LENGTH - drafter.tokens, args.stride, device=device)
        found = [measure(drafter, t, anchors, args.batch) for t in texts]
        own: dict[str, object] = {
            "python": summary(found, texts, drafter.tokens, True),
            "other": summary(found, texts, drafter.tokens, False),
        }
        if isinstance(drafter, DSpark):
            own["calibration"] = calibrate(
                [f for f, t in zip(found, texts, strict=True) if t.kind in ("lib", "test")],
                drafter.tokens,
            )
        result[drafter.name] = own
        print(drafter.name, json.dumps(own), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
