"""The dashboard's charts, drawn from event files without a browser."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvpolicy.errors import UserError
from kvpolicy.telemetry.dashboard import event_runs
from kvpolicy.telemetry.picture import COLOURS
from kvpolicy.telemetry.tags import LAYOUT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_dashboard", "read_scalars"]

DPI = 100
ACROSS = 2  # charts side by side
CHART = (8.0, 2.6)  # inches
STYLES = ("-", "--", "-.", ":")  # of the tags of one chart

Line = tuple[NDArray[np.int64], NDArray[np.float64]]


def read_scalars(folder: Path) -> dict[str, Line]:
    """Every scalar of one run, by tag: (steps, values), all points."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    found = {}
    for tag in events.Tags()["scalars"]:
        points = events.Scalars(tag)
        steps = np.array([point.step for point in points], dtype=np.int64)
        found[tag] = (steps, np.array([point.value for point in points], dtype=np.float64))
    return found


def draw_dashboard(folder: Path, path: Path) -> Path:
    """Draw the custom-scalars layout for every run below ``folder`` as a PNG; returns its path.

    Charts that no run has values for are left out. Needs matplotlib. UserError without events.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = {name: read_scalars(folder / name) for name in event_runs(folder)}
    charts = [
        (f"{category[2:]}: {name}", kind, tags)
        for category, group in LAYOUT.items()
        for name, (kind, tags) in group.items()
        if any(_matching(run, tags) for run in runs.values())
    ]
    if not charts:
        raise UserError(f"{str(folder)!r}: there are no events of kvpolicy in it")
    down = -(-len(charts) // ACROSS)
    size = (CHART[0] * ACROSS, CHART[1] * down + 0.6)
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(down, ACROSS, squeeze=False, sharex=True)
    places: Sequence[Any] = grid.ravel().tolist()
    for axes, (title, kind, tags) in zip(places, charts, strict=False):
        draw = _margin if kind == "Margin" else _lines
        draw(axes, runs, tags)
        axes.set_title(title, fontsize=11, loc="left")
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
    for axes in places[len(charts) :]:
        axes.remove()
    for axes in grid[-1]:
        axes.set_xlabel("engine step", fontsize=11)
    names = [name.replace("shadow=", "shadow ") for name in runs]
    handles = [_proxy(number) for number in range(len(runs))]
    figure.legend(handles, names, loc="outside lower center", ncols=min(4, len(runs)), fontsize=11)
    figure.savefig(path, format="png", dpi=DPI)
    return path


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _proxy(number: int) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([0], [0], color=_colour(number), linewidth=3)


def _matching(run: Mapping[str, Line], tags: Sequence[str]) -> list[str]:
    """Tags of a run that a chart shows: as TensorBoard, a match from the beginning."""
    return [tag for tag in run for pattern in tags if re.match(pattern, tag)]


def _lines(axes: Axes, runs: Mapping[str, Mapping[str, Line]], tags: Sequence[str]) -> None:
    several = len(tags) > 1 or any(len(_matching(run, tags)) > 1 for run in runs.values())
    styles: dict[str, str] = {}
    for number, run in enumerate(runs.values()):
        for tag in _matching(run, tags):
            style = styles.setdefault(tag, STYLES[len(styles) % len(STYLES)])
            axes.plot(*run[tag], color=_colour(number), linestyle=style, linewidth=1.8)
    if several:
        handles = [axes.plot([], [], color="grey", linestyle=s)[0] for s in styles.values()]
        labels = [tag.rpartition("/")[2] for tag in styles]
        axes.legend(handles, labels, fontsize=9, loc="upper right", framealpha=0.8)


def _margin(axes: Axes, runs: Mapping[str, Mapping[str, Line]], tags: Sequence[str]) -> None:
    value, lower, upper = tags
    for number, run in enumerate(runs.values()):
        if value not in run:
            continue
        steps, middle = run[value]
        axes.plot(steps, middle, color=_colour(number), linewidth=1.8)
        axes.fill_between(
            steps, run[lower][1], run[upper][1], color=_colour(number), alpha=0.2, linewidth=0
        )
