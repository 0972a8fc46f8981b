"""What `kvpolicy bench` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvpolicy.cli.output import shown, table

if TYPE_CHECKING:
    from kvpolicy.bench.end_to_end import Cell
    from kvpolicy.bench.kernels import KernelReport
    from kvpolicy.bench.step import StepReport

GB, T = 1e9, 1e12


def kernel_table(report: KernelReport) -> str:
    """One line per kernel and batch, below what the floors are made of."""
    rates = report.rates
    heading = ["kernel", "batch", "us", "floor, us", "of floor", "cuBLAS, us", "HiSparse, us"]
    rows = [
        [
            timing.name,
            f"{timing.batch}",
            shown(timing.us, "{:,.1f}"),
            shown(timing.floor_us, "{:,.2f}"),
            shown(timing.share, "{:.0%}") if timing.error is None else "FAILED",
            shown(timing.vendor_us, "{:,.1f}"),
            shown(timing.hisparse_us, "{:,.1f}"),
        ]
        for timing in report.timings
    ]
    link = "" if rates.link is None else f", pinned copy {rates.link / GB:.1f} GB/s"
    return (
        f"device copy {rates.copy / GB:,.0f} GB/s (read and written){link}, "
        f"product {rates.flops / T:,.2f} TFLOP/s\n\n{table(heading, rows)}"
    )


def step_table(reports: Sequence[StepReport]) -> str:
    """A column per concurrency, a line per part."""
    heading = ["ms of a decode step", *(f"{report.concurrency} requests" for report in reports)]
    parts = [part for part in reports[0].parts if any(r.parts[part] for r in reports)]
    rows = [[part, *(f"{r.parts[part]:.3f}" for r in reports)] for part in parts]
    kernels = reports[0].method == "kernels"
    if kernels:
        rows += [
            ["any kernel", *(shown(r.kernel_ms, "{:.3f}") for r in reports)],
            ["between kernels", *(shown(r.gap_ms, "{:.3f}") for r in reports)],
        ]
    rows += [
        ["host" + (" (beside it)" if kernels else ""), *(f"{r.host_ms:.3f}" for r in reports)],
        ["step, wall time", *(f"{r.step_ms:.3f}" for r in reports)],
    ]
    if kernels:
        rows += [
            ["kernel time / wall time", *(shown(r.kernel_share, "{:.1%}") for r in reports)],
            ["with gaps of 5 us or less", *(shown(r.busy_share, "{:.1%}") for r in reports)],
            ["kernels", *(shown(r.launches, "{:,.0f}") for r in reports)],
        ]
    rows += [
        ["requests that ran", *(f"{r.running}" for r in reports)],
        ["tokens of each", *(f"{r.context:,}" for r in reports)],
    ]
    return table(heading, rows)


def cell_table(cells: Sequence[Cell]) -> str:
    """One line per concurrency and controller; the ratio is to the first controller of the same."""
    first: dict[int, float] = {}
    for cell in cells:
        first.setdefault(cell.concurrency, cell.tokens_per_s)
    rows = [
        [
            cell.controller,
            f"{cell.concurrency}",
            f"{cell.running}",
            f"{cell.tokens_per_s:,.1f}",
            f"{cell.tpot_ms:,.2f}",
            f"{cell.miss_rate:.1%}",
            f"{cell.tokens_per_s / first[cell.concurrency]:.3f}",
        ]
        for cell in cells
    ]
    ratio = f"x {cells[0].controller}"
    heading = ["controller", "requests", "that ran", "tokens/s", "TPOT, ms", "miss rate", ratio]
    return table(heading, rows)
