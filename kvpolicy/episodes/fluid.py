"""Many episodes at once on miss curves: the fast fidelity of the twin.

The same loads, memory and cost model as the exact twin, in arrays over episodes and seats. What is left out:
frames (memory is counted in bytes), what single requests select (curves are means over a recording),
decisions between control intervals, and preemption (admission keeps room for a request's final length).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpolicy.control.actions import MARGIN, MOST_RESERVE, RESERVES, RETAINED
from kvpolicy.control.features import GROUPS
from kvpolicy.episodes.picture import picture
from kvpolicy.episodes.scenarios import Scenario
from kvpolicy.errors import UserError
from kvpolicy.memory import accounting
from kvpolicy.memory.accounting import Reserve
from kvpolicy.memory.layout import Layout
from kvpolicy.twin.cost import TERMS, CostModel
from kvpolicy.twin.tables import MissTable
from kvpolicy.workloads.workload import Workload

__all__ = ["ACTIONS", "FluidEpisodes", "Loads", "knobs_of"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

ACTIONS = ("global", "discrete")
# Requests of an episode that are laid out ahead; a closed load that outlasts them begins again.
MOST_REQUESTS = 512


def knobs_of(name: str, actions: NDArray[Any]) -> tuple[Floats, Floats]:
    """(retained, reserve) of actions [episodes, ...], as the exact twin decodes them; the split
    between stores
    is even here."""
    if name == "discrete":
        reserve, retained = np.divmod(np.asarray(actions).reshape(-1), len(RETAINED))
        return np.array(RETAINED)[retained], np.array(RESERVES)[reserve]
    values = np.asarray(actions, dtype=np.float64).reshape(len(actions), -1)
    shares = np.clip((np.nan_to_num(values, nan=-1.0) + 1) / 2, 0.0, 1.0)
    return shares[:, 0], shares[:, 1] * MOST_RESERVE


@dataclass(frozen=True)
class Loads:
    """A load as columns: arrival times, prompt tokens to read, contexts before them, tokens to make."""

    times: Floats
    read: Floats
    context: Floats
    output: Floats
    closed: bool
    ends: Floats
    levels: Floats
    uri: str

    @classmethod
    def of(cls, load: Workload, read: int | None) -> Loads:
        """The first requests of a workload."""
        rows = [
            (a.time, float(len(a.prompt)), float(a.max_new_tokens))
            for a in islice(load.requests(), MOST_REQUESTS)
        ]
        columns = np.array(rows, dtype=np.float64).reshape(-1, 3)
        size = columns[:, 1]
        fresh = size if read is None else np.minimum(size, read)
        ends = np.array([phase.end for phase in load.phases])
        levels = np.array([float(phase.level or 0) for phase in load.phases])
        return cls(
            columns[:, 0], fresh, size - fresh, columns[:, 2], load.closed, ends, levels, load.uri
        )


class FluidEpisodes:
    """``count`` episodes of a scenario, each with a load of its own, stepped together.

    draw: a load for an episode when it begins. interval: steps between two decisions. Arrays are
    [episodes, seats] unless they say otherwise; a seat is free where ``owner`` is -1.
    """

    def __init__(
        self,
        scenario: Scenario,
        layout: Layout,
        table: MissTable,
        cost: CostModel,
        count: int,
        draw: Callable[[int], Workload],
        **changes: Any,
    ) -> None:
        config = scenario.config(**{"controller": "adaptive", **changes})
        self.scenario, self.count, self._draw = scenario, count, draw
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
        self._last: dict[str, Floats] = {}
        self.begin(np.arange(count))

    # --- episodes --------------------------------------------------------------------------------

    def begin(self, which: Ints) -> None:
        """New loads for these episodes, and on to their first decision."""
        for i in which.tolist():
            load = Loads.of(self._draw(i), self.scenario.own.read)
            if not load.times.size:
                load = Loads.of(self._draw(i), self.scenario.own.read)
            if not load.times.size:
                raise UserError(f"scenario {self.scenario.name!r}: two loads without a request")
            n = load.times.size
            self.loads[i], self._closed = load, load.closed
            self._times[i, :n], self._read[i, :n] = load.times, load.read
            self._ctx[i, :n], self._out[i, :n] = load.context, load.output
            self._times[i, n:] = np.inf
            self._known[i] = n
        self.owner[which] = -1
        self.now[which] = 0.0
        self.head[which] = self.tail[which] = 0
        if not self._last:
            zero = np.zeros(self.count)
            names = (
                "arrivals",
                "finished",
                "step",
                "moved",
                "tokens",
                "fetched",
                "selected",
                "wait",
            )
            self._last = {name: zero.copy() for name in names}
        for values in self._last.values():
            values[which] = 0.0
        self._arrive()
        self._skip_to_first()
        self._admit()

    @property
    def ends(self) -> Floats:
        """When each load is over, seconds [episodes]."""
        return np.array([load.ends[-1] for load in self.loads])

    def _levels(self) -> Ints:
        """Requests that a closed load keeps in the system now."""
        found = [load.levels[np.searchsorted(load.ends, t, "right").clip(max=len(load.ends) - 1)]
                 for load, t in zip(self.loads, self.now.tolist(), strict=True)]  # fmt: skip
        return np.array(found, dtype=np.int64)

    def _arrive(self) -> None:
        """``tail``: how many have come. Where the load is closed they come as others end."""
        before = self.tail.copy()
        if self._closed:
            inside = (self.owner >= 0).sum(axis=1) + self.tail - self.head
            more = np.maximum(self._levels() - inside, 0)
            for i in np.flatnonzero(more).tolist():
                slots = np.arange(self.tail[i], self.tail[i] + more[i]) % MOST_REQUESTS
                self._due[i, slots] = self.now[i]
            self.tail += more
        else:
            self.tail = (self._times <= self.now[:, None]).sum(axis=1)
        self._last["arrivals"] = (self.tail - before).astype(np.float64)

    def _skip_to_first(self) -> None:
        """Where nobody is in the system time passes until somebody comes."""
        if self._closed:
            return
        idle = (self.tail == self.head) & ~(self.owner >= 0).any(axis=1)
        for i in np.flatnonzero(idle).tolist():
            if self.tail[i] < self._known[i]:
                self.now[i] = max(self.now[i], self._times[i, self.tail[i]])
                self.tail[i] = int((self._times[i] <= self.now[i]).sum())
            else:
                self.now[i] = max(self.now[i], self.loads[i].ends[-1])

    def _required(self) -> Floats:
        """Bytes that who runs must have, by final length, and what all share [episodes]."""
        here = self.owner >= 0
        each = np.where(here, self.final * self._required_per_token + self._required_each, 0.0)
        total: Floats = each.sum(axis=1) + self._shared
        return total

    def _admit(self) -> None:
        """Waiting requests in order, while a seat and their required memory are free."""
        waiting = self.tail > self.head
        if not waiting.any():
            return
        required = self._required()
        free_seats = (self.owner < 0).any(axis=1)
        going = np.flatnonzero(waiting & free_seats)
        while going.size:
            number = self.head[going] % self._known[going]
            final = self._ctx[going, number] + self._read[going, number] + self._out[going, number]
            need = final * self._required_per_token + self._required_each
            fits = required[going] + need <= self.pool
            alone = ~(self.owner[going] >= 0).any(axis=1)
            going, number = going[fits | alone], number[fits | alone]
            if not going.size:
                return
            final, need = final[fits | alone], need[fits | alone]
            seat = (self.owner[going] < 0).argmax(axis=1)
            at = (going, seat)
            came = (self._due[going, self.head[going] % MOST_REQUESTS] if self._closed
                    else self._times[going, number])  # fmt: skip
            self.owner[at] = self.head[going]
            self.reading[at], self.context[at] = self._read[going, number], self._ctx[going, number]
            self.output[at], self.final[at] = self._out[going, number], final
            self.made[at] = self.age[at] = self.credited[at] = 0.0
            self.first[at], self.came[at] = -1.0, came
            self.full[at] = False
            self.rows[at] = 0.0
            self._entered[going] += self._ctx[going, number]
            required[going] += need
            self.head[going] += 1
            going = going[
                (self.tail[going] > self.head[going]) & (self.owner[going] < 0).any(axis=1)
            ]

    @property
    def _entered(self) -> Floats:
        if "entered" not in self._last:
            self._last["entered"] = np.zeros(self.count)
        return self._last["entered"]

    # --- a decision and its interval -------------------------------------------------------------

    def step(self, retained: Floats, reserve: Floats) -> dict[str, Floats]:
        """Share out memory, serve ``interval`` steps, let requests come and go. Returns what happened, by
        the names of ``Terms``, each float64 [episodes]. Episodes that are over stand still."""
        over = self.over
        moved = self._share_out(retained, reserve)
        done = self._serve(moved, over)
        self._arrive()
        self._skip_to_first()
        self._admit()
        return done

    @property
    def over(self) -> Bools:
        """Which episodes have come to the end of their load."""
        found: Bools = self.now >= self.ends - 1e-9
        return found

    def _spare(self) -> Floats:
        """Bytes that hot rows can take [episodes]."""
        return np.maximum(self.pool - self._required(), 0.0)

    def _share_out(self, retained: Floats, reserve: Floats) -> Floats:
        """Budgets as ``actions.spread`` sets them. Returns bytes copied because caches became full."""
        here = self.owner >= 0
        room = np.maximum(retained * (self._spare() - reserve * self.pool), 0.0)
        length = self.context + self.reading  # a prompt has its room from the start
        entries = np.minimum(length + MARGIN, self.final)
        each = (self._row_bytes / self._per).sum()
        need = np.where(here, entries * each, np.inf)
        level = _levels(need, room)[:, None]
        full = here & (need <= level)
        new = full & ~self.full
        moved: Floats = np.where(new, self.context * each, 0.0).sum(axis=1)
        self.full = full
        share = np.where(np.isinf(level), 0.0, level) / self._unit
        self.rows = np.where(
            full[..., None], self.final[..., None] / self._per, share[..., None] * self._even
        )
        return moved

    def _serve(self, moved: Floats, over: Bools) -> dict[str, Floats]:
        here = (self.owner >= 0) & ~over[:, None]
        steps = float(self.interval)
        # Prompts, a chunk a step for all of them together, by seat.
        reading = np.where(here, self.reading, 0.0)
        before = np.cumsum(reading, axis=1) - reading
        read = np.clip(self._chunk * steps - before, 0.0, reading)
        done_reading = here & (reading > 0) & (read >= reading)
        prompt_steps = np.minimum(
            np.ceil(np.minimum(reading.sum(axis=1), self._chunk * steps) / self._chunk), steps
        )
        decoding = here & (self.reading <= 0)
        left = np.maximum(self.output - self.made, 0.0)
        tokens = np.where(decoding, np.minimum(left, steps), 0.0)
        misses = self._table.at(self.rows)
        entries = self.context[..., None] / self._per
        wanted = np.minimum(self._even, entries)
        misses = np.where(self.full[..., None], 0.0, np.minimum(misses, wanted)) * tokens[..., None]
        link = (misses * self._row_bytes).sum(axis=(1, 2))
        fetched = (misses * self._layers).sum(axis=2)
        selected = (wanted * self._layers).sum(axis=2) * tokens
        seeded = np.where(
            done_reading & ~self.full,
            (np.minimum(self.rows, entries) * self._row_bytes).sum(axis=2),
            0.0,
        )
        moved = moved + seeded.sum(axis=1) + self._entered * self._key_bytes
        mapped_layers = np.where(self.full, 0.0, self._layers.sum())
        work = {
            "decode_steps": np.minimum(tokens.max(axis=1, initial=0.0), steps),
            "prompt_steps": prompt_steps,
            "rows": tokens.sum(axis=1),
            "link_bytes": link,
            "resolved_rows": np.where(self.full, 0.0, selected).sum(axis=1),
            "attended_rows": selected.sum(axis=1),
            "scanned_keys": (self.context * tokens).sum(axis=1) * self._selectors,
            "prompt_rows": read.sum(axis=1),
            "prompt_keys": (self.context * read).sum(axis=1) * self._selectors,
            "prompt_mapped_rows": (read * mapped_layers).sum(axis=1),
            "moved_bytes": moved,
            "entered_tokens": self._entered,
        }
        seconds = np.zeros(self.count)
        for term, each in self._seconds.items():
            if each:
                seconds += each * work[term]
        busy = here.any(axis=1)
        seconds = np.where(busy, seconds, 0.0)
        start, end = self.now, self.now + seconds
        self._entered[:] = 0.0
        good, good_ended, ended = self._move_on(
            start, end, seconds, tokens, read, done_reading, here
        )
        self.now = end
        waiting = (self.tail - self.head).astype(np.float64)
        total = tokens.sum(axis=1) + done_reading.sum(axis=1)
        self._last.update(
            finished=ended.sum(axis=1).astype(np.float64),
            step=seconds / steps,
            moved=(link + moved) / steps,
            tokens=total,
            fetched=fetched.sum(axis=1),
            selected=selected.sum(axis=1),
        )
        rate = np.divide(fetched, selected, out=np.zeros_like(fetched), where=selected > 0)
        self._last["worst"] = rate.max(axis=1)
        return {
            "seconds": seconds,
            "tokens": total,
            "good_tokens": good,
            "finished": ended.sum(axis=1).astype(np.float64),
            "good_finished": good_ended,
            "link_bytes": link + moved,
            "waiting_seconds": waiting * seconds,
            "preemptions": np.zeros(self.count),
        }

    def _move_on(
        self, start: Floats, end: Floats, seconds: Floats, tokens: Floats, read: Floats,
        done_reading: Bools, here: Bools,
    ) -> tuple[Floats, Floats, Bools]:  # fmt: skip
        """Tokens are made, requests end; good tokens as GoodputMeter counts them."""
        self.context += tokens + read
        self.reading -= read
        self.made += tokens + done_reading
        self.age += np.where(here, float(self.interval), 0.0)
        # A prompt is done in one of the first steps that could read it: after a step, on average.
        first = np.broadcast_to((start + seconds / self.interval)[:, None], here.shape)
        self.first = np.where(done_reading, first, self.first)
        ended = here & (self.reading <= 0) & (self.made >= self.output)
        each = np.broadcast_to((seconds / self.interval)[:, None], here.shape)
        last = np.where(ended & (tokens > 0), start[:, None] + each * tokens, end[:, None])
        ttft = self.first - self.came
        tpot = np.where(self.made > 1, (last - self.first) / np.maximum(self.made - 1, 1), 0.0)
        inside = here & (self.first >= 0)
        if self._slo.ttft is not None:
            inside &= ttft <= self._slo.ttft
        if self._slo.tpot is not None:
            inside &= tpot <= self._slo.tpot
        counted = np.where(inside, self.made, 0.0)
        good = np.where(here, counted - self.credited, 0.0).sum(axis=1)
        self.credited = np.where(here, counted, self.credited)
        self.owner[ended] = -1
        return good, (inside & ended).sum(axis=1).astype(np.float64), ended

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
            "miss_rate_worst": self._last.get("worst", np.zeros(self.count)),
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


def _levels(need: Floats, room: Floats) -> Floats:
    """Of each episode the level such that everyone having the lesser of it and their need takes ``room``
    together, inf where all fit. need: [episodes, seats], inf where nobody sits."""
    order = np.sort(need, axis=1)
    many = np.isfinite(order).sum(axis=1)
    taken = np.cumsum(np.where(np.isfinite(order), order, 0.0), axis=1)
    before = taken - np.where(np.isfinite(order), order, 0.0)
    others = np.maximum(many[:, None] - np.arange(order.shape[1]), 1)
    short = np.isfinite(order) & (order * others > room[:, None] - before)
    at = short.argmax(axis=1)
    rows = np.arange(len(order))
    level = (room - before[rows, at]) / others[rows, at]
    found: Floats = np.where(short.any(axis=1), level, np.inf)
    return found
