"""Fits the selection process to published miss rates, and prints how well it does.

    python benchmarks/fit_selection_process.py              # the table of the fitted process
    python benchmarks/fit_selection_process.py --fit 600    # search for 600 seconds from there

The search is Gauss-Newton with a ridge and weights, on the parameters that are real numbers, for a
quarter of the rows (bins are independent: 512 of 25,000 miss much as 2,048 of 100,000 do), and keeps what
lowers the largest error. On one CPU core; nothing here needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, replace

import numpy as np
import torch
from numpy.typing import NDArray

from kvpolicy.geometry.geometry import Selector
from kvpolicy.geometry.presets import preset
from kvpolicy.selection import GLM_5_1, ProcessParameters, ProcessSource
from kvpolicy.selection.rates import PUBLISHED, Span, miss_rates

# Of each parameter: the step of its difference quotient, and where it may go.
FREE = {
    "restless": (1.0, 0.5, 60.0),
    "decline": (0.06, -0.5, 2.0),
    "popularity": (0.12, 0.5, 6.0),
    "offset": (0.15, -0.5, 6.0),
    "brief": (0.08, 0.0, 1.0),
    "window": (25, 8, 400),
}
EXTRA = (("clock", 2), ("clock", 4), ("lru", 8), ("belady", 1), ("belady", 4))


def rates(
    parameters: ProcessParameters,
    scale: int,
    points: tuple[tuple[str, int], ...],
    span: Span,
    seed: int,
) -> NDArray[np.float64]:
    """Miss rates in percent at points, for 1/scale of top-k and context."""
    geometry = preset("glm-5.3")
    selector: Selector = replace(geometry.selectors[0], topk=2048 // scale)
    source = ProcessSource(geometry, torch.device("cpu"), seed, parameters)
    found = miss_rates(source, selector, 100_000 // scale, points, span)
    return np.array([100 * found[point] for point in points])


def moved(parameters: ProcessParameters, name: str, by: float) -> ProcessParameters:
    """One parameter changed, within its bounds."""
    step, least, most = FREE[name]
    value = min(max(getattr(parameters, name) + by * step, least), most)
    return replace(parameters, **{name: round(value) if name == "window" else value})


def fit(seconds: float, scale: int) -> ProcessParameters:
    """Lower the largest error for a while."""
    points, target = tuple(PUBLISHED), 100 * np.array(list(PUBLISHED.values()))
    span, best, ridge, end = Span(1000, 400, 400), GLM_5_1, 0.3, time.monotonic() + seconds
    now = rates(best, scale, points, span, 0)
    while time.monotonic() < end and ridge < 1e3:
        columns = [rates(moved(best, n, 1), scale, points, span, 0) - now for n in FREE]
        # Weighted by the errors themselves: the largest one counts.
        error = target - now
        weight = np.abs(error) + 0.1
        jacobian = np.array(columns).T * weight[:, None]
        square = jacobian.T @ jacobian + ridge * np.eye(len(FREE))
        step = np.clip(np.linalg.solve(square, jacobian.T @ (error * weight)), -2, 2)
        found = best
        for name, by in zip(FREE, step, strict=True):
            found = moved(found, name, float(by))
        there = rates(found, scale, points, span, 0)
        if np.abs(there - target).max() < np.abs(now - target).max():
            best, now, ridge = found, there, ridge / 2
        else:
            ridge *= 4
        print(f"largest error {np.abs(now - target).max():.2f}  {asdict(best)}", flush=True)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fit", type=float, metavar="SECONDS", help="search first")
    parser.add_argument("--scale", type=int, default=1, help="1/SCALE of the rows in the table")
    parser.add_argument(
        "--seeds", type=int, default=2, help="requests that the table is the mean of"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    parameters = fit(options.fit, 4) if options.fit else GLM_5_1
    points = (*PUBLISHED, *EXTRA)
    each = [rates(parameters, options.scale, points, Span(), s) for s in range(options.seeds)]
    mean = np.mean(each, axis=0)
    if options.json:
        found = {
            f"{policy} {m}k": round(float(x), 2)
            for (policy, m), x in zip(points, mean, strict=True)
        }
        print(json.dumps({"parameters": asdict(parameters), "miss_percent": found}, indent=2))
        return
    print(parameters)
    print(f"{'policy':<8} {'rows':>6} {'published':>10} {'process':>8} {'error':>6}")
    for (policy, multiple), value in zip(points, mean, strict=True):
        known = PUBLISHED.get((policy, multiple))
        shown = (
            ("-", "-") if known is None else (f"{100 * known:.1f}", f"{value - 100 * known:+.1f}")
        )
        print(f"{policy:<8} {2048 * multiple:>6} {shown[0]:>10} {value:>8.1f} {shown[1]:>6}")


if __name__ == "__main__":
    main()
