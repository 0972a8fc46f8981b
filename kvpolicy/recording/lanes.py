"""What one request wanted of one store, step by step: the input of every cache and of every bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpolicy.recording.reader import Recording

__all__ = ["FULL", "Entries", "Lane", "lanes"]

Entries = NDArray[np.integer[Any]]
Numbers = NDArray[np.int64]

FULL = 1 << 31
"""A budget that holds every entry."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One request in one store, from the end of its prompt on.

    weight: rows in a record. at: int64 [n], the recording's step of each of its steps, ascending.
    back: bool [n], it was preempted before the step. seats: int64 [n + 1], where it sat, the end of
    its prompt first. calls: per step what each selector wanted, entries committed before the
    step, ascending. wanted: per step the union. committed: int64 [n + 1], entries durable before each
    step, and after the last; entry ``committed[i]`` to ``committed[i + 1]`` - 1 came with step i. seed:
    what the last prompt row selected, ascending. seeded_at: step of the recording at which the prompt
    ended. budgets: int64 [n + 1], slots as recorded, FULL for all; the first is at ``seeded_at``.
    prior: those before, while its prompt was read. entries: most that are ever named.
    """

    request: int
    store: int
    weight: int
    at: Numbers
    back: NDArray[np.bool_]
    seats: Numbers
    calls: list[list[Entries]]
    wanted: list[Entries]
    recent: list[Entries]
    committed: Numbers
    seed: Entries
    seeded_at: int
    budgets: Numbers
    prior: Numbers

    @property
    def entries(self) -> int:
        return int(self.committed[-1]) + 1

    @property
    def most(self) -> int:
        """Most entries it ever holds: a budget of as many makes it fully resident."""
        return int(self.committed[-1])


def lanes(recording: Recording) -> Iterator[Lane]:
    """A lane for every request that decoded and every store, in that order. One at a time is unpacked."""
    for request in recording.request_ids:
        rows = recording.rows(request)
        if not rows.decode.any() or rows.decode[0]:
            continue  # it never decoded, or its prompt ended before the recording began
        chosen = [recording.selections(request, s) for s in range(len(recording.header.selectors))]
        for number in range(len(recording.header.stores)):
            yield _lane(recording, request, number, chosen)


def _lane(recording: Recording, request: int, number: int, chosen: list[NDArray[np.int32]]) -> Lane:
    store, rows = recording.header.stores[number], recording.rows(request)
    own = [chosen[i] for i, s in enumerate(recording.header.selectors) if s.store == number]
    starts = np.flatnonzero(np.diff(rows.segment, prepend=-1))  # one step each, the seed first
    ends = np.append(starts[1:], len(rows.at))
    first = rows.position[starts]
    taken = np.add.reduceat(rows.accepted.astype(np.int64), starts)
    per = store.tokens_per_entry
    before = first[1:] // per
    committed = np.append(before, (first[-1] + taken[-1]) // per)
    budgets = recording.segments["budgets"][rows.segment[starts], number].astype(np.int64)
    reading = recording.segments["request"] == request
    reading[rows.segment[0] :] = False
    prior = recording.segments["budgets"][reading, number].astype(np.int64)
    calls: list[list[Entries]] = []
    recent: list[Entries] = []
    for start, end, old in zip(starts[1:], ends[1:], before, strict=True):
        each = [_distinct(selection[start:end]) for selection in own]
        calls.append([entries[: np.searchsorted(entries, old)] for entries in each])
        recent.append(each[0] if len(each) == 1 else _distinct(np.concatenate(each)))
    wanted = [one[0] if len(one) == 1 else _distinct(np.concatenate(one)) for one in calls]
    return Lane(
        request=request,
        store=number,
        weight=store.layers,
        at=rows.at[starts[1:]],
        back=rows.back[starts[1:]],
        seats=recording.segments["seat"][rows.segment[starts]],
        calls=calls,
        wanted=wanted,
        recent=recent,
        committed=committed,
        seed=_distinct(np.concatenate([selection[:1].ravel() for selection in own])),
        seeded_at=int(rows.at[0]),
        budgets=np.where(budgets < 0, FULL, budgets),
        prior=np.where(prior < 0, FULL, prior),
    )


def _distinct(entries: Entries) -> Entries:
    """Ascending and distinct, without padding."""
    flat = entries.ravel()
    flat = flat[flat >= 0]
    # One row of a selection is ascending and distinct already.
    return flat if entries.ndim == 2 and len(entries) == 1 else np.unique(flat)
