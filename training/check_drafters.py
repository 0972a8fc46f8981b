"""Check that the drafters train on what serves: one anchor among many against a block of its own, and a
step of training that lowers the loss.

    python training/check_drafters.py       # a CPU will do
"""

from __future__ import annotations

import dataclasses

import torch
from draft_losses import loss_of
from draft_model import Grid, hidden_states, init_params, previous_scores, tiny_config
from draft_optim import DraftOptimizer

from kvpolicy.models.glm_dsa import GlmDsa
from kvpolicy.models.loader import load_model
from kvpolicy.speculative.drafters.checkpoint import KINDS, random_weights
from kvpolicy.speculative.drafters.dflash2 import DFlash2
from kvpolicy.speculative.drafters.dspark import DSpark

BATCH, LENGTH, PHASE = 2, 256, 2


def check_block(method: str, causal: bool, target: GlmDsa) -> None:
    """Hidden states and heads agree in fp32; empty places of the served window hold NaN."""
    cfg = dataclasses.replace(tiny_config(method), causal=causal, window=100)
    weights = random_weights(KINDS[method].shapes(cfg), seed=3)
    drafter = KINDS[method](cfg, weights, target)
    taps, ids = torch.randn(BATCH * LENGTH, 4, 256), torch.randint(0, 256, (BATCH, LENGTH))
    phase = torch.tensor(PHASE)
    anchors = Grid(LENGTH, cfg.block, cfg.window).anchors(phase)
    first = target.embedding[ids[:, anchors]].flatten(0, 1)
    packed = hidden_states(weights, cfg, taps.flatten(1), first, phase, BATCH)
    kept = drafter.context(taps, torch.arange(LENGTH).repeat(BATCH)).view(BATCH, LENGTH, -1)
    worst = 0.0
    for number in (0, 1, 17, 40, len(anchors) - 1):
        anchor = int(anchors[number])
        at = torch.arange(anchor - cfg.window + 1, anchor)
        for sequence in range(BATCH):
            context = torch.where((at >= 0)[:, None], kept[sequence][at.clamp(min=0)], torch.nan)
            token = ids[sequence, anchor][None]
            alone = drafter.body.block(
                token, anchors[number][None], context[None], at.clamp(min=-1)[None]
            )
            worst = max(worst, float((alone[0] - packed[sequence, number]).abs().max()))
    previous, rows = torch.randint(0, 256, (20,)), packed[0, 40:].flatten(0, 1)[:20]
    if isinstance(drafter, DSpark):
        bias = previous_scores(weights, cfg, rows, previous)
        served = drafter.corrected(torch.zeros(20, cfg.vocab), previous)
        worst = max(worst, float((bias - served).abs().max()))
    if isinstance(drafter, DFlash2):
        ids_of, _, weighted = drafter.candidates(rows[:, None], torch.randn(20, 1, cfg.vocab))
        served = drafter.path_scores(torch.zeros(20, cfg.candidates), weighted[:, 0], previous)
        bias = previous_scores(weights, cfg, rows, previous).gather(1, ids_of[:, 0])
        worst = max(worst, float((bias - served).abs().max()))
    print(f"{method} causal={causal}: {worst:.1e}")
    assert worst < 5e-4


def check_learning(method: str, target: GlmDsa) -> None:
    """A few steps on one batch lower the loss, and every parameter moves."""
    cfg = tiny_config(method)
    params = init_params(cfg, 0, "cpu")
    start = {name: value.clone() for name, value in params.items()}
    for value in params.values():
        value.requires_grad_()
    optimizer = DraftOptimizer(params)
    length, phase = 128, torch.tensor(0)
    taps, ids = torch.randn(length, 4 * 256), torch.randint(97, 100, (length + 8,))
    anchors = Grid(length, cfg.block, cfg.window).anchors(phase)
    tokens = ids[anchors[:, None] + torch.arange(cfg.tokens + 1)]
    law = torch.softmax(torch.randn(len(anchors), cfg.tokens, cfg.vocab), -1)
    valid = torch.ones(len(anchors), cfg.tokens, dtype=torch.bool)
    losses = []
    for step in range(6):
        first = target.embedding[tokens[:, 0]]
        h = hidden_states(params, cfg, taps, first, phase, 1).flatten(0, 1)
        loss, _ = loss_of(
            params, cfg, h, target.head.parts[0], law, tokens, valid, torch.tensor(0.5)
        )
        grads = torch.autograd.grad(loss, list(params.values()))
        optimizer.set_step(step + 50, 0.1)
        optimizer.update(dict(zip(params, grads, strict=True)))
        losses.append(loss.item())
    still = [name for name, value in params.items() if torch.equal(value.detach(), start[name])]
    print(f"{method}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert losses[-1] < losses[0] - 0.1 and not still, still


def main() -> None:
    """Run all checks."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    target = load_model("tiny-dsa", torch.device("cpu"))
    assert isinstance(target, GlmDsa)
    for method in KINDS:
        for causal in (False, True):
            check_block(method, causal, target)
        check_learning(method, target)


if __name__ == "__main__":
    main()
