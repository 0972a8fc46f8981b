"""Names to workloads: what ``--workload`` takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from kvpolicy.engine.clock import STEP_SECONDS
from kvpolicy.errors import UserError, unknown_name
from kvpolicy.workloads.replay import Replay
from kvpolicy.workloads.synthetic import Burst, Diurnal, Longmix, Poisson, Step
from kvpolicy.workloads.traces import SHIPPED
from kvpolicy.workloads.uri import Uri, parse_uri
from kvpolicy.workloads.workload import Workload

__all__ = ["describe", "make"]

SYNTHETIC: Mapping[str, type[Step | Poisson]] = {
    "step": Step,
    "poisson": Poisson,
    "burst": Burst,
    "diurnal": Diurnal,
    "longmix": Longmix,
}

UNITS = {"wall": 1.0, "steps": STEP_SECONDS}
"""Clock -> seconds of one unit of ``duration`` and ``rate``."""

# tiny-dsa on one CPU core takes about 35 ms for a step with a chunk of 64 prompt rows in it: these
# load it to a third to two thirds, for half a minute.
RATES = {"wall": 1.0, "steps": 0.04}
LONG_RATES = {"wall": 0.5, "steps": 0.02}
DURATIONS = {"wall": 30.0, "steps": 800.0}
PHASE_DURATIONS = {"wall": 15.0, "steps": 300.0}


def make(
    text: str, clock: str = "wall", seed: int | None = None, output_tokens: int | None = None
) -> Workload:
    """The workload of a URI.

    clock: ``wall`` or ``steps``, what ``duration`` and ``rate`` count. seed, output_tokens: used
    where the URI does not set them. UserError for a wrong name, parameter or file.
    """
    uri = parse_uri(text)
    if clock not in UNITS:
        raise UserError(f"clock {clock!r}: must be wall or steps")
    values: dict[str, Any] = {"seed": seed, "output_tokens": output_tokens}
    values = {key: value for key, value in values.items() if value is not None}
    try:
        if uri.scheme == "synthetic":
            return _synthetic(uri, clock, values)
        if uri.scheme == "trace":
            return _trace(uri, clock, values)
    except UserError as error:
        raise UserError(f"workload {text!r}: {error}") from None
    raise unknown_name("workload", text, [name for name, _ in describe()])


def describe() -> list[tuple[str, str]]:
    """(name, one line) of every workload."""
    lines = []
    for name, kind in SYNTHETIC.items():
        lines.append((f"synthetic:{name}", (inspect.getdoc(kind) or "").splitlines()[0]))
    lines += [(f"trace:{name}", shipped.about) for name, shipped in SHIPPED.items()]
    return [*lines, ("trace:PATH", "a file of Azure, Mooncake, kv-cache-tester or compact format")]


def _synthetic(uri: Uri, clock: str, values: dict[str, Any]) -> Workload:
    kind = SYNTHETIC.get(uri.name)
    if kind is None:
        raise unknown_name("synthetic workload", uri.name, SYNTHETIC)
    defaults = {"duration": (PHASE_DURATIONS if kind is Step else DURATIONS)[clock]}
    if kind is not Step:
        defaults["rate"] = (LONG_RATES if kind is Longmix else RATES)[clock]
    workload = kind(**{**defaults, **values, **uri.query})
    return workload.build(f"synthetic:{uri.name}?{workload.query()}", UNITS[clock])


def _trace(uri: Uri, clock: str, values: dict[str, Any]) -> Workload:
    defaults = {"duration": DURATIONS[clock], "rate": RATES[clock]}
    if uri.name in SHIPPED:
        shipped = SHIPPED[uri.name]
        # A scale of one's own counts for both lengths.
        if "scale" not in uri.query:
            defaults |= {"scale": shipped.scale, "output_scale": shipped.output_scale}
    replay = Replay(**{**defaults, **values, **uri.query})
    return replay.build(uri.name, f"trace:{uri.name}?{replay.query()}", UNITS[clock])
