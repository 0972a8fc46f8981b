"""The one accounting function: how many frames anything takes, before it is allocated.

Admission, projection and the usage report all ask here, and a test holds the answers against what
the frame allocator really handed out. Free of torch operations.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpolicy.errors import CapacityError
from kvpolicy.memory.extents import ExtentAllocator
from kvpolicy.memory.layout import Layout


def mib(size: int) -> str:
    """Bytes as MiB, for messages."""
    return f"{size / (1 << 20):.2f}"


@dataclass(frozen=True, slots=True)
class Reserve:
    """Frames shared by all requests: staging and in-flight rows.

    staging_rows: transient records of the widest store. inflight_rows: rows of one step. seats:
    requests on the device at a time.
    """

    staging_rows: int
    inflight_rows: int
    seats: int = 16


def staging_frames(layout: Layout, reserve: Reserve) -> int:
    """Frames of the staging area: every store must find ``staging_rows`` records in it."""
    return max(store.record.frames(reserve.staging_rows) for store in layout.stores)


def inflight_frames(layout: Layout, reserve: Reserve) -> int:
    """Frames of the in-flight rows of all stores and pinned sets."""
    items = [*(s.record for s in layout.stores), *(p.record for p in layout.pinned)]
    return sum(item.frames(reserve.inflight_rows) for item in items)


def check_fixed(layout: Layout, reserve: Reserve, device_bytes: int) -> int:
    """Frames that all requests share. CapacityError if they do not fit, or staging is below top-k."""
    if reserve.staging_rows < layout.topk:
        raise CapacityError(
            "device",
            f"staging_rows = {reserve.staging_rows}: must be at least top-k = {layout.topk}",
        )
    shared = staging_frames(layout, reserve) + inflight_frames(layout, reserve)
    if shared * layout.frame_bytes > device_bytes:
        raise CapacityError(
            "device",
            f"device_kv_mib = {mib(device_bytes)}: staging ({reserve.staging_rows} rows) and "
            f"in-flight rows ({reserve.inflight_rows}) alone take "
            f"{mib(shared * layout.frame_bytes)} MiB",
        )
    return shared


def request_frames(layout: Layout, tokens: int) -> int:
    """Required frames of a request with room for ``tokens``, hot floor excluded: index keys, slot
    maps, pinned rows, the draft ring."""
    entries = [(store, store.store.entries(tokens)) for store in layout.stores]
    growing = sum(s.key.frames(n) + s.slot_map.frames(n) for s, n in entries)
    return growing + sum(p.record.frames(p.rows) for p in layout.pinned) + ring_frames(layout)


def ring_frames(layout: Layout) -> int:
    """Frames of one request's draft ring: they depend on the drafter's window, not on the context."""
    return layout.ring.frames if layout.ring else 0


def hot_frames(
    layout: Layout, rows: tuple[int, ...], max_tokens: int, tokens: int | None = None
) -> int:
    """Frames of one request's hot caches. rows: per store; at or above all entries means full.

    tokens: how many it has room for now (None: max_tokens); a full cache grows with them.
    """
    total = 0
    for store, wanted in zip(layout.stores, rows, strict=True):
        full = wanted >= store.store.entries(max_tokens)
        now = store.store.entries(max_tokens if tokens is None else tokens)
        total += store.hot_frames(now if full else wanted, full)
    return total


def host_bytes(layout: Layout, max_tokens: int) -> int:
    """Host bytes of one request: every record and index key and the draft ring, each array on its own
    cache line."""
    total = 0
    for store in layout.stores:
        entries = store.store.entries(max_tokens)
        total += ExtentAllocator.rounded(entries * store.record.bytes)
        total += ExtentAllocator.rounded(entries * store.key.bytes)
    if layout.ring:
        total += ExtentAllocator.rounded(layout.ring.host_bytes)
    return max(total, 1)
