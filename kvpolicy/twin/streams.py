"""What requests of the twin select: recorded requests as they were, or stretched to a larger model.

A stream is one recorded request: the selection of its last prompt row, then one per decode row. As it was,
a request of the twin *is* the recorded one. Stretched, as :class:`kvpolicy.selection.recorded.RecordedSource`
does on a device, a recorded entry stands for a run of ``unit`` neighbours that are wanted, fetched and
dropped together, so that the bookkeeping works on runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpolicy.errors import UserError
from kvpolicy.geometry.geometry import Geometry
from kvpolicy.recording.reader import Recording
from kvpolicy.selection.recorded import APART, stretch

__all__ = ["Stream", "Streams"]

Ints = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Stream:
    """One recorded request. base: its row in the table, the selection of its last prompt row; decode
    rows follow, ``rows`` of them. prompt_tokens: as recorded."""

    base: int
    rows: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Assigned:
    """What one request of the twin replays: decode row i reads row ``first + (start + i) % rows`` of the
    table, its last prompt row ``seed``. prompt_tokens, output_tokens: its lengths."""

    first: int
    rows: int
    start: int
    seed: int
    prompt_tokens: int
    output_tokens: int


class Streams:
    """All selections of a recording, unpacked, as int64 [rows, selectors, most topk] of units.

    context: None for requests as they were recorded; else entries that every decoding row sees at
    least, over which selections are stretched. padding: the unit that stands for nothing. unit: entries
    of one. units: most units that are ever named. limit: recorded
    requests that are stretched, the longest first (as RecordedSource). UserError for a recording that
    does not fit the geometry.
    """

    def __init__(
        self, recording: Recording, geometry: Geometry, context: int | None = None, limit: int = 32
    ) -> None:
        self.name = recording.path.stem
        self.context = context
        self._check(recording, geometry)
        recorded = recording.header.selectors
        sources = [i % len(recorded) for i in range(len(geometry.selectors))]
        self.unit = geometry.selectors[0].topk // recorded[sources[0]].topk
        numbers = _usable(recording, context is not None)
        numbers = numbers if context is None else numbers[:limit]
        if not numbers:
            raise UserError(f"recording {self.name!r}: no request in it decodes from its prompt on")
        chosen: list[list[Ints]] = [[recording.selections(n, s) for s in sources] for n in numbers]
        # The last prompt row is kept as recorded where requests are; a stretched one has no use for it.
        if context is not None:
            chosen = [
                [_stretched(each, self.unit, context, self.name) for each in own] for own in chosen
            ]
        longest = max(int(recording.rows(n).position[-1]) + 2 for n in numbers)
        self.units = longest if context is None else context // self.unit
        self.streams: list[Stream] = []
        base = 0
        for number, own in zip(numbers, chosen, strict=True):
            first = int(recording.rows(number).position[0])
            self.streams.append(Stream(base, len(own[0]) - 1, first + 1))
            base += len(own[0])
        widest = max(s.topk for s in recorded)
        self.table = np.full((base, len(sources), widest), -1, dtype=np.int64)
        for stream, own in zip(self.streams, chosen, strict=True):
            for selector, each in enumerate(own):
                end = stream.base + len(each)
                self.table[stream.base : end, selector, : each.shape[1]] = each
        self._prompts = np.array([s.prompt_tokens for s in self.streams])

    def _check(self, recording: Recording, geometry: Geometry) -> None:
        recorded = recording.header.selectors
        stretched = self.context is not None
        for i, selector in enumerate(geometry.selectors):
            small = recorded[i % len(recorded)].topk
            if (selector.topk % small if stretched else selector.topk != small) or (
                selector.topk // small != geometry.selectors[0].topk // recorded[0].topk
            ):
                raise UserError(
                    f"recording {recording.path.name!r}: its top-k of {small} does not fit "
                    f"{geometry.name}'s {selector.topk}"
                )
        if not stretched and (
            len(recorded) != len(geometry.selectors)
            or [s.layers for s in recording.header.stores] != [s.n_layers for s in geometry.stores]
        ):
            raise UserError(
                f"recording {recording.path.name!r} is of {recording.header.model}, not of {geometry.name}"
            )

    def assign(self, number: int, prompt_tokens: int, output_tokens: int, context: int) -> Assigned:
        """What request ``number`` replays, and with which lengths.

        As recorded: the stream whose prompt is nearest to ``prompt_tokens``, taken in turn among equally
        near ones; it generates no more than was recorded. Stretched: streams in turn, each turn
        beginning ``APART`` rows later, over a context of any length.
        """
        if self.context is None:
            distance = np.abs(self._prompts - prompt_tokens)
            near = np.flatnonzero(distance == distance.min())
            stream = self.streams[int(near[number % near.size])]
            output = min(output_tokens, stream.rows + 1)
            first = stream.base + 1
            return Assigned(first, stream.rows, 0, stream.base, stream.prompt_tokens, output)
        turn, which = divmod(number, len(self.streams))
        stream = self.streams[which]
        end = context + prompt_tokens
        start = (end + 1 + turn * APART) % stream.rows
        first = stream.base + 1
        seed = first + (end + turn * APART) % stream.rows
        return Assigned(first, stream.rows, start, seed, prompt_tokens, output_tokens)


def _usable(recording: Recording, stretched: bool) -> list[int]:
    """Requests that decode right behind their prompt; those to be stretched as RecordedSource takes them:
    all rows full, the longest first."""
    found = []
    for number in recording.request_ids:
        rows = recording.rows(number)
        if not rows.decode.any() or rows.decode[0] or not rows.decode[1:].all():
            continue
        if not rows.accepted.all():
            continue
        if stretched and int(rows.position[rows.decode][0]) + 1 < recording.topk:
            continue
        found.append((-int(rows.decode.sum()) if stretched else 0, number))
    return [number for _, number in sorted(found)]


def _stretched(chosen: Ints, unit: int, context: int, name: str) -> Ints:
    """Units of a recorded request's selections over ``context`` entries, its seed row's first row too."""
    if int(chosen[1:].min(initial=0)) < 0:
        raise UserError(f"recording {name!r}: a row in it chose fewer than topk entries")
    starts = stretch(chosen[1:].astype(np.int32), unit, context)
    # Runs are at least ``unit`` apart, so no two begin in the same unit.
    return np.concatenate((starts[:1], starts)) // unit
