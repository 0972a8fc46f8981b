"""A page that shows how controllers went through one workload."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from kvpolicy.telemetry.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["HEIGHT", "WIDTH", "available", "draw_timelines"]

WIDTH, HEIGHT = 1600, 1200  # pixels
DPI = 100
# Okabe and Ito's colours: told apart by colour-blind readers too. The thinnest line is black.
COLOURS = ("#56b4e9", "#e69f00", "#009e73", "#000000", "#d55e00", "#0072b2", "#cc79a7")
STYLES = ("-", "--", "-.", ":")  # one for every four lines
SHADE = "#eeeeee"
# Points, widest first: where runs agree, all of them are seen, one inside the other.
WIDTHS = (6.5, 4.8, 3.2, 1.6)


@dataclass(frozen=True, slots=True)
class Panel:
    """One row of the page. series: of a timeline. factor: of its values. counts: whole numbers that
    change at once, like requests."""

    title: str
    series: str
    factor: float = 1.0
    counts: bool = False


PANELS = (
    Panel("requests in\nthe system", "load", counts=True),
    Panel("waiting\nrequests", "waiting", counts=True),
    Panel("required\nMiB", "required_mib"),
    Panel("optional\nMiB", "optional_mib"),
    Panel("miss rate, %\nof selected rows", "miss_rate_selected", factor=100.0),
    Panel("wall ms per\ndecode step", "step_ms"),
)


def available() -> bool:
    """Whether matplotlib (the extra ``plot``) is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_timelines(
    path: Path, runs: Mapping[str, Timeline], title: str, counts_steps: bool
) -> Path:
    """Write a PNG of WIDTH x HEIGHT pixels; returns its path. Needs matplotlib.

    runs: one line each, by name. counts_steps: whether the clock of the runs counts engine steps.
    The shaded phases are those of the first run.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    rows: Sequence[Axes] = list(figure.subplots(len(PANELS), 1, sharex=True))
    unit = 1e3 if counts_steps else 1.0  # a step is a millisecond of such a clock
    for axes, panel in zip(rows, PANELS, strict=True):
        _draw(axes, panel, runs, unit)
        _shade(axes, next(iter(runs.values())), unit, named=axes is rows[0])
    rows[-1].set_xlabel("engine steps" if counts_steps else "seconds", fontsize=13)
    handles, labels = rows[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(len(labels), 4), fontsize=13
    )
    figure.suptitle("\n".join(fill(line, 130) for line in title.splitlines()), fontsize=14)
    figure.savefig(path, format="png", dpi=DPI)
    return path


def _draw(axes: Axes, panel: Panel, runs: Mapping[str, Timeline], unit: float) -> None:
    from matplotlib.ticker import MaxNLocator

    for number, (label, timeline) in enumerate(runs.items()):
        columns = timeline.series()
        axes.plot(
            columns["time"] * unit,
            columns[panel.series] * panel.factor,
            color=COLOURS[number % len(COLOURS)],
            linestyle=STYLES[number // len(WIDTHS) % len(STYLES)],
            linewidth=WIDTHS[number % len(WIDTHS)],
            drawstyle="steps-post" if panel.counts else "default",
            label=label,
        )
    axes.set_ylabel(panel.title, fontsize=13)
    axes.tick_params(labelsize=12)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=panel.counts))
    axes.margins(x=0.01)
    axes.grid(alpha=0.3)


def _shade(axes: Axes, timeline: Timeline, unit: float, named: bool) -> None:
    """Every second phase grey, its name at the top."""
    times = timeline.column("time") - timeline.origin
    starts = [float(times[mark.sample]) * unit for mark in timeline.marks]
    for number, (mark, start) in enumerate(zip(timeline.marks, starts, strict=True)):
        end = starts[number + 1] if number + 1 < len(starts) else float(times[-1]) * unit
        if number % 2:
            axes.axvspan(start, end, color=SHADE, zorder=0, linewidth=0)
        if named and end > start:
            level = f" ({mark.phase.level})" if mark.phase.level else ""
            place = (start + end) / 2
            axes.annotate(
                f"{mark.phase.name}{level}",
                (place, 1.02),
                xycoords=("data", "axes fraction"),
                ha="center",
                va="bottom",
                fontsize=13,
            )
