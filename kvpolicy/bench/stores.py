"""Stores in the middle of decoding, made at random: what retrieval and publishing are measured on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicy.bench.cases import WrongResult
from kvpolicy.bench.timing import Stopwatch
from kvpolicy.kernels import retrieve as reference
from kvpolicy.kernels.eviction import CLOCK_SPARE_STEPS, RULES
from kvpolicy.kernels.resolve import CacheTables
from kvpolicy.kernels.retrieve import DecodeRows, StoreMemory
from kvpolicy.memory.pinning import PinnedBuffer

STEP = 1000
FRAME = 1 << 15
RULE = RULES["clock"]
KEY_WORDS = 33  # of an index key: 132 bytes
CHECKED_RECORDS = 2000


@dataclass(frozen=True, slots=True)
class StoreCase:
    """layers: of a record. row: bytes of a row. rows: capacity of a cache. per_mille: misses. runs: what is
    cached and hit comes in runs of so many consecutive entries. states: layer states, one per call, so
    that nothing is in the second-level cache from the call before."""

    batch: int
    layers: int
    row: int
    rows: int
    topk: int
    context: int
    per_mille: int = 140
    runs: int = 1
    states: int = 16

    @property
    def words(self) -> int:
        return self.layers * self.row // 4

    @property
    def misses(self) -> int:
        """Of one request."""
        return round(self.topk * self.per_mille / 1000)

    @property
    def missed_bytes(self) -> int:
        return self.batch * self.misses * self.words * 4

    @property
    def host_words(self) -> int:
        return self.batch * self.context * self.words


def host_pattern(words: int, device: torch.device) -> PinnedBuffer:
    """Host memory full of noise, pinned where there is a GPU."""
    buffer = PinnedBuffer(words * 4, device.type == "cuda")
    host = buffer.bytes.view(torch.int32)
    size = min(words, 1 << 28)
    noise = torch.randint(-(2**31), 2**31, (size,), dtype=torch.int32, device=device)
    for at in range(0, words, size):  # a copy must not cross what is registered, a GiB at a time
        part = host[at : at + size]
        part.copy_(noise[: part.numel()] + at)
    return buffer


def _spread(first: int, count: int, batch: int, device: torch.device) -> Tensor:
    """Frames of tables that lie one after the other: int64 [batch, count]."""
    return torch.arange(first, first + batch * count, device=device).view(batch, count)


def make_store(case: StoreCase, host: Tensor, shift: int, device: torch.device) -> StoreMemory:
    """One layer state: caches full of random entries with random ages. shift: words that its records lie
    behind the start of the host memory."""
    batch, words = case.batch, case.words
    per_row, per_map, per_meta = FRAME // (words * 4), FRAME // 4, FRAME // 8
    sizes = ((case.rows, per_row), (case.context, per_map), (case.rows, per_meta))
    frames = [-(-n // per) for n, per in sizes]
    staging, flying = -(-batch * case.topk // per_row), -(-batch // per_row)
    total = batch * frames[0] + staging + flying
    arena = torch.empty((total, FRAME // 4), dtype=torch.int32, device=device)
    records = arena[:, : per_row * words].view(total, per_row, case.layers, case.row // 4)
    maps = torch.full((batch * frames[1], per_map), -1, dtype=torch.int32, device=device)
    meta = torch.empty((batch * frames[2], per_meta, 2), dtype=torch.int32, device=device)
    held = _held(case, device)
    slots = torch.arange(case.rows, dtype=torch.int32, device=device).expand(batch, -1)
    maps.view(batch, -1).scatter_(1, held.long(), slots)
    ages = torch.empty(held.shape, device=device).exponential_(1 / 5).int() + 1
    meta.view(batch, -1, 2)[:, : case.rows, 0] = held
    meta.view(batch, -1, 2)[:, : case.rows, 1] = 2 * (STEP - ages)
    zeros = torch.zeros(batch, dtype=torch.int32, device=device)
    bases = torch.arange(batch, device=device) * case.context * words + shift
    cache = CacheTables(
        records, maps, meta, _spread(0, frames[0], batch, device), _spread(0, frames[1], batch, device),
        _spread(0, frames[2], batch, device), zeros + case.rows, zeros.bool(), zeros + case.rows,
        torch.randint(0, case.rows, (batch,), dtype=torch.int32, device=device), zeros.clone(),
        zeros + CLOCK_SPARE_STEPS,
    )  # fmt: skip
    first = batch * frames[0]
    seats = torch.arange(batch, device=device)
    return StoreMemory(
        cache, torch.zeros((batch, 8, KEY_WORDS), dtype=torch.int32, device=device),
        seats[:, None].expand(-1, case.context // 8).contiguous(), host, bases, bases.clone(),
        torch.arange(first, first + staging, device=device), batch * case.topk,
        torch.arange(first + staging, total, device=device),
        torch.zeros((batch, reference.COUNTERS), dtype=torch.int64, device=device),
        torch.zeros(batch + 2, dtype=torch.int64, device=device), case.layers,
    )  # fmt: skip


def _held(case: StoreCase, device: torch.device) -> Tensor:
    """Entries in the caches: int32 [batch, rows]."""
    draw = torch.rand((case.batch, case.context // case.runs), device=device)
    runs = draw.argsort(1)[:, : case.rows // case.runs]
    inside = torch.arange(case.runs, device=device)
    return (runs[..., None] * case.runs + inside).flatten(1).int()


def selection(case: StoreCase, store: StoreMemory) -> Tensor:
    """Ascending entries, so many of them missing: int32 [batch, k]."""
    slot = store.cache.maps.view(case.batch, -1)[:, : case.context]
    first = slot[:, :: case.runs]
    draw = torch.rand(first.shape, device=slot.device)
    count = (case.topk - case.misses) // case.runs
    hits = torch.where(first >= 0, draw, 2.0).argsort(1)[:, :count, None] * case.runs
    hits = (hits + torch.arange(case.runs, device=slot.device)).flatten(1)
    draw = torch.rand(slot.shape, device=slot.device)
    missing = torch.where(slot < 0, draw, 2.0).argsort(1)[:, : case.misses]
    return torch.cat([hits, missing], 1).sort(1).values.int()


class Stores:
    """The layer states of one case, their selections, and how to put them back. host: int32 [words], at
    least ``case.host_words`` of them; what is more spreads the states over it."""

    def __init__(self, case: StoreCase, host: Tensor, device: torch.device) -> None:
        self.case = case
        step = (host.numel() - case.host_words) // max(1, case.states) // 4 * 4
        self.stores = [make_store(case, host, i * step, device) for i in range(case.states)]
        self.chosen = [selection(case, store) for store in self.stores]
        kept = ("maps", "meta", "hand", "draws", "age", "used")
        self._saved = [{n: getattr(s.cache, n).clone() for n in kept} for s in self.stores]
        self.rows = DecodeRows(
            torch.arange(case.batch, device=device),
            torch.full((case.batch,), case.context, device=device),
            torch.tensor([STEP + 1], device=device),
            torch.ones(case.batch, dtype=torch.bool, device=device),
        )

    def reset(self) -> None:
        """As it was before any call."""
        for store, saved in zip(self.stores, self._saved, strict=True):
            for name, value in saved.items():
                getattr(store.cache, name).copy_(value)

    def time(self, call: Callable[[StoreMemory, Tensor], object], watch: Stopwatch) -> float:
        """Microseconds of one call."""
        pairs = zip(self.stores, self.chosen, strict=True)
        return watch.micros([lambda s=s, c=c: call(s, c) for s, c in pairs], self.reset)  # type: ignore[misc]

    def check(self, retrieve: Callable[..., Tensor]) -> None:
        """WrongResult unless the locations are those of the plain computation, the missing records have
        the host's bytes, and as many are counted as were drawn."""
        self.reset()
        store, chosen = self.stores[0], self.chosen[0]
        store.cache.records.zero_()
        store.counts.zero_()
        hit = store.cache.maps.view(self.case.batch, -1)[:, : self.case.context]
        missed = hit.gather(1, chosen.long()) < 0
        location = retrieve(store, self.rows, chosen, RULE)
        self._check_bytes(store, chosen, location, missed)
        if int(store.counts[:, 2].sum()) != int(missed.sum()) * self.case.layers:
            raise WrongResult(f"retrieve: counted {store.counts[:, 2].sum()} fetched rows")
        self.reset()
        plain = reference.retrieve(store, self.rows, chosen, RULE)
        if not torch.equal(location, plain):
            raise WrongResult("retrieve: locations differ from the reference")
        self.reset()

    def _check_bytes(
        self, store: StoreMemory, chosen: Tensor, location: Tensor, missed: Tensor
    ) -> None:
        records, words = store.cache.records, self.case.words
        where = location.long()[missed]
        home = (store.row_base[:, None] + chosen.long() * words)[missed]
        sample = torch.randperm(home.numel(), device=home.device)[:CHECKED_RECORDS]
        where, home = where[sample], home[sample].cpu()
        per = records.shape[1]
        found = records.flatten(2)[where // per, where % per].cpu()
        if not torch.equal(found, store.host[home[:, None] + torch.arange(words)]):
            raise WrongResult("retrieve: a fetched record is not the host's")
