"""Many episodes at once on miss curves: the fast fidelity of the twin.

The same loads, memory and cost model as the exact twin, in arrays over episodes and seats. What is left out:
frames (memory is counted in bytes), what single requests select (curves are means over a recording),
decisions between control intervals, and preemption (admission keeps room for a request's final length).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpolicy.control.actions import MARGIN
from kvpolicy.episodes.fluid_loads import MOST_REQUESTS, Loads
from kvpolicy.episodes.fluid_shares import levels
from kvpolicy.episodes.fluid_state import FluidState
from kvpolicy.episodes.scenarios import Scenario
from kvpolicy.errors import UserError
from kvpolicy.memory.layout import Layout
from kvpolicy.twin.cost import CostModel
from kvpolicy.twin.tables import MissTable
from kvpolicy.workloads.workload import Workload

__all__ = ["FluidEpisodes"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class FluidEpisodes(FluidState):
    """Episodes, each with a load of its own, stepped together.

    draw: a load for an episode when it begins.
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
        super().__init__(scenario, layout, table, cost, count, **changes)
        self._draw = draw
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
        self._entered[which] = 0.0
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
        level = levels(need, room)[:, None]
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
