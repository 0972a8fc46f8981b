"""Selection sources: what stands in for an indexer whose weights are random."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from kvpolicy.bench.cases import Case, WrongResult
from kvpolicy.bench.sizes import Sizes
from kvpolicy.recording import Recording
from kvpolicy.selection import ProcessSource, RecordedSource, SelectionSource

EXAMPLE = "tiny-dsa-step"


def source_cases(sizes: Sizes) -> Iterator[Case]:
    """The process and a stretched recording by batch; the choices must be those of a CPU."""
    geometry, device, context = sizes.geometry, sizes.device, sizes.context
    cpu = torch.device("cpu")
    selector = geometry.selectors[0]
    process = ProcessSource(geometry, device, backend=sizes.backend)
    sources: dict[str, tuple[SelectionSource, SelectionSource]] = {
        "process": (process, ProcessSource(geometry, cpu))
    }
    recording = Recording(EXAMPLE)
    if selector.topk % recording.header.selectors[0].topk == 0:  # else it cannot be stretched to it
        sources["recording"] = (
            RecordedSource(recording, geometry, device, context),
            RecordedSource(recording, geometry, cpu, context),
        )
    for n in sizes.batches:
        requests = torch.arange(n, device=device)
        visible = context - n + requests
        for name, (source, plain) in sources.items():
            call = partial(source.select, selector, requests, visible)
            expected = plain.select(selector, requests.cpu(), visible.cpu())
            check = partial(_check, call, expected)
            size = n * selector.topk * 8
            yield Case("source", f"source, {name}", n, [call] * 16, check, device_bytes=size)


def _check(call: Callable[[], Tensor], expected: Tensor) -> None:
    if not torch.equal(call().cpu(), expected):
        raise WrongResult("a selection source chooses differently on a CPU")
