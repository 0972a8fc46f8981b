"""What a controller sees: a frozen record of numbers, taken once per control interval."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreView:
    """One row store of the model. rows are records of one entry; sizes in bytes.

    layers: rows per record. topk: entries chosen per query row. record_bytes: one record.
    rows_per_frame, meta_per_frame: how many records, and how many slots' metadata, a frame holds.
    """

    name: str
    layers: int
    topk: int
    record_bytes: int
    rows_per_frame: int
    meta_per_frame: int


@dataclass(frozen=True, slots=True)
class MissCurve:
    """How the misses of one store fall with the rows a request keeps, measured on live traffic.

    rows: budgets, ascending. misses: records fetched per decode step and request at each budget
    (least-recently-used order). steps: decode steps behind the estimate, 0 where there is none yet.
    """

    rows: tuple[int, ...] = ()
    misses: tuple[float, ...] = ()
    steps: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestView:
    """One running request.

    context: committed tokens. max_rows: per store, entries it can ever have (a budget at or above
    it means fully resident). rows_now: per store, entries with room now: what full residency takes
    at this moment, growing with the context. budget: per store, rows it may keep now (max_rows
    where fully resident). decoding: past its prompt. age: engine steps since admission.
    selected_rows, unique_rows, fetched_rows: during decode, since the last observation.
    """

    request_id: int
    context: int
    max_rows: tuple[int, ...]
    budget: tuple[int, ...]
    decoding: bool
    age: int
    generated: int
    selected_rows: int
    unique_rows: int
    fetched_rows: int
    rows_now: tuple[int, ...] = ()

    @property
    def miss_rate(self) -> float:
        """Fetched rows over unique rows since the last observation."""
        return self.fetched_rows / self.unique_rows if self.unique_rows else 0.0


@dataclass(frozen=True, slots=True)
class Observation:
    """The engine at one moment. Bytes are device KV memory, times are seconds.

    step: engine step. interval: steps since the last observation. pool_*: of the device arena:
    required (protected), optional (what plans give out), free. waiting: requests not admitted yet;
    oldest_wait: steps the first of them has waited. arrivals, finished: since the last observation.
    step_seconds: mean wall time of a step in the interval (0 where steps are the clock).
    host_to_device_bytes: in the interval. floor_rows: rows no plan goes below.
    seats_free: requests that may still start. queue_bytes: device memory that each waiting request
    needs to start, in order, for as many as have a seat. shortages: times since the last
    observation that a growing context found no free memory (rows were taken back, or a request was
    preempted). preemptions: requests put back to the host since then. tokens: generated since then.
    curves: per store, misses by budget as far as measured (empty where the controller asks for none).
    cycles, committed, verify_rows: with a drafter, verify steps of single requests since the last
    observation, the tokens that they committed (bonus counted) and the rows that they computed; all 0
    without one.
    slo_tpot, slo_ttft: the bounds that goodput counts, None where none is set.
    """

    step: int
    interval: int
    frame_bytes: int
    pool_bytes: int
    required_bytes: int
    optional_bytes: int
    free_bytes: int
    floor_rows: int
    waiting: int
    oldest_wait: int
    arrivals: int
    finished: int
    step_seconds: float
    host_to_device_bytes: int
    stores: tuple[StoreView, ...]
    requests: tuple[RequestView, ...]
    seats_free: int = 0
    queue_bytes: tuple[int, ...] = ()
    shortages: int = 0
    preemptions: int = 0
    tokens: int = 0
    curves: tuple[MissCurve, ...] = ()
    cycles: int = 0
    committed: int = 0
    verify_rows: int = 0
    slo_tpot: float | None = None
    slo_ttft: float | None = None

    @property
    def accepted_length(self) -> float | None:
        """Tokens committed per verify step of a request, bonus counted; None where nothing was verified."""
        return self.committed / self.cycles if self.cycles else None

    @property
    def misses_per_verify_row(self) -> float:
        """Rows fetched per row that decode computed since the last observation, 0 without a drafter."""
        fetched = sum(request.fetched_rows for request in self.requests)
        return fetched / self.verify_rows if self.verify_rows else 0.0
