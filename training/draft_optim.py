"""Muon for a drafter's matrices, AdamW without decay for the rest; can be captured in a CUDA graph."""

from __future__ import annotations

import torch
from draft_model import Params
from optim import ADAM_BETAS, ADAM_EPS, MUON_MOMENTUM, orthogonalise
from torch import Tensor

MUON_LR, ADAM_LR = 4e-3, 3e-3
# Tables of a token's own numbers: their gradients are sparse.
TABLES = ("codebook", "markov_w1.weight", "markov_w2.weight")
WARM_STEPS, PLATEAU_END, FINAL = 100, 0.40, 0.02


def schedule(u: float) -> float:
    """Learning-rate factor at the fraction u of the run."""
    if u < PLATEAU_END:
        return 1.0
    return max(FINAL, 1.0 - (1.0 - FINAL) * (u - PLATEAU_END) / (1.0 - PLATEAU_END))


def is_matrix(name: str, value: Tensor) -> bool:
    """Whether Muon updates it."""
    return value.dim() == 2 and min(value.shape) > 1 and not name.endswith(TABLES)


class DraftOptimizer:
    """State and update of one drafter's parameters; equal shapes are orthogonalised together."""

    def __init__(self, params: Params) -> None:
        """Zero moments."""
        self.params = params
        self.shapes: dict[tuple[int, ...], list[str]] = {}
        for name, value in params.items():
            if is_matrix(name, value):
                self.shapes.setdefault(tuple(value.shape), []).append(name)
        matrices = {n for names in self.shapes.values() for n in names}
        self.rest = [n for n in params if n not in matrices]
        self.momentum = {n: torch.zeros_like(params[n]) for n in matrices}
        self.first = {n: torch.zeros_like(params[n]) for n in self.rest}
        self.second = {n: torch.zeros_like(params[n]) for n in self.rest}
        device = params["norm.weight"].device
        self.factor = torch.zeros((), device=device)
        self.correction = torch.ones(2, device=device)

    def set_step(self, step: int, u: float) -> None:
        """Set the device scalars for the 0-based step, at the fraction u of the run."""
        self.factor.fill_(schedule(u) * min(1.0, (step + 1) / WARM_STEPS))
        for i, beta in enumerate(ADAM_BETAS):
            self.correction[i].fill_(1.0 - beta ** (step + 1))

    @torch.no_grad()
    def update(self, grads: Params) -> None:
        """One step in place."""
        for names in self.shapes.values():
            self._muon(names, [grads[n] for n in names])
        self._adam([grads[n] for n in self.rest])

    def _muon(self, names: list[str], grads: list[Tensor]) -> None:
        momentum = [self.momentum[n] for n in names]
        torch._foreach_lerp_(momentum, grads, 1.0 - MUON_MOMENTUM)
        mixed = torch.stack(torch._foreach_lerp(grads, momentum, MUON_MOMENTUM))
        size = MUON_LR * 0.2 * max(mixed.shape[1:]) ** 0.5
        step = orthogonalise(mixed) * (self.factor * size)
        torch._foreach_sub_([self.params[n] for n in names], list(step.unbind(0)))

    def _adam(self, grads: list[Tensor]) -> None:
        beta1, beta2 = ADAM_BETAS
        first, second = ([d[n] for n in self.rest] for d in (self.first, self.second))
        torch._foreach_lerp_(first, grads, 1.0 - beta1)
        torch._foreach_lerp_(second, torch._foreach_mul(grads, grads), 1.0 - beta2)
        for name, m, v in zip(self.rest, first, second, strict=True):
            scale = (v / self.correction[1]).sqrt_().add_(ADAM_EPS)
            self.params[name].sub_(m / self.correction[0] / scale * (self.factor * ADAM_LR))

    def tensors(self) -> dict[str, Params]:
        """State by kind."""
        return {"momentum": self.momentum, "first": self.first, "second": self.second}
