"""One measurement of a kernel, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from kvpolicy.bench.timing import Call, Rates, Stopwatch


class WrongResult(AssertionError):
    """A kernel computes something else than its reference."""


@dataclass(frozen=True, slots=True)
class Case:
    """calls: alike but for their inputs. check: compares with a plain computation, WrongResult if they
    differ; before anything is timed. device_bytes, link_bytes, flops: what a call must move and compute at
    least. reset: puts back what the calls change. vendor: the same by a library (cuBLAS) that need not be
    deterministic. hisparse_us: SGLang 0.5.23's kernel on an H200, where it was measured."""

    group: str
    name: str
    batch: int
    calls: Sequence[Call]
    check: Callable[[], None]
    device_bytes: int = 0
    link_bytes: int = 0
    flops: int = 0
    reset: Call | None = None
    vendor: Sequence[Call] | None = None
    hisparse_us: float | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one call. floor_us: no kernel can be faster at the rates of this run. share: floor
    over time. error: what went wrong instead, None where all is well."""

    group: str
    name: str
    batch: int
    us: float | None = None
    floor_us: float | None = None
    share: float | None = None
    device_bytes: int = 0
    link_bytes: int = 0
    flops: int = 0
    vendor_us: float | None = None
    hisparse_us: float | None = None
    error: str | None = field(default=None)

    def as_dict(self) -> dict[str, object]:
        """Ready for JSON."""
        return asdict(self)


def run_case(case: Case, watch: Stopwatch, rates: Rates) -> Timing:
    """Check, then time."""
    case.check()
    us = watch.micros(case.calls, case.reset)
    floor = rates.floor_us(case.device_bytes, case.link_bytes, case.flops)
    return Timing(
        group=case.group,
        name=case.name,
        batch=case.batch,
        us=us,
        floor_us=floor,
        share=floor / us,
        device_bytes=case.device_bytes,
        link_bytes=case.link_bytes,
        flops=case.flops,
        vendor_us=None if case.vendor is None else watch.micros(case.vendor),
        hisparse_us=case.hisparse_us,
    )
