"""Muon for the layers' matrices, AdamW without decay for the rest; captured in a CUDA graph.

Learning rates are device scalars, so that a captured step follows the schedule.
"""

from __future__ import annotations

import torch
from model import INDEXER, MATRICES, Params
from torch import Tensor

MUON_LR, MUON_MOMENTUM, MUON_DECAY = 6e-3, 0.95, 0.02
# Quintic Newton-Schulz coefficients of the Muon reference implementation.
NS_STEPS, NS_A, NS_B, NS_C = 5, 3.4445, -4.7750, 2.0315
ADAM_BETAS, ADAM_EPS = (0.9, 0.95), 1e-8
EMBED_LR, GAIN_LR, INDEX_LR = 1e-2, 3e-3, 2e-3
# The indexer keeps learning to the end: its target moves until the model stops moving.
INDEX_FLOOR = 0.15
WARM_UP, PLATEAU_END, FINAL = 0.02, 0.40, 0.02


def schedule(u: float) -> float:
    """Learning-rate factor at the fraction u of all steps."""
    if u < WARM_UP:
        return u / WARM_UP
    if u < PLATEAU_END:
        return 1.0
    return 1.0 - (1.0 - FINAL) * (u - PLATEAU_END) / (1.0 - PLATEAU_END)


def orthogonalise(update: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices of a stack [L, m, n], by Newton-Schulz in bf16.

    In fp32 on a CPU, where a bf16 product takes seconds.
    """
    tall = update.shape[1] > update.shape[2]
    x: Tensor = update.mT if tall else update
    x = x.bfloat16() if x.is_cuda else x.float()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NS_STEPS):
        gram = x @ x.mT
        x = NS_A * x + (NS_B * gram + NS_C * (gram @ gram)) @ x
    return x.mT.float() if tall else x.float()


class Optimizer:
    """State and update of all stacked parameters."""

    def __init__(self, params: Params) -> None:
        """Zero moments beside every parameter."""
        self.params = params
        device = params["embed"].device
        self.momentum = {n: torch.zeros_like(params[n]) for n in MATRICES}
        rest = [n for n in params if n not in MATRICES]
        self.first = {n: torch.zeros_like(params[n]) for n in rest}
        self.second = {n: torch.zeros_like(params[n]) for n in rest}
        self.factor = torch.zeros((), device=device)
        self.index_factor = torch.zeros((), device=device)
        self.correction = torch.zeros(2, device=device)

    def set_step(self, step: int, total: int) -> None:
        """Set the device scalars for the 0-based step."""
        factor = schedule((step + 1) / total)
        self.factor.fill_(factor)
        self.index_factor.fill_(max(factor, INDEX_FLOOR) if step > WARM_UP * total else factor)
        for i, beta in enumerate(ADAM_BETAS):
            self.correction[i].fill_(1.0 - beta ** (step + 1))

    @torch.no_grad()
    def update(self, grads: dict[str, Tensor]) -> None:
        """One step in place."""
        for name, grad in grads.items():
            if name in self.momentum:
                self._muon(name, grad)
            else:
                self._adam(name, grad)

    def _muon(self, name: str, grad: Tensor) -> None:
        param, momentum = self.params[name], self.momentum[name]
        momentum.lerp_(grad, 1.0 - MUON_MOMENTUM)
        direction = orthogonalise(grad.lerp(momentum, MUON_MOMENTUM))
        # An RMS of 0.2 per entry, whatever the shape.
        size = 0.2 * max(param.shape[1:]) ** 0.5
        lr = self.factor * MUON_LR
        param.mul_(1.0 - lr * MUON_DECAY).sub_(direction * (lr * size))

    def _adam(self, name: str, grad: Tensor) -> None:
        beta1, beta2 = ADAM_BETAS
        first, second = self.first[name], self.second[name]
        first.lerp_(grad, 1.0 - beta1)
        second.lerp_(grad.square(), 1.0 - beta2)
        scale = (second / self.correction[1]).sqrt_().add_(ADAM_EPS)
        if name in INDEXER:
            lr = self.index_factor * INDEX_LR
        else:
            lr = self.factor * (EMBED_LR if name == "embed" else GAIN_LR)
        self.params[name].sub_(first / self.correction[0] / scale * lr)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """State by kind: momentum, first, second."""
        return {"momentum": self.momentum, "first": self.first, "second": self.second}
