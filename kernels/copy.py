"""Copies of whole records between the host pool and the arena, as flat lists; reference in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from .paging import gather, scatter


def _words(view: Tensor) -> int:
    items = 1
    for extent in view.shape[2:]:
        items *= extent
    return items * view.element_size() // 4


def host_to_arena(host: Tensor, source: Tensor, view: Tensor, destination: Tensor) -> None:
    """Copy records from word offsets of the host pool to locations; negative ones are skipped."""
    take = (destination >= 0).nonzero()[:, 0]
    if not take.numel():
        return
    at = source[take].to(host.device)[:, None] + torch.arange(_words(view), device=host.device)
    records = host[at].view(view.dtype).view(-1, *view.shape[2:])
    scatter(view, destination[take], records.to(view.device))


def arena_to_host(view: Tensor, source: Tensor, host: Tensor, destination: Tensor) -> None:
    """Copy records from locations to word offsets of the host pool; negative ones are skipped."""
    take = (destination >= 0).nonzero()[:, 0]
    if not take.numel():
        return
    records = gather(view, source[take]).reshape(take.numel(), -1).contiguous()
    words = records.view(torch.int32).to(host.device)
    at = destination[take].to(host.device)[:, None] + torch.arange(_words(view), device=host.device)
    host[at] = words


def arena_to_arena(view: Tensor, source: Tensor, destination: Tensor) -> None:
    """Copy records between locations (disjoint); negative destinations are skipped."""
    take = (destination >= 0).nonzero()[:, 0]
    if take.numel():
        scatter(view, destination[take], gather(view, source[take]))
