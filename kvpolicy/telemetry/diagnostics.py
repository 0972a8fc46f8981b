"""Why one policy beats another, as TensorBoard events: one writer, the same tags for every policy.

`run` and `compare` feed it from an engine (:mod:`kvpolicy.telemetry.live`); whoever else drives a policy
(a server, an environment, a training run) makes one per policy and calls :meth:`PolicyDiagnostics.write`.
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpolicy.control.decision import Decision
from kvpolicy.telemetry.maps import draw_map
from kvpolicy.telemetry.tags import ABOUT, LAYOUT, margin
from kvpolicy.telemetry.timeline import MIB, Timeline

__all__ = ["PolicyDiagnostics", "clear", "run_names", "write_timeline"]

Numbers = Mapping[str, float]
Positions = Callable[[], Mapping[int, NDArray[np.float64]]]
"""Asked when a map is due: request id -> share of its history that is hot, by position, NaN beyond it."""

# Percentiles are of so many of the last requests, and of so many decisions.
LAST = 32
# Columns of the map of layer groups over time; where there are more, neighbours become one.
COLUMNS = 512
# Requests in the map of positions: the oldest ones.
MOST_ROWS = 64


def run_names(labels: list[str]) -> list[str]:
    """A folder's name for each label, all different."""
    names: list[str] = []
    for label in labels:
        plain = re.sub(r"[^A-Za-z0-9._=-]+", "_", label)[:100].lstrip(".") or "run"
        name, number = plain, 2
        while name in names:
            name, number = f"{plain}-{number}", number + 1
        names.append(name)
    return names


def clear(folder: Path) -> None:
    """Delete the events that an earlier run left in a folder and in its shadows' folders."""
    for old in (*folder.glob("events.out.tfevents.*"), *folder.glob("shadow=*/events.out.*")):
        old.unlink()


class PolicyDiagnostics:
    """Writes one policy's events into ``folder``, in place of those of an earlier run.

    Samples are totals since the start (:meth:`kvpolicy.Engine.sample`, as a mapping); what is written
    is what happened between two of them. A field that a sample lacks leaves out what is made of it.
    maps_every: samples between two pictures, 0 for none. A context manager.
    """

    def __init__(self, folder: Path, maps_every: int = 32) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        clear(folder)
        self.folder = folder
        self._writer = SummaryWriter(str(folder))
        self._writer.add_custom_scalars(LAYOUT)
        self._writer.add_text("run/about", ABOUT, 0)
        self._maps_every = maps_every
        self._samples = 0
        self._before: Numbers | None = None
        self._step = 0
        self._counts = {"decisions": 0, "projected": 0, "fallbacks": 0}
        self._times = {name: deque[float](maxlen=LAST) for name in ("tpot", "ttft", "decision")}
        self._groups: list[tuple[int, NDArray[np.float64]]] = []
        self._names: tuple[str, ...] = ()

    # --- one point -------------------------------------------------------------------------------

    def write(
        self,
        sample: Numbers,
        decisions: Decision | Iterable[Decision] | None = None,
        *,
        tpot: Sequence[float] = (),
        ttft: Sequence[float] = (),
        action: Numbers | None = None,
        reward: Numbers | None = None,
        regret: Numbers | None = None,
        accepted_length: float | None = None,
        residency: Positions | None = None,
    ) -> None:
        """Write a point at ``sample["step"]``.

        decisions: those since the last point. tpot, ttft: seconds, of requests that ended since then.
        action: an agent's raw values, by name. reward, regret: terms by name. accepted_length: of
        the interval, None without drafter. residency: called when a map is due.
        """
        self._step = int(sample["step"])
        self._load(sample)
        self._times["tpot"].extend(seconds * 1e3 for seconds in tpot)
        self._times["ttft"].extend(seconds * 1e3 for seconds in ttft)
        for name, new in (("tpot", tpot), ("ttft", ttft)):
            if len(new):
                self._percentiles(f"latency/{name}_ms", self._times[name])
        single = isinstance(decisions, Decision)
        self._decisions([decisions] if single else list(decisions or ()))  # type: ignore[arg-type, list-item]
        for family, terms in (("action/agent", action), ("reward", reward), ("regret", regret)):
            for name, value in (terms or {}).items():
                self._scalar(f"{family}/{name}", value)
        self._scalar("speculation/accepted_length", accepted_length)
        if self._maps_every and self._samples % self._maps_every == 0:
            self._draw(residency)
        self._samples += 1
        self._before = dict(sample)

    def _scalar(self, tag: str, value: float | None) -> None:
        if value is not None and math.isfinite(value):
            self._writer.add_scalar(tag, float(value), self._step)

    def _percentiles(self, name: str, values: Iterable[float]) -> None:
        found = np.percentile(list(values), [50, 5, 99])
        for tag, value in zip(margin(name), found.tolist(), strict=True):
            self._scalar(tag, value)

    def _load(self, sample: Numbers) -> None:
        """Load, memory, misses and speed. What a sample is silent about is NaN, and left out."""

        def now(name: str) -> float:
            return float(sample.get(name, math.nan))

        def new(name: str) -> float:
            return now(name) - float((self._before or {}).get(name, math.nan))

        def rate(part: float, whole: float) -> float:
            return part / whole if whole > 0 else math.nan

        steps, decoded = new("step"), new("decode_steps")
        load = now("running") + now("waiting")
        before = self._before or {}
        held = float(before.get("running", math.nan)) + float(before.get("waiting", math.nan))
        optional, free = now("optional_bytes"), now("free_bytes")
        busy_ms = new("busy_seconds") * 1e3
        values = {
            "load/requests": load,
            "load/running": now("running"),
            "load/waiting": now("waiting"),
            "load/oldest_wait_steps": now("oldest_wait"),
            "load/arrivals": load - held + new("finished"),
            "load/finished": new("finished"),
            "load/preemptions": now("preemptions"),
            "memory/required_mib": now("required_bytes") / MIB,
            "memory/optional_mib": optional / MIB,
            "memory/free_mib": free / MIB,
            "memory/retained_share": rate(optional, optional + free),
            "misses/of_unique_rows": rate(new("fetched_rows"), new("unique_rows")),
            "misses/of_selected_rows": rate(new("fetched_rows"), new("selected_rows")),
            "misses/fetched_rows_per_step": rate(new("fetched_rows"), steps),
            "misses/host_to_device_mib_per_step": rate(new("host_to_device_bytes"), steps) / MIB,
            "speed/tokens_per_step": rate(new("generated_tokens"), steps),
            "speed/step_ms": rate(busy_ms, decoded) if decoded > steps / 2 else math.nan,
        }
        for tag, value in values.items():
            self._scalar(tag, value)

    # --- decisions -------------------------------------------------------------------------------

    def _decisions(self, decisions: Sequence[Decision]) -> None:
        counts = self._counts
        counts["decisions"] += len(decisions)
        counts["projected"] += sum(d.projected.changed for d in decisions)
        counts["fallbacks"] += sum(bool(d.fallback) for d in decisions)
        for name, count in counts.items():
            self._scalar(f"control/{name}", count)
        if not decisions:
            return
        self._times["decision"].extend(d.seconds * 1e3 for d in decisions)
        self._percentiles("control/decision_ms", self._times["decision"])
        moved = np.array([_moved(d) for d in decisions]).sum(axis=0) / MIB
        self._scalar("action/given_mib", float(moved[0]))
        self._scalar("action/released_mib", float(moved[1]))
        self._scalar("action/reserve_mib", min(decisions[-1].plan.reserve_bytes, 1e18) / MIB)
        self._budgets(decisions[-1])

    def _budgets(self, decision: Decision) -> None:
        after, now, full = _rows(decision)
        if not after.size:
            return
        self._scalar("action/rows_mean", float(after.mean()))
        self._scalar("action/rows_min", float(after.min()))
        self._scalar("action/rows_max", float(after.max()))
        self._scalar("action/full_share", float(full.mean()))
        self._writer.add_histogram("action/rows", after.ravel(), self._step)
        self._names = tuple(store.name for store in decision.observation.stores)
        share = np.minimum(after, now).sum(axis=0) / np.maximum(now.sum(axis=0), 1)
        self._groups.append((self._step, share))
        if len(self._groups) > COLUMNS:
            pairs = zip(self._groups[::2], self._groups[1::2], strict=False)
            self._groups = [(step, (a + b) / 2) for (step, a), (_, b) in pairs]

    # --- pictures --------------------------------------------------------------------------------

    def _draw(self, residency: Positions | None) -> None:
        if self._groups:
            shares = np.stack([share for _, share in self._groups], axis=1)
            ends = (f"step {self._groups[0][0]:,}", f"step {self._groups[-1][0]:,}")
            title = "part of each layer group's history that budgets hold"
            self._image("residency/group_x_time", draw_map(shares, self._names, ends, title))
        held = {} if residency is None else residency()
        if held:
            names = [f"request {number}" for number in held][:MOST_ROWS]
            shares = np.stack(list(held.values())[:MOST_ROWS])
            title = (
                f"hot part of each request's history at step {self._step:,} (grey: not there yet)"
            )
            picture = draw_map(shares, names, ("oldest position", "newest of the longest"), title)
            self._image("residency/position_x_request", picture)

    def _image(self, tag: str, picture: NDArray[np.uint8]) -> None:
        self._writer.add_image(tag, picture, self._step, dataformats="HWC")

    # --- the end ---------------------------------------------------------------------------------

    def describe(self, record: Mapping[str, Any]) -> None:
        """The run record, as text."""
        text = json.dumps(record, indent=2, default=str)
        self._writer.add_text("run/record", f"```json\n{text}\n```", 0)

    def finish(self, settings: Mapping[str, Any], results: Mapping[str, Any]) -> None:
        """hparams: what was set and what came of it. Numbers of records within results go by
        ``name/key``; what is no finite number is left out."""
        from torch.utils.tensorboard.summary import hparams

        self._draw(None)
        plain = {
            key: value if isinstance(value, bool | int | float | str) else str(value)
            for key, value in settings.items()
            if value is not None
        }
        found = {f"result/{name}": value for name, value in _flat(results)}
        # SummaryWriter.add_hparams would start a second file in another folder.
        file = self._writer._get_file_writer()
        for summary in hparams(plain, found):
            file.add_summary(summary)
        for tag, value in found.items():
            self._scalar(tag, value)

    def note(self, text: str, step: int) -> None:
        """Something that happened to the policy, a swap for instance."""
        self._writer.add_text("policy/swaps", text, step)
        self._writer.flush()

    def flush(self) -> None:
        """What was written is in the file."""
        self._writer.flush()

    def close(self) -> None:
        """Finish the file. A second call does nothing."""
        self._writer.close()

    def __enter__(self) -> PolicyDiagnostics:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _rows(decision: Decision) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Rows held after a decision, rows there are, and what is full; each [requests, stores]."""
    seen, budgets = decision.observation, decision.projected.budgets
    shape = (len(seen.requests), len(seen.stores))
    most = np.array([r.max_rows for r in seen.requests], dtype=np.int64).reshape(shape)
    now = np.array([r.rows_now or r.max_rows for r in seen.requests]).reshape(shape)
    after = np.array([budgets[r.request_id] for r in seen.requests], dtype=np.int64).reshape(shape)
    full = after >= most
    return np.where(full, now, after), now, full


def _moved(decision: Decision) -> tuple[float, float]:
    """Bytes of hot rows that a decision gives out, and takes back."""
    seen = decision.observation
    after, now, _ = _rows(decision)
    most = np.array([r.max_rows for r in seen.requests], dtype=np.int64).reshape(after.shape)
    held = np.array([r.budget for r in seen.requests], dtype=np.int64).reshape(after.shape)
    record = np.array([store.record_bytes for store in seen.stores], dtype=np.int64)
    change = (after - np.where(held >= most, now, held)) * record
    return float(change.clip(min=0).sum()), float(-change.clip(max=0).sum())


def _flat(results: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, value in results.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and math.isfinite(value):
            found.append((prefix + name, float(value)))
    return found


def write_timeline(folder: Path, timeline: Timeline) -> Path:
    """Events of a run that is over, from its samples alone; returns the folder."""
    with PolicyDiagnostics(folder, maps_every=0) as diagnostics:
        for sample in timeline:
            diagnostics.write(sample)
    return folder
