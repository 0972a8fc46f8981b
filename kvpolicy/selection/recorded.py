"""Selections of a recorded small model, stretched to the size of a large one.

A recorded entry stands for a run of neighbours. With k = m x k' the k' recorded entries become k: entry
e becomes the m entries from ``place(e)`` on, where ``place`` keeps the order and leaves every run its
own room. Only entries that the recorded request ever selects get room, spread evenly over the
context: 64 of 8,000 become 2,048 of 100,000 as 64 runs of 32, in 3,125 places. Who repeats, drifts or
returns does so as recorded, so miss rates at the same number of k' (budgets of B'/k' = B/k) are those
of the recording; what is lost is the newest rows' free ride: what the small request generated lies
in the large one's history, and its first use fetches m rows (docs/selection-sources.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvpolicy.errors import UserError
from kvpolicy.geometry.geometry import Geometry, Selector
from kvpolicy.recording.reader import Recording

__all__ = ["RecordedSource", "stretch"]

# Requests of the slice that replay one recorded request start this many of its rows apart.
APART = 97


def stretch(chosen: NDArray[np.int32], run: int, context: int) -> NDArray[np.int32]:
    """First entry of the run of every recorded entry: int32 [n, k'], rows ascending.

    chosen: int32 [n, k'], selections without padding. run: entries of a run. context: entries that the
    runs share. UserError if the distinct entries of ``chosen`` do not fit.
    """
    used = np.unique(chosen)
    if used.size * run > context:
        raise UserError(
            f"{used.size} recorded entries as runs of {run} need a context of {used.size * run}, "
            f"there are {context}"
        )
    places = np.arange(used.size) * context // max(used.size, 1)
    # Runs end within the context; places are at least ``run`` apart.
    starts: NDArray[np.int32] = places[np.searchsorted(used, chosen)].astype(np.int32)
    return starts


class RecordedSource:
    """A recording as a :class:`~kvpolicy.selection.source.SelectionSource`.

    geometry: whose selectors ask; they take the recorded ones in turn. context: entries that every row
    which decodes sees at least; rows that see fewer (of a prompt) choose the newest. The steps of a
    recorded request are repeated from the start when they end. limit: recorded requests that are used,
    the longest first. UserError if the sizes do not fit.
    """

    def __init__(
        self,
        recording: Recording,
        geometry: Geometry,
        device: torch.device,
        context: int,
        limit: int = 32,
    ) -> None:
        self._file = recording.path.name
        self._context = context
        streams = _streams(recording, limit)
        self._rows = torch.tensor([recording.rows(r).decode.sum() for r in streams], device=device)
        self._starts: dict[str, Tensor] = {}
        self._runs: dict[str, Tensor] = {}
        for i, selector in enumerate(geometry.selectors):
            source = i % len(recording.header.selectors)
            small = recording.header.selectors[source].topk
            if selector.topk % small:
                raise UserError(
                    f"recording {str(recording.path)!r}: {selector.topk} selected entries are no "
                    f"multiple of its {small}"
                )
            run = selector.topk // small
            table = _table(recording, streams, source, run, context)
            self._starts[selector.name] = torch.from_numpy(table).to(device)
            self._runs[selector.name] = torch.arange(run, device=device)

    @property
    def name(self) -> str:
        return f"recording:{self._file}"

    def select(self, selector: Selector, requests: Tensor, visible: Tensor) -> Tensor:
        """See the protocol."""
        starts, run = self._starts[selector.name], self._runs[selector.name]
        stream = requests % self._rows.shape[0]
        turn = requests // self._rows.shape[0]
        row = (visible + turn * APART) % self._rows[stream]
        old = (starts[stream, row].long()[:, :, None] + run).flatten(1)
        newest = torch.arange(selector.topk, device=visible.device)
        few = newest < visible[:, None]
        shift = (visible[:, None] - selector.topk).clamp_min(0)
        own = torch.where(few, newest + shift, -1)
        return torch.where(visible[:, None] >= self._context, old, own)


def _streams(recording: Recording, limit: int) -> list[int]:
    """Recorded requests whose decode rows all chose topk entries, the longest first."""
    least = recording.topk
    found = []
    for request in recording.request_ids:
        rows = recording.rows(request)
        if rows.decode.any() and int(rows.position[rows.decode][0]) + 1 >= least:
            found.append((-int(rows.decode.sum()), request))
    if not found:
        raise UserError(
            f"recording {str(recording.path)!r}: no request in it decodes beyond {least} tokens"
        )
    return [request for _, request in sorted(found)[:limit]]


def _table(
    recording: Recording, streams: Sequence[int], selector: int, run: int, context: int
) -> NDArray[np.int32]:
    """First entries of all runs: int32 [streams, most rows, k']."""
    chosen = [
        recording.selections(request, selector)[recording.rows(request).decode]
        for request in streams
    ]
    if any(int(each.min()) < 0 for each in chosen):
        raise UserError(
            f"recording {str(recording.path)!r}: a row in it chose fewer than topk entries"
        )
    parts = [stretch(each, run, context) for each in chosen]
    table = np.zeros((len(parts), max(map(len, parts)), parts[0].shape[1]), dtype=np.int32)
    for own, part in zip(table, parts, strict=True):
        own[: len(part)] = part
    return table
