"""transformers' own GlmMoeDsa against kvpolicy on tiny-dsa, teacher-forced over greedy tokens.

Two implementations add in different orders, so logits agree to a tolerance. Where two entries score
almost equally at the edge of the top-k, they may choose differently; then, and only then, later
rows may differ by more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from checking import CheckingModel
from heldout import pieces
from results import keep
from torch import Tensor

from kvpolicy import Engine, EngineConfig, SamplingParams
from kvpolicy.models.checkpoint import checkpoint_folder
from kvpolicy.models.glm_dsa import GlmDsa
from kvpolicy.models.loader import load_model

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore:::transformers"),
    pytest.mark.timeout(1500),
]
NEW_TOKENS = 256
MEDIAN, LARGE, GAP, TIE, SHARE = 5e-5, 2e-4, 1e-2, 1e-5, 1e-3


class LoggingModel(CheckingModel):
    """Also keeps the logits of every wanted row."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.logits: list[Tensor] = []

    def forward(self, tokens: Tensor, memory: Any, wanted: Tensor) -> Tensor:
        logits = super().forward(tokens, memory, wanted)
        self.logits.append(logits.clone())
        return logits

    def chosen(self) -> dict[str, Tensor]:
        """Selections of all rows in position order, per selector: [rows, k]."""
        names = dict.fromkeys(name for name, _ in self.selections)
        return {n: torch.cat([s for name, s in self.selections if name == n]) for n in names}


@dataclass
class Ours:
    tokens: list[int]
    logits: Tensor
    chosen: dict[str, Tensor]
    fingerprint: str


def ours(model: GlmDsa, prompt: bytes, controller: str) -> Ours:
    logging = LoggingModel(model)
    config = EngineConfig(
        device="cpu",
        controller=controller,
        max_concurrency=1,
        staging_rows=2048,
        device_kv_mib=24,
        host_kv_mib=32,
    )
    with Engine(config, model=logging) as engine:  # type: ignore[arg-type]
        output = engine.generate([prompt], SamplingParams(max_new_tokens=NEW_TOKENS))[0]
    assert output.finish_reason == "length", "a greedy run that ends early tests too little"
    rows = torch.cat(logging.logits)
    return Ours(output.tokens, rows, logging.chosen(), output.logits_sha256)


class Oracle:
    """transformers' model, with the inputs of its indexers kept so that scores can be recomputed."""

    def __init__(self) -> None:
        folder = checkpoint_folder("tiny-dsa")
        self.model = transformers.GlmMoeDsaForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.seen: dict[int, tuple[Any, ...]] = {}
        self.chosen: dict[int, Tensor] = {}
        for layer in self.model.model.layers:
            if layer.self_attn.indexer is not None:
                layer.self_attn.indexer.register_forward_hook(self._keep, with_kwargs=True)

    def _keep(self, module: Any, args: tuple[Any, ...], kwargs: Any, result: Tensor) -> None:
        self.seen[module.layer_idx] = (module, *args[:3])
        self.chosen[module.layer_idx] = result[0]

    @torch.no_grad()
    def logits(self, ids: list[int]) -> Tensor:
        return self.model(torch.tensor([ids]), use_cache=False).logits[0]

    @torch.no_grad()
    def scores(self, layer: int, row: int) -> Tensor:
        """Index scores of one row over what it may see, by transformers' formula, in float64."""
        module, hidden, latent, (cos, sin) = self.seen[layer]
        dim = module.qk_rope_head_dim

        def turn(x: Tensor, at: slice) -> Tensor:
            half = dim // 2
            c, s = cos[0, at, None, :half].double(), sin[0, at, None, :half].double()
            a, b = x[..., :dim][..., 0::2], x[..., :dim][..., 1::2]
            return torch.cat([a * c - b * s, b * c + a * s, x[..., dim:]], dim=-1)

        one = slice(row, row + 1)
        q = module.wq_b(latent[0, one]).double().view(1, module.n_heads, module.head_dim)
        k = module.k_norm(module.wk(hidden[0, : row + 1])).double()[:, None]
        q, k = turn(q, one)[0], turn(k, slice(0, row + 1))[:, 0]
        weight = module.weights_proj(hidden[0, one]).double()[0] * module.n_heads**-0.5
        return weight @ torch.relu(q @ k.T * module.softmax_scale)


def differing_rows(oracle: Oracle, mine: Ours, model: GlmDsa, topk: int) -> dict[int, list[int]]:
    """Rows that chose another set, by source layer."""
    differing: dict[int, list[int]] = {}
    for selector in model.geometry.selectors:
        layer = selector.source_layer
        theirs = oracle.chosen[layer].long()
        rows = []
        for row in range(topk, theirs.shape[0]):
            if not torch.equal(theirs[row].sort().values, mine.chosen[selector.name][row]):
                rows.append(row)
        differing[layer] = rows
    return differing


def boundary_gaps(oracle: Oracle, differing: dict[int, list[int]], topk: int) -> list[float]:
    """Relative gap of the scores at the edge of the top-k, for every differing row, in row order."""
    gaps = []
    for row, layer in sorted((row, layer) for layer, rows in differing.items() for row in rows):
        best = oracle.scores(layer, row).sort(descending=True).values[topk - 1 : topk + 1]
        gaps.append(float((best[0] - best[1]) / best[0].abs()))
    return gaps


def compare(oracle: Oracle, model: GlmDsa, prompt: bytes, controller: str) -> dict[str, Any]:
    """Hold one prompt against the oracle; returns what was measured."""
    mine = ours(model, prompt, controller)
    ids = [*prompt, *mine.tokens]
    theirs = oracle.logits(ids[:-1])
    assert next(iter(mine.chosen.values())).shape[0] == len(ids) - 1
    tail = theirs[len(prompt) - 1 :]
    error = (tail - mine.logits).abs()
    topk = model.geometry.selectors[0].topk
    differing = differing_rows(oracle, mine, model, topk)
    rows = sum(len(r) for r in differing.values())
    first = min((min(r) for r in differing.values() if r), default=len(ids))

    gaps = boundary_gaps(oracle, differing, topk)
    # The first difference has exact inputs, up to rounding; all later ones may follow from it.
    if gaps:
        assert gaps[0] < TIE, f"row {first}: chosen apart with a gap of {gaps[0]:.1e}"
    large = (error.max(dim=1).values > LARGE).nonzero()[:, 0] + len(prompt) - 1
    assert all(int(row) >= first for row in large), "a large difference without a cause"
    best = tail.topk(2).values
    sure = best[:, 0] - best[:, 1] > GAP
    assert torch.equal(tail.argmax(-1)[sure], mine.logits.argmax(-1)[sure])
    assert float(error.median()) <= MEDIAN
    return {
        "median": float(error.median()),
        "max": float(error.max()),
        "rows_apart": rows,
        "pairs": len(differing) * (len(ids) - 1),
        "largest_gap": max(gaps, default=0.0),
        "rows_above_2e-4": len(large),
        "sure": float(sure.float().mean()),
    }


def check(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Compare ``count`` held-out prompts, fully resident and with an eighth of the context hot."""
    model = load_model("tiny-dsa", torch.device("cpu"))
    assert isinstance(model, GlmDsa)
    oracle = Oracle()
    lengths = np.linspace(4096, 700, 8).astype(int).tolist() if count == 8 else [1500, 700]
    results = []
    for (name, text), length in zip(pieces(), lengths, strict=False):
        eighth = (length + NEW_TOKENS) // 8
        for controller in ("resident", f"static:device_buffer_rows={eighth}"):
            found = compare(oracle, model, text[:length], controller)
            results.append({"text": name, "bytes": length, "controller": controller, **found})
            with capsys.disabled():
                print(f"\n  {results[-1]}", end="", flush=True)
    apart = sum(r["rows_apart"] for r in results) / sum(r["pairs"] for r in results)
    assert apart <= SHARE, f"{apart:.2%} of (row, store) chose apart"
    config = {"prompts": count, "new_tokens": NEW_TOKENS}
    keep(f"oracle-{count}", config, {"apart": apart, "prompts": results})


def test_logits_match_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    """Two held-out prompts; `make test-full` runs eight, up to 4,096 bytes."""
    check(2, capsys)


@pytest.mark.full
def test_logits_match_transformers_on_eight_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    """The whole comparison. KVPOLICY_RESULTS=FOLDER keeps its figures as JSON."""
    check(8, capsys)
