"""What a model's KV costs and how many requests fit, from its geometry alone.

These are payload bytes per request. Not in them: weights, draft rings, rows in flight and staging,
which belong to an engine configuration rather than to a model.

A request's device memory is counted in two ways:

* resident: all of its KV;
* hot: a buffer of `hot_rows` rows per layer (default 2 x top-k, the device buffer of SGLang's
  HiSparse), and what can not leave the device: index keys, slot maps, pinned rows.

Its host memory holds all of its KV, since every row is written through.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, Literal

from kvpolicy.geometry.geometry import Geometry, KvBytes, RowStore, paired_index_dtype
from kvpolicy.geometry.parts import check_positive, require

__all__ = ["Fit", "InfoReport", "PerRequest", "describe"]

SLOT_BYTES = 4
"""One int32 per entry and store maps an entry to its slot."""

Tier = Literal["device", "host", "device and host"]


@dataclass(frozen=True, slots=True)
class PerRequest:
    """Bytes of one request at the report's context."""

    resident: int  # all KV on the device
    hot_rows: int  # hot buffer: rows
    index_keys: int
    slot_maps: int
    pinned: int
    host: int  # all KV, written through

    @property
    def hot(self) -> int:
        """Device bytes with a hot buffer."""
        return self.hot_rows + self.index_keys + self.slot_maps + self.pinned

    def to_dict(self) -> dict[str, int]:
        return {**asdict(self), "hot": self.hot}


@dataclass(frozen=True, slots=True)
class Fit:
    """Concurrent requests at the report's context. None: no limit given for that tier."""

    resident: int | None  # whole KV in device memory
    hot_device: int | None  # device memory with hot buffers
    hot_host: int | None  # host memory
    hot: int  # the smaller of the two
    binding: Tier


@dataclass(frozen=True, slots=True)
class InfoReport:
    geometry: Geometry
    context: int  # tokens
    kv_dtype: str
    index_dtype: str
    device_kv_bytes: int | None
    host_kv_bytes: int | None
    hot_rows_per_layer: int | None  # None: 2 x top-k of each store
    bytes_per_token: KvBytes[Fraction]
    bytes_at_context: KvBytes[int]
    fixed_bytes: int
    fetch_bytes_per_token: int  # if every selected row came from the host
    per_request: PerRequest
    fit: Fit | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; rates per token are numbers that may have a fraction."""
        rate, total = self.bytes_per_token, self.bytes_at_context
        return {
            "geometry": self.geometry.to_dict(),
            "context": self.context,
            "kv_dtype": self.kv_dtype,
            "index_dtype": self.index_dtype,
            "device_kv_bytes": self.device_kv_bytes,
            "host_kv_bytes": self.host_kv_bytes,
            "hot_rows_per_layer": self.hot_rows_per_layer,
            "bytes_per_token": {
                "rows": _number(rate.rows),
                "index": _number(rate.index),
                "pinned": _number(rate.pinned),
                "total": _number(rate.total),
            },
            "bytes_at_context": {**asdict(total), "total": total.total},
            "fixed_bytes": self.fixed_bytes,
            "fetch_bytes_per_token": self.fetch_bytes_per_token,
            "per_request": self.per_request.to_dict(),
            "fit": None if self.fit is None else asdict(self.fit),
        }


def describe(
    geometry: Geometry,
    context: int | None = None,
    kv_dtype: str = "bf16",
    index_dtype: str | None = None,
    device_kv_bytes: int | None = None,
    host_kv_bytes: int | None = None,
    hot_rows_per_layer: int | None = None,
) -> InfoReport:
    """The report at `context` tokens (default: 100,000, or all the model has if that is less).

    `index_dtype` defaults to the one paired with `kv_dtype`. Without a device or a host limit the
    report says what one request costs and leaves `fit` out.
    """
    context = min(100_000, geometry.max_context) if context is None else context
    require(
        1 <= context <= geometry.max_context,
        f"context is {context}: {geometry.name} allows 1 to {geometry.max_context} tokens",
    )
    if device_kv_bytes is not None:
        check_positive("memory", device_kv_bytes=device_kv_bytes)
    if host_kv_bytes is not None:
        check_positive("memory", host_kv_bytes=host_kv_bytes)
    if hot_rows_per_layer is not None:
        check_positive("hot buffer", hot_rows_per_layer=hot_rows_per_layer)
    index = index_dtype or paired_index_dtype(kv_dtype)
    per_request = _per_request(geometry, context, kv_dtype, index, hot_rows_per_layer)
    return InfoReport(
        geometry=geometry,
        context=context,
        kv_dtype=kv_dtype,
        index_dtype=index,
        device_kv_bytes=device_kv_bytes,
        host_kv_bytes=host_kv_bytes,
        hot_rows_per_layer=hot_rows_per_layer,
        bytes_per_token=geometry.kv_bytes_per_token(kv_dtype, index),
        bytes_at_context=geometry.kv_bytes(context, kv_dtype, index),
        fixed_bytes=geometry.fixed_bytes(kv_dtype),
        fetch_bytes_per_token=geometry.selected_bytes_per_token(kv_dtype),
        per_request=per_request,
        fit=_fit(per_request, device_kv_bytes, host_kv_bytes),
    )


def _hot_entries(geometry: Geometry, store: RowStore, context: int, rows: int | None) -> int:
    widest = max(s.topk for s in geometry.selectors_of(store.name))
    return min(store.entries(context), 2 * widest if rows is None else rows)


def _per_request(
    geometry: Geometry, context: int, kv_dtype: str, index_dtype: str, rows: int | None
) -> PerRequest:
    whole = geometry.kv_bytes(context, kv_dtype, index_dtype)
    return PerRequest(
        resident=whole.total,
        hot_rows=sum(
            _hot_entries(geometry, store, context, rows) * store.record_bytes(kv_dtype)
            for store in geometry.stores
        ),
        index_keys=whole.index,
        slot_maps=sum(SLOT_BYTES * store.entries(context) for store in geometry.stores),
        pinned=whole.pinned,
        host=whole.total,
    )


def _fit(request: PerRequest, device: int | None, host: int | None) -> Fit | None:
    def count(limit: int | None, size: int) -> int | None:
        return None if limit is None else limit // max(size, 1)

    on_device, on_host = count(device, request.hot), count(host, request.host)
    limits = [n for n in (on_device, on_host) if n is not None]
    if not limits:
        return None
    hot = min(limits)
    binding: Tier = "device" if on_device == hot else "host"
    if on_device == on_host:
        binding = "device and host"
    return Fit(
        resident=count(device, request.resident),
        hot_device=on_device,
        hot_host=on_host,
        hot=hot,
        binding=binding,
    )


def _number(value: Fraction) -> int | float:
    return value.numerator if value.denominator == 1 else float(value)
