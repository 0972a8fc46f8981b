"""Finish the drafters' folders: calibrated temperatures into config.json, and a model card each.

    python training/draft_card.py --evaluation training/build/drafters.json \\
        --log training/build/drafters.jsonl --out kvpolicy/models
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

TITLES = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}
HEADS = {"dflash": "", "dflash2": "selector", "dspark": "Markov head"}
TEXT = """# {title} for tiny-dsa

A drafter for `tiny-dsa` (K = 7): {what}
`docs/speculation.md` says what it computes. {size} bytes of bf16 weights, sha256
`{digest}`.
Like its target it reads bytes, and exists for experiments.

Trained by `training/train_drafters.py` on the text of `tiny-dsa` (`training/corpus_manifest.json`;
licences in the target's model card), {steps:,} steps of 8,192 anchors in {seconds:.0f} s on one NVIDIA H200,
beside the other two drafters, one seed.

## Acceptance on held-out text

Files that neither model was trained on (12 CPython modules, 8 CPython tests; 8 documents apart),
positions 4,096 to 8,191, the text as the trajectory, through the code that serves, in fp32. Tokens a
cycle count the bonus token.

*match*: greedy drafts against the text, in cycles of accepted + 1; mean over files. *overlap*: sum of
min(draft, target) at temperature 0.6, prefixes from the text; *law*: 1 + the sum of its running products.

| | Python | documents |
| --- | --- | --- |
| match, tokens a cycle | **{p[match]:.2f}** | {o[match]:.2f} |
| harmonic mean over files | {p[match_harmonic]:.2f} | {o[match_harmonic]:.2f} |
| lowest and highest file | {p_range} | {o_range} |
{without}| law at temperature 0.6 | {p[law_tokens]:.2f} | {o[law_tokens]:.2f} |

Python, per token:

| token | {columns} |
| --- |{rule}
| accepted, given those before | {conditional} |
| accepted with all before | {survival} |
| overlap at 0.6 | {overlap} |
{recall}
{calibration}## Limits

* One run, one seed, 7 minutes for three drafters: no statement about the methods in general.
* Labels are half the text's token, half the target's law at temperature 1; it was not trained on what the
  target writes.
* Acceptance falls where the text is unlike Python and its documents, and at the start of a file.
* `match` compares with the text. What the target itself says is likelier, so decoding accepts more, and
  greedy text of a small model loops, which is easier still: `benchmarks/acceptance.py` measures decoding.

## Reproduce

```sh
python training/corpus.py
python training/train_drafters.py --data training/build/train.u8.xz \\
    --state training/build/drafters --out kvpolicy/models --max-seconds {limit}
python training/evaluate_drafters.py --heldout training/build/heldout --out training/build/drafters.json
python training/draft_card.py --evaluation training/build/drafters.json
```

The learning rate follows the clock, so another machine takes another number of steps.
"""
BLOCK = "a transformer over a block of masks"
WHAT = {
    "dflash": f"{BLOCK}, whose rows draft independently. The baseline of the other two.",
    "dflash2": f"{BLOCK} with a dynamic convolution,\nand a selector that walks through the 16 likeliest "
    "tokens of each row.",
    "dspark": f"{BLOCK}, a Markov head that adds a\nbias by the token before, and a confidence head.",
}


def row(values: list[float], digits: int = 2) -> str:
    """Cells of a table."""
    return " | ".join(f"{v:.{digits}f}" for v in values)


def span(found: dict[str, Any]) -> str:
    """Lowest and highest file."""
    low, high = found["match_range"]
    return f"{low:.2f} - {high:.2f}"


def calibration_text(found: dict[str, Any] | None) -> str:
    """The section on confidence, empty for drafters without."""
    if found is None:
        return ""
    lines = [
        "## Confidence\n",
        "Expected calibration error (15 bins) of the product of confidences up to each token against",
        "survival, before and after sequential temperature scaling. *greedy*: survival is a match with the",
        "text; *sampled*: the running product of overlaps at 0.6. Fitted on positions 2,048 to 4,095 of the",
        "same files, judged on 4,096 to 8,191; Python.\n",
        f"| | {row([1, 2, 3, 4, 5, 6, 7], 0)} |",
        "| --- |" + " --- |" * 7,
    ]
    for name in ("greedy", "sampled"):
        own = found[name]
        lines.append(f"| {name}, temperatures | {row(own['temperatures'])} |")
        for when in ("before", "after"):
            lines.append(f"| {name}, error {when} | {row(own[f'ece_{when}'], 3)} |")
    return "\n".join(lines) + "\n\n"


def card(
    method: str, found: dict[str, Any], weights: bytes, last: dict[str, Any], limit: int
) -> str:
    """The text of one model card."""
    p, o = found["python"], found["other"]
    head = HEADS[method]
    without = (
        f"| match without the {head} | {p['match_without_head']:.2f} | {o['match_without_head']:.2f} |\n"
        if head
        else ""
    )
    recall = f"| true token among the candidates | {row(p['recall'])} |\n" if p["recall"] else ""
    count = len(p["match_conditional"])
    return TEXT.format(
        title=TITLES[method], what=WHAT[method], size=f"{len(weights):,}",
        digest=hashlib.sha256(weights).hexdigest(), steps=last["step"], seconds=last["seconds"],
        p=p, o=o, p_range=span(p), o_range=span(o), without=without,
        columns=row(list(range(1, count + 1)), 0), rule=" --- |" * count,
        conditional=row(p["match_conditional"]), survival=row(p["match_survival"]),
        overlap=row(p["law_overlap"]), recall=recall,
        calibration=calibration_text(found.get("calibration")), limit=limit,
    )  # fmt: skip


def main() -> None:
    """Write temperatures and cards."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    here = Path(__file__).resolve().parent
    parser.add_argument("--evaluation", type=Path, required=True)
    parser.add_argument("--log", type=Path, default=here / "build/drafters.jsonl")
    parser.add_argument("--out", type=Path, default=here.parent / "kvpolicy/models")
    parser.add_argument("--limit", type=int, default=430, help="--max-seconds of the run")
    args = parser.parse_args()
    evaluation = json.loads(args.evaluation.read_text())
    last = json.loads(args.log.read_text().splitlines()[-1])
    for method in TITLES:
        folder = args.out / f"tiny_dsa_{method}"
        if method not in evaluation or not folder.is_dir():
            continue
        found = evaluation[method]
        path = folder / "config.json"
        config = json.loads(path.read_text())
        if "calibration" in found:
            config["confidence_temperatures"] = {
                name: own["temperatures"] for name, own in found["calibration"].items()
            }
        path.write_text(json.dumps(config, indent=2) + "\n")
        weights = (folder / "model.safetensors").read_bytes()
        (folder / "MODEL_CARD.md").write_text(card(method, found, weights, last, args.limit))
        (folder / "evaluation.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
