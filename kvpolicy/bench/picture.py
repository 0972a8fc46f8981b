"""Decode steps as stacked bars. Needs matplotlib (the extra ``plot``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvpolicy.bench.parts import HOST, PARTS
from kvpolicy.bench.step import StepReport

WIDTH, HEIGHT, DPI = 1200, 750, 100  # pixels
# Paul Tol's muted colours, told apart by colour-blind readers; what is no work of the device is grey.
COLOURS = (
    *("#332288", "#88ccee", "#ddcc77", "#cc6677", "#117733"),
    *("#44aa99", "#999933", "#882255", "#aa4499", "#bbbbbb"),
)


def draw_steps(path: Path, reports: Sequence[StepReport], title: str) -> Path:
    """Write a PNG: one bar per report, one colour per part, the time that no part accounts for in grey.
    Returns its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    names = [f"{report.concurrency}" for report in reports]
    below = [0.0] * len(reports)
    for part, colour in zip(PARTS, COLOURS, strict=True):
        heights = [_height(report, part) for report in reports]
        label = "no kernel runs" if part == HOST and reports[0].method == "kernels" else part
        if any(heights):
            axes.bar(names, heights, bottom=below, color=colour, label=label, width=0.7)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    for name, report, top in zip(names, reports, below, strict=True):
        axes.annotate(
            f"{report.step_ms:.2f} ms", (name, top), ha="center", va="bottom", fontsize=13
        )
    axes.set_xlabel("requests", fontsize=13)
    axes.set_ylabel("milliseconds of a decode step", fontsize=13)
    axes.tick_params(labelsize=12)
    axes.margins(y=0.08)
    axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=12, reverse=True)
    figure.suptitle(title, fontsize=14)
    figure.savefig(path, format="png", dpi=DPI)
    return path


def _height(report: StepReport, part: str) -> float:
    """Milliseconds of a part; of the host where kernels were timed, what they leave of the step."""
    if part != HOST:
        return report.parts.get(part, 0.0)
    if report.kernel_ms is None:
        return report.host_ms
    return max(0.0, report.step_ms - report.kernel_ms)
