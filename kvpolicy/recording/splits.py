"""Budgets in hindsight: the memory that a recorded run had, split in other ways.

A split holds for a control interval, is made of what was running in it, and never exceeds the memory
that was there at any of its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpolicy.recording.lanes import FULL, Entries, Lane

__all__ = ["Curve", "budgets_by", "equal_rows", "lru_curve", "steepest_first"]

Numbers = NDArray[np.int64]

SEED_GROUP = 16
"""Rows of the seeded stack that are told apart: it orders thousands, and a budget need not be finer."""

CURVE_POINTS = 8192
"""Sizes at which a curve is known."""

Split = Callable[[Sequence[int], int], Numbers]
"""(lanes that run, rows of memory) -> slots of each of them."""


def budgets_by(split: Split, lanes: Sequence[Lane], room: Numbers, interval: int) -> list[Numbers]:
    """Budgets of every lane (int64 [n + 1] each, FULL where it holds all) when each interval of the
    recording is split. room: int64 [steps], rows."""
    budgets = [np.zeros(len(lane.at) + 1, dtype=np.int64) for lane in lanes]
    times = [np.append(lane.seeded_at, lane.at) // interval for lane in lanes]
    running: dict[int, list[int]] = {}
    for number, window in enumerate(times):
        for each in np.unique(window).tolist():
            running.setdefault(each, []).append(number)
    for turn, numbers in running.items():
        rows = int(room[turn * interval : (turn + 1) * interval].min())
        for number, slots in zip(numbers, split(numbers, rows).tolist(), strict=True):
            most = lanes[number].most
            budgets[number][times[number] == turn] = FULL if slots >= most else slots
    return budgets


def equal_rows(lanes: Sequence[Lane]) -> Split:
    """The same number of slots for every request and store; what one cannot use goes to the others."""
    most = np.array([lane.most for lane in lanes], dtype=np.int64)
    weight = np.array([lane.weight for lane in lanes], dtype=np.int64)

    def split(numbers: Sequence[int], rows: int) -> Numbers:
        own, cost = most[list(numbers)], weight[list(numbers)]
        order = np.argsort(own, kind="stable")
        slots = np.zeros_like(own)
        left, others = rows, int(cost.sum())
        for i in order:  # those that need least first: the rest shares what they leave
            slots[i] = min(int(own[i]), left // others)
            left -= int(slots[i]) * int(cost[i])
            others -= int(cost[i])
        return slots

    return split


@dataclass(frozen=True, slots=True)
class Curve:
    """Hits that slots add, per slot, steepest first (the concave hull of a lane's hit curve).

    width: slots of each piece, int64. slope: hits per slot and step, float64, falling.
    """

    width: Numbers
    slope: NDArray[np.float64]


def lru_curve(lane: Lane) -> Curve:
    """The hits of a least-recently-used cache of every size, from stack distances over the lane's life.

    The distance of a use is how many distinct entries were used since its last use; a cache of so many
    slots still holds it. Entries of one step have no order: those used again lie evenly among them.
    """
    start = int(lane.committed[0])
    # The seeded stack: what the last prompt row selected on top, below it the newest rows first.
    last = np.full(lane.entries + 1, -1, dtype=np.int64)  # entry -> its group in order of use
    last[:start] = np.arange(start) // SEED_GROUP
    base = start // SEED_GROUP + 1
    alive = np.zeros(base + 2 * len(lane.at) + 1, dtype=np.int64)
    alive[:base] = np.bincount(last[:start], minlength=base)
    depths = [np.empty(0, dtype=np.int64)]

    def touch(entries: Entries, group: int) -> None:
        old = last[entries]
        alive[:] -= np.bincount(old[old >= 0], minlength=alive.size)
        alive[group] += entries.size
        last[entries] = group

    touch(lane.seed[lane.seed < start], base)
    for i, wanted in enumerate(lane.wanted):
        group = base + 2 * i + 1
        newer = np.cumsum(alive[group - 1 :: -1])[::-1]  # used in this group or later
        depths.append(_depths(last[wanted], newer, alive))
        touch(wanted, group)
        touch(np.arange(lane.committed[i], lane.committed[i + 1]), group + 1)
    hits = np.bincount(np.concatenate(depths), minlength=lane.most + 1)
    unit = max(1, lane.most // CURVE_POINTS)
    slots = np.append(np.arange(0, lane.most, unit), lane.most)
    return _hull(slots, np.cumsum(hits)[slots] / max(len(lane.at), 1))


def _depths(groups: Numbers, newer: Numbers, alive: Numbers) -> Numbers:
    """Stack depths of entries by their groups. newer: entries in each group or a later one."""
    groups = np.sort(groups)
    first = np.searchsorted(groups, groups)
    place = np.arange(groups.size) - first
    count = np.searchsorted(groups, groups, side="right") - first
    own = alive[groups]
    depths: Numbers = newer[groups] - own + -(-(place + 1) * own // count)
    return depths


def _hull(slots: Numbers, total: NDArray[np.float64]) -> Curve:
    """The least concave curve above ``total`` (hits with so many slots): Andrew's monotone chain."""
    corners: list[tuple[int, float]] = []
    for x, y in zip(slots.tolist(), total.tolist(), strict=True):
        while len(corners) > 1:
            (left, low), (middle, high) = corners[-2:]
            if (high - low) * (x - middle) > (y - high) * (middle - left):
                break
            corners.pop()
        corners.append((x, y))
    width = np.diff([x for x, _ in corners]).astype(np.int64)
    return Curve(width, np.diff([y for _, y in corners]) / np.maximum(width, 1))


def steepest_first(lanes: Sequence[Lane], curves: Sequence[Curve]) -> Split:
    """Memory goes where a row saves most fetches: greedy on the slopes, optimal on concave curves
    (Fox 1966). A record of n rows saves n and costs n, so slopes of all stores compare."""
    weight = np.array([lane.weight for lane in lanes], dtype=np.int64)

    def split(numbers: Sequence[int], rows: int) -> Numbers:
        owner = np.repeat(np.arange(len(numbers)), [len(curves[i].width) for i in numbers])
        width = np.concatenate([curves[i].width for i in numbers])
        slope = np.concatenate([curves[i].slope for i in numbers])
        order = np.argsort(-slope, kind="stable")
        owner, width = owner[order], width[order]
        cost = width * weight[list(numbers)][owner]
        before = np.cumsum(cost) - cost
        taken = np.clip(rows - before, 0, cost) // weight[list(numbers)][owner]
        slots = np.zeros(len(numbers), dtype=np.int64)
        np.add.at(slots, owner, taken)
        return slots

    return split
