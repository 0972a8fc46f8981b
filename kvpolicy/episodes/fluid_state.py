"""What episodes that are stepped together are, and how they are seen: arrays over episodes and seats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpolicy.control.features import GROUPS
from kvpolicy.episodes.fluid_loads import MOST_REQUESTS, Loads
from kvpolicy.episodes.picture import picture
from kvpolicy.episodes.scenarios import Scenario
from kvpolicy.memory import accounting
from kvpolicy.memory.accounting import Reserve
from kvpolicy.memory.layout import Layout
from kvpolicy.twin.cost import TERMS, CostModel
from kvpolicy.twin.tables import MissTable

__all__ = ["FluidState"]

Floats = NDArray[np.float64]

# What is kept of the last interval, per episode: requests that came and ended, seconds of a step, bytes over
# the link in a step, tokens made, rows fetched and selected, the worst request's miss rate.
SEEN = ("arrivals", "finished", "step", "moved", "tokens", "fetched", "selected", "worst")


class FluidState:
    """``count`` episodes of a scenario. Arrays are [episodes, seats] unless they say otherwise; a seat is
    free where ``owner`` is -1. interval: steps between two decisions."""

    def __init__(
        self,
        scenario: Scenario,
        layout: Layout,
        table: MissTable,
        cost: CostModel,
        count: int,
        **changes: Any,
    ) -> None:
        config = scenario.config(**{"controller": "adaptive", **changes})
        self.scenario, self.count = scenario, count
        self._table, self._slo = table, scenario.bounds
        self.seats, self.interval = config.max_concurrency, config.control_interval
        self._chunk = config.prefill_chunk
        self._seconds = {term: cost.seconds.get(term, 0.0) for term in TERMS}
        stores = layout.stores
        self._row_bytes = np.array([float(s.record.bytes) for s in stores])
        self._layers = np.array([float(s.store.n_layers) for s in stores])
        self._per = np.array([float(s.store.tokens_per_entry) for s in stores])
        self._even = table.topk
        self._unit = float((self._even * self._row_bytes).sum())
        self._selectors = float(len(layout.geometry.selectors))
        # Bytes of index keys and maps per token, and what windows take per request.
        frame = layout.frame_bytes
        self._required_per_token = sum(
            (frame / s.key.per_frame + frame / s.slot_map.per_frame) / s.store.tokens_per_entry
            for s in stores
        )
        self._required_each = (
            accounting.request_frames(layout, 0) * frame + 2.0 * len(stores) * frame
        )
        self._key_bytes = sum(s.key.bytes / s.store.tokens_per_entry for s in stores)
        staging = config.staging_rows or config.max_concurrency * layout.topk
        reserve = Reserve(staging, config.max_concurrency + config.prefill_chunk, self.seats)
        shared = accounting.check_fixed(layout, reserve, int(config.device_kv_mib * (1 << 20)))
        self._shared = float(shared * frame)
        self.pool = float(int(config.device_kv_mib * (1 << 20)) // frame * frame)
        shape, many = (count, self.seats), (count, MOST_REQUESTS)
        self.owner = np.full(shape, -1, dtype=np.int64)
        self.reading, self.context, self.made, self.age = (np.zeros(shape) for _ in range(4))
        self.first, self.came, self.credited = (np.zeros(shape) for _ in range(3))
        self.final = np.zeros(shape)
        self.output = np.zeros(shape)
        self.full = np.zeros(shape, dtype=bool)
        self.rows = np.zeros((*shape, len(stores)))
        self.now = np.zeros(count)
        self.head, self.tail = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        self._times, self._read, self._ctx, self._out = (np.zeros(many) for _ in range(4))
        self._known = np.zeros(count, dtype=np.int64)
        self._due = np.zeros(many)
        self.loads: list[Loads] = [None] * count  # type: ignore[list-item]
        self._closed = False
        self._entered = np.zeros(count)  # context tokens that were admitted since the last decision
        self._last = {name: np.zeros(count) for name in SEEN}

    def _required(self) -> Floats:
        """Bytes that who runs must have, by final length, and what all share [episodes]."""
        here = self.owner >= 0
        each = np.where(here, self.final * self._required_per_token + self._required_each, 0.0)
        total: Floats = each.sum(axis=1) + self._shared
        return total

    # --- what is seen ----------------------------------------------------------------------------

    def observe(self, groups: Sequence[str]) -> NDArray[np.float32]:
        """The features of the encoder, float32 [episodes, size], of groups that do not depend on the
        model."""
        values = self._features()
        names = [feature.name for group in groups for feature in GROUPS[group]]
        found = np.stack([values[name] for name in names], axis=1)
        return np.clip(found, 0.0, 1.0).astype(np.float32)

    def line(self) -> str:
        """The first episode in one line."""
        seen = {name: float(value[0]) for name, value in self._features().items()}
        waiting = int(self.tail[0] - self.head[0])
        return (
            f"{self.now[0]:.2f} s: {int((self.owner[0] >= 0).sum())} running, {waiting} waiting; memory "
            f"required {seen['required']:.0%}, history {seen['optional']:.0%}, free {seen['free']:.0%}"
        )

    def picture(self) -> NDArray[np.uint8]:
        """The first episode's memory as a bar."""
        seen = self._features()
        return picture(float(seen["required"][0]), float(seen["optional"][0]))

    def _features(self) -> dict[str, Floats]:
        here = self.owner >= 0
        running = here.sum(axis=1).astype(np.float64)
        some = np.maximum(running, 1.0)
        waiting = (self.tail - self.head).astype(np.float64)
        step = self._last["step"]
        head = self.head % self._known
        rows = np.arange(self.count)
        due = (
            self._due[rows, self.head % MOST_REQUESTS] if self._closed else self._times[rows, head]
        )
        wait = np.where(waiting > 0, np.maximum(self.now - due, 0.0), 0.0)
        size = (self._ctx[rows, head] + self._read[rows, head]) * self._required_per_token
        size = np.where(waiting > 0, size + self._required_each, 0.0)
        queue = size * np.minimum(waiting, self.seats - running)
        now_required = (
            np.where(
                here,
                (self.context + self.reading) * self._required_per_token + self._required_each,
                0.0,
            ).sum(axis=1)
            + self._shared
        )
        each = (self._row_bytes / self._per).sum()
        whole = np.where(here, (self.context + self.reading) * each, 0.0)
        room = np.where(
            self.full, whole, np.minimum((self.rows * self._row_bytes).sum(axis=2), whole)
        )
        held = np.where(here, room, 0.0).sum(axis=1)
        total = whole.sum(axis=1)
        decoding = (here & (self.reading <= 0)).sum(axis=1)
        tokens, selected = self._last["tokens"], self._last["selected"]
        tpot = np.divide(
            step * self.interval * decoding, tokens, out=np.zeros(self.count), where=tokens > 0
        )

        def mean(values: Floats) -> Floats:
            found: Floats = np.where(here, values, 0.0).sum(axis=1) / some
            return found

        left = np.where(here, 1 - (self.context + self.reading) / np.maximum(self.final, 1), 0.0)
        return {
            "running": running / self.seats,
            "waiting": _log(waiting, 1024),
            "oldest_wait": _log(np.divide(wait, step, out=np.zeros(self.count), where=step > 0), 4096),
            "arrivals": _half(self._last["arrivals"], 4),
            "finished": _half(self._last["finished"], 4),
            "queue_head": size / self.pool,
            "queue": queue / self.pool,
            "shortages": np.zeros(self.count),
            "preemptions": np.zeros(self.count),
            "required": now_required / self.pool,
            "optional": held / self.pool,
            "free": np.maximum(self.pool - now_required - held, 0.0) / self.pool,
            "resident": np.divide(held, total, out=np.zeros(self.count), where=total > 0),
            "full": (here & self.full).sum(axis=1) / some,
            "demand": _half(total / self.pool, 1),
            "miss_rate": np.divide(self._last["fetched"], selected, out=np.zeros(self.count),
            where=selected > 0),
            "miss_rate_worst": self._last["worst"],
            "fetched": _log(self._last["fetched"] / np.maximum(tokens, 1), 1 << 20),
            "link": _log(self._last["moved"], 1 << 34),
            "step": _log(step * 1e3, 1000),
            "tpot": _half(tpot / self._slo.tpot, 1) if self._slo.tpot else np.zeros(self.count),
            "ttft": _half(wait / self._slo.ttft, 1) if self._slo.ttft else np.zeros(self.count),
            "accepted": _half(tokens / np.maximum(self.interval * decoding, 1), 1),
            "context": _log(mean(self.context), 1 << 20),
            "context_most": _log(np.where(here, self.context, 0.0).max(axis=1), 1 << 20),
            "left": left.sum(axis=1) / some,
            "age": _log(mean(self.age), 4096),
            "generated": _log(mean(self.made), 4096),
            "reading": (running - decoding) / some,
        }  # fmt: skip


def _half(value: Floats, at: float) -> Floats:
    found: Floats = value / (value + at)
    return found


def _log(value: Floats, most: float) -> Floats:
    found: Floats = np.minimum(np.log1p(value) / np.log1p(most), 1.0)
    return found
