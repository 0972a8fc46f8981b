"""All kernels, one after the other, each in a case of its own: checked, then timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kvpolicy.bench.attention import attention_cases, indexer_cases
from kvpolicy.bench.cases import Case, Timing, WrongResult, run_case
from kvpolicy.bench.linear import linear_cases, norm_cases
from kvpolicy.bench.memory import memory_cases
from kvpolicy.bench.sizes import Sizes
from kvpolicy.bench.sources import source_cases
from kvpolicy.bench.timing import Rates, Stopwatch, measure_rates
from kvpolicy.errors import UserError
from kvpolicy.kernels.backend import TRITON

# Rows that products are also measured at: prompts, and several requests with draft tokens.
WIDE_ROWS = (256, 512, 1024)
FAILURES = (WrongResult, RuntimeError, ValueError)
GROUPS: dict[str, Callable[[Sizes], Iterator[Case]]] = {
    "attention": attention_cases,
    "indexer": indexer_cases,
    "linear": lambda sizes: linear_cases(sizes, linear_rows(sizes)),
    "norm": norm_cases,
    "memory": memory_cases,
    "source": source_cases,
}
"""By the name that --only takes."""


@dataclass(frozen=True, slots=True)
class KernelReport:
    """What the device can do, and what kernels did."""

    rates: Rates
    timings: tuple[Timing, ...]

    @property
    def wrong(self) -> list[Timing]:
        """Those that could not be measured, or compute something else than they should."""
        return [timing for timing in self.timings if timing.error is not None]


def linear_rows(sizes: Sizes) -> tuple[int, ...]:
    """The batches, and on a GPU wider ones."""
    wide = WIDE_ROWS if sizes.device.type == "cuda" else ()
    return tuple(sorted({*sizes.batches, *wide}))


def check_groups(names: Sequence[str]) -> tuple[str, ...]:
    """The named groups, all where none is named. UserError for another name."""
    for name in names:
        if name not in GROUPS:
            raise UserError(f"--only {name!r}: allowed, by commas: {', '.join(GROUPS)}")
    return tuple(names) or tuple(GROUPS)


def measure_kernels(
    sizes: Sizes,
    repeats: int,
    groups: Sequence[str],
    on_case: Callable[[Timing], None] | None = None,
) -> KernelReport:
    """Measure the groups. A kernel that fails is reported as such and does not end the run. on_case: told
    of each result."""
    watch = Stopwatch(sizes.device, repeats, graphs=sizes.backend == TRITON)
    rates = measure_rates(watch, sizes.dtype)
    found = []
    with torch.no_grad():
        for group in groups:
            for timing in _measure_group(group, sizes, watch, rates):
                found.append(timing)
                if on_case is not None:
                    on_case(timing)
            if sizes.device.type == "cuda":
                torch.cuda.empty_cache()
    return KernelReport(rates, tuple(found))


def _measure_group(group: str, sizes: Sizes, watch: Stopwatch, rates: Rates) -> Iterator[Timing]:
    """One result per case; where no case can be made any more (memory), the group ends."""
    try:
        for case in GROUPS[group](sizes):
            try:
                yield run_case(case, watch, rates)
            except FAILURES as error:
                yield Timing(case.group, case.name, case.batch, error=_said(error))
    except FAILURES as error:
        yield Timing(group, f"{group}: the rest", 0, error=_said(error))


def _said(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
