"""Retrieval and publishing of a decode step: look-up, victims, fetch, write-through.

Ascending selections are drawn uniformly (a hit from the cache, a miss from the rest). Beside them what
SGLang 0.5.23's swap-in kernel took on one H200 for the same records and selections
(``load_cache_to_device_buffer_kernel``, 960 threads; in a group of layers one such call and its planned
copies).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kvpolicy.bench.cases import Case, WrongResult
from kvpolicy.bench.sizes import Sizes
from kvpolicy.bench.stores import RULE, StoreCase, Stores, host_pattern
from kvpolicy.kernels.backend import TRITON
from kvpolicy.kernels.memory_ops import MemoryOps, memory_ops
from kvpolicy.kernels.retrieve import StoreMemory

# us per call by (layers, row bytes, batch, cache rows, misses per thousand), k = 2048.
HISPARSE_US = {
    (1, 656, 1, 4096, 0): 18.5, (1, 656, 16, 4096, 0): 18.1, (1, 656, 128, 4096, 0): 25.8,
    (1, 656, 1, 8192, 0): 27.2, (1, 656, 16, 8192, 0): 33.3, (1, 656, 128, 8192, 0): 37.5,
    (1, 656, 1, 4096, 140): 52.9, (1, 656, 16, 4096, 140): 123.3, (1, 656, 128, 4096, 140): 1053.2,
    (1, 1152, 1, 4096, 140): 54.1, (1, 1152, 16, 4096, 140): 131.6, (1, 1152, 128, 4096, 140): 1156.4,
    (4, 656, 1, 4096, 140): 85.9, (4, 656, 16, 4096, 140): 531.0, (4, 656, 128, 4096, 140): 4639.0,
}  # fmt: skip
# Host memory beyond one state's, as a share: states lie at different places of it.
SPREAD = 1.04


def store_cases(sizes: Sizes) -> tuple[StoreCase, ...]:
    """All hits at 2 k and 4 k rows, also clustered; misses of a group of layers, and of one layer."""
    forms = [sizes.row_bytes(form) for form in sizes.formats]
    made = []
    for n in sizes.batches:
        small = sizes.device.type == "cpu"
        states = 2 if small else 64 if n == 1 else 32 if n <= 16 else 16
        base = StoreCase(
            n, 1, min(forms), 2 * sizes.topk, sizes.topk, sizes.context, 0, states=states
        )
        made += [base, replace(base, rows=4 * sizes.topk), replace(base, runs=8)]
        made.append(replace(base, layers=sizes.group_layers, per_mille=140))
        made += [replace(base, row=row, per_mille=140) for row in forms]
    return tuple(made)


def memory_cases(sizes: Sizes) -> Iterator[Case]:
    """Retrieve of every store case; of all hits also resolve alone, where that is a launch of its own; and
    once for each batch publish and the identity of full caches."""
    ops, chosen = memory_ops(sizes.backend), store_cases(sizes)
    torch.manual_seed(0)
    words = int(max(case.host_words for case in chosen) * SPREAD) + (1 << 22)
    buffer = host_pattern(words, sizes.device)
    try:
        host = buffer.bytes.view(torch.int32)
        batches: set[int] = set()
        for case in chosen:
            stores = Stores(case, host, sizes.device)
            yield _retrieve(case, stores, ops)
            if sizes.backend == TRITON and not case.per_mille:
                yield _resolve(case, stores, ops)
            if case.batch not in batches:
                batches.add(case.batch)
                yield _resident(case, stores, ops)
                yield _publish(case, stores, ops)
            del stores
    finally:
        buffer.close()


def _retrieve(case: StoreCase, stores: Stores, ops: MemoryOps) -> Case:
    def call(store: StoreMemory, chosen: Tensor) -> Tensor:
        return ops.retrieve(store, stores.rows, chosen, RULE)

    moved = case.missed_bytes
    what = f"{case.per_mille / 10:g} % missing" if moved else "all hits"
    clustered = f", in runs of {case.runs}" if case.runs > 1 else ""
    known = (case.layers, case.row, case.batch, case.rows, case.per_mille)
    comparable = case.topk == 2048 and case.runs == 1
    pairs = zip(stores.stores, stores.chosen, strict=True)
    return Case(
        group="retrieve",
        name=f"retrieve, {case.layers} x {case.row} B, {case.rows:,} rows, {what}{clustered}",
        batch=case.batch,
        calls=[partial(call, *pair) for pair in pairs],
        check=lambda: stores.check(ops.retrieve),
        # of each selected entry the map's slot is read, and the location written
        device_bytes=case.batch * case.topk * 8 + moved,
        link_bytes=moved,
        reset=stores.reset,
        hisparse_us=HISPARSE_US.get(known) if comparable else None,
    )


def _resolve(case: StoreCase, stores: Stores, ops: MemoryOps) -> Case:
    """The first launch of retrieve, without the second."""
    from kvpolicy.kernels.triton.retrieve import resolve_rows, shape_for

    shape = shape_for(case.batch, case.topk, case.words)

    def call(store: StoreMemory, chosen: Tensor) -> object:
        return resolve_rows(store, stores.rows, chosen, RULE, True, False, shape)

    whole = _retrieve(case, stores, ops)
    pairs = zip(stores.stores, stores.chosen, strict=True)
    calls = [partial(call, *pair) for pair in pairs]
    return replace(whole, name=whole.name.replace("retrieve", "resolve alone"), calls=calls)


def _resident(case: StoreCase, stores: Stores, ops: MemoryOps) -> Case:
    """Every cache as if it were full: slot = entry. Their frames come again and again, since nobody reads
    what lies there."""
    wide = [_as_full(store, case.context) for store in stores.stores]

    def call(store: StoreMemory, chosen: Tensor) -> Tensor:
        return ops.retrieve(store, stores.rows, chosen, RULE, True, True)

    def check() -> None:
        cache, chosen = wide[0].cache, stores.chosen[0].long()
        per = cache.records.shape[1]
        expected = cache.row_frames.gather(1, chosen // per) * per + chosen % per
        if not torch.equal(call(wide[0], stores.chosen[0]).long(), expected):
            raise WrongResult("retrieve: a full cache's locations are wrong")

    pairs = zip(wide, stores.chosen, strict=True)
    return Case(
        group="retrieve",
        name="retrieve, full caches",
        batch=case.batch,
        calls=[partial(call, *pair) for pair in pairs],
        check=check,
        device_bytes=case.batch * case.topk * 8,
    )


def _as_full(store: StoreMemory, entries: int) -> StoreMemory:
    cache = store.cache
    turn = torch.arange(entries, device=cache.row_frames.device) % cache.row_frames.shape[1]
    frames = cache.row_frames[:, turn].contiguous()
    full = torch.ones_like(cache.full)
    return replace(store, cache=replace(cache, row_frames=frames, full=full))


def _publish(case: StoreCase, stores: Stores, ops: MemoryOps) -> Case:
    """The rows of one step. Its floor is the link's bytes; a link's latency is more."""
    rows = replace(stores.rows, committed=stores.rows.committed - 1)
    accepted = torch.ones_like(rows.seat)

    def call(store: StoreMemory) -> None:
        ops.publish(store, rows, accepted, RULE)

    def check() -> None:
        """The newest record of the first request reaches the host."""
        store = stores.stores[0]
        store.cache.records.fill_(7)
        call(store)
        if store.host.is_pinned():
            torch.cuda.synchronize()
        at = int(store.row_base[0]) + (case.context - 1) * case.words
        if not bool((store.host[at : at + case.words] == 7).all()):
            raise WrongResult("publish: the host does not have the accepted record")
        stores.reset()

    return Case(
        group="publish",
        name=f"publish, {case.layers} x {case.row} B",
        batch=case.batch,
        calls=[partial(call, store) for store in stores.stores],
        check=check,
        device_bytes=case.batch * case.words * 8,
        link_bytes=case.batch * (case.words + 33) * 4,
        reset=stores.reset,
    )
