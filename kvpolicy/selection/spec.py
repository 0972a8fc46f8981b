"""From the name of a selection source to the source."""

from __future__ import annotations

import torch

from kvpolicy.errors import UserError
from kvpolicy.geometry.geometry import Geometry
from kvpolicy.kernels.backend import REFERENCE
from kvpolicy.selection.process import ProcessSource
from kvpolicy.selection.source import SelectionSource

__all__ = ["MODEL", "make_source"]

MODEL, PROCESS = "model", "process"
_ALLOWED = "model, process[:seed=N], RECORDING:context=N"


def make_source(
    spec: str, geometry: Geometry, device: torch.device, backend: str = REFERENCE
) -> SelectionSource | None:
    """A source by its spec: ``process``, ``process:seed=3``, or ``RECORDING:context=100000`` (a file, or a
    recording that comes with the package, stretched over the first so many entries of every request). None
    for ``model``: the model's own choice. UserError for anything else."""
    name, _, text = spec.partition(":")
    key, _, number = text.partition("=")
    if spec == MODEL:
        return None
    wanted = "seed" if name == PROCESS else "context"
    if not name or (text and (key != wanted or not number.isdecimal())):
        raise UserError(f"selection = {spec!r}: must be {_ALLOWED}")
    if name == PROCESS:
        return ProcessSource(geometry, device, int(number or 0), backend=backend)
    if not text:
        raise UserError(
            f"selection = {spec!r}: say over how many entries a recording is stretched: {name}:context=N"
        )
    from kvpolicy.recording import Recording
    from kvpolicy.selection.recorded import RecordedSource

    return RecordedSource(Recording(name), geometry, device, int(number))
