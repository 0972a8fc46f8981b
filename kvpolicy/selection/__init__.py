"""Selections of true-geometry slices: of the model, of a recording, or of a fitted process."""

from kvpolicy.selection.process import GLM_5_1, ProcessParameters, ProcessSource
from kvpolicy.selection.recorded import RecordedSource
from kvpolicy.selection.source import SelectionSource
from kvpolicy.selection.spec import make_source

__all__ = [
    "GLM_5_1",
    "ProcessParameters",
    "ProcessSource",
    "RecordedSource",
    "SelectionSource",
    "make_source",
]
