"""The oracle by hindsight: a recorded run beside other policies and beside what none can beat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpolicy.errors import UserError
from kvpolicy.recording.bounds import Pool, belady
from kvpolicy.recording.caches import RULES, rule_named
from kvpolicy.recording.lanes import FULL, Lane, lanes
from kvpolicy.recording.reader import Recording
from kvpolicy.recording.replay import Outcome, replay
from kvpolicy.recording.splits import budgets_by, equal_rows, lru_curve, steepest_first

__all__ = ["BELADY", "CLAIRVOYANT", "SPLITS", "Oracle", "Row"]

Numbers = NDArray[np.int64]

BELADY = "belady"
CLAIRVOYANT = "clairvoyant"
SPLITS = ("recorded", "equal", "best", CLAIRVOYANT)
"""Where budgets come from: the recorded run; equal slots; the steepest stack-distance curves first; the
same, but a cache is made full only where the load to come lets that pay."""


@dataclass(frozen=True, slots=True)
class Row:
    """Rows fetched under an eviction rule and a split of the memory. Rows are per layer: a record of n
    layers counts n.

    fetched: for attention. promoted: because a cache came to hold everything. by_store: fetched, per
    store (empty where stores share). by_step: fetched + nothing else, int64 [steps].
    """

    eviction: str
    split: str
    fetched: int
    promoted: int = 0
    by_store: tuple[int, ...] = ()
    by_step: Numbers = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def moved(self) -> int:
        """All rows that came from the host after the prompts had ended."""
        return self.fetched + self.promoted

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "eviction": self.eviction,
            "split": self.split,
            "fetched_rows": self.fetched,
            "promoted_rows": self.promoted,
            "fetched_rows_by_store": list(self.by_store),
        }


class Oracle:
    """Everything that can be asked of one recording.

    device_bytes: memory of another engine under the same load (None: as recorded). interval: steps
    that a split of the memory holds (None: the recorded control interval). progress: called after
    every lane. UserError for a recording without decode steps; where memory is split, also for a
    model whose stores have rows of different sizes, and for memory that the load does not fit.
    """

    def __init__(
        self,
        recording: Recording,
        device_bytes: int | None = None,
        interval: int | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.recording = recording
        config = recording.record.get("config", {})
        self.interval = interval or int(config.get("control_interval", 8))
        self.lanes: list[Lane] = list(lanes(recording))
        if not self.lanes:
            raise UserError(f"recording {str(recording.path)!r}: no request in it has decoded")
        self.steps = recording.steps["step"]
        self._device_bytes, self._config = device_bytes, config
        self._progress = progress
        self._budgets: dict[str, list[Numbers]] = {"recorded": [x.budgets for x in self.lanes]}

    @cached_property
    def room(self) -> Numbers:
        """Rows of one layer that hot caches could have held at each step, int64 [steps]."""
        device_bytes, config = self._device_bytes, self._config
        sizes = {s.record_bytes / s.layers for s in self.recording.header.stores}
        if len(sizes) > 1:
            raise UserError(
                f"stores have rows of {sorted(sizes)} bytes: one size is needed to compare"
            )
        room = self.recording.steps["room"]
        if device_bytes is not None:
            room = room + (device_bytes - int(config["device_kv_mib"] * (1 << 20)))
            if int(room.min()) < 0:
                need = (device_bytes - int(room.min())) / (1 << 20)
                raise UserError(
                    f"--device-kv-mib {device_bytes / (1 << 20):g}: the recorded load needs at least "
                    f"{need:.2f} beside hot rows"
                )
        rows: Numbers = (room // sizes.pop()).astype(np.int64)
        return rows

    @property
    def wanted(self) -> int:
        """Rows that decode steps selected, the union of a step's rows and selectors."""
        return sum(lane.weight * sum(map(len, lane.wanted)) for lane in self.lanes)

    def budgets(self, split: str) -> list[Numbers]:
        """Budgets of every lane under one of SPLITS."""
        if split not in self._budgets:
            if split == "equal":
                chosen = equal_rows(self.lanes)
            else:
                curves = []
                for lane in self.lanes:
                    curves.append(lru_curve(lane))
                    self._progress()
                chosen = steepest_first(self.lanes, curves)
            self._budgets[split] = budgets_by(chosen, self.lanes, self.room, self.interval)
        return self._budgets[split]

    def row(self, eviction: str, split: str) -> Row:
        """One line: an eviction rule (one of RULES, or BELADY) under one of SPLITS."""
        if eviction != BELADY:
            rule_named(eviction)
        cache_rule = self.recording.record.get("cache_rule", {})
        admit = bool(cache_rule.get("admit_newest", True))
        seed = str(cache_rule.get("seed", "selection"))

        def outcome(lane: Lane, budgets: Numbers) -> Outcome:
            if eviction == BELADY:
                return belady(lane, budgets)
            return replay(lane, budgets, RULES[eviction], self.steps, seed, admit)

        foresees = split == CLAIRVOYANT
        outcomes = []
        planned = self.budgets("best" if foresees else split)
        for lane, budgets in zip(self.lanes, planned, strict=True):
            found = outcome(lane, budgets)
            if foresees:
                found = _spared(lane, budgets, found, outcome)
            outcomes.append(found)
            self._progress()
        return self._sum(eviction, split, outcomes)

    def bound(self) -> Row:
        """Belady over all requests and stores in one memory, split anew at every step."""
        missed = Pool(self.lanes, len(self.steps)).misses(self.room)
        return Row(BELADY, "any", int(missed.sum()), by_step=missed)

    def _sum(self, eviction: str, split: str, outcomes: Sequence[Outcome]) -> Row:
        stores = [0] * len(self.recording.header.stores)
        by_step = np.zeros(len(self.steps), dtype=np.int64)
        promoted = 0
        for lane, outcome in zip(self.lanes, outcomes, strict=True):
            stores[lane.store] += int(outcome.missed.sum()) * lane.weight
            by_step[lane.at] += outcome.missed * lane.weight
            promoted += outcome.promoted * lane.weight
        return Row(eviction, split, sum(stores), promoted, tuple(stores), by_step)


def _spared(
    lane: Lane, budgets: Numbers, found: Outcome, outcome: Callable[[Lane, Numbers], Outcome]
) -> Outcome:
    """The outcome without the promotions that do not pay: a stretch of full residency that begins
    after the prompt copies all of the history, and who knows when it ends keeps one slot less instead.

    Each stretch is judged by replaying the lane, in order; found: with all of them."""
    full = budgets >= FULL
    starts = np.flatnonzero(full[1:] & ~full[:-1]) + 1
    for start in starts.tolist():
        after = np.flatnonzero(~full[start:])
        stop = start + int(after[0]) if after.size else len(budgets)
        tried = budgets.copy()
        tried[start:stop] = lane.most - 1
        without = outcome(lane, tried)
        if _moved(without) < _moved(found):
            budgets, found = tried, without
    return found


def _moved(outcome: Outcome) -> int:
    return int(outcome.missed.sum()) + outcome.promoted
