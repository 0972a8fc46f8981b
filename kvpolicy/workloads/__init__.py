"""Loads for an engine, by URI: synthetic ones and request traces (docs/workloads.md)."""

from kvpolicy.workloads.registry import describe, make
from kvpolicy.workloads.workload import Arrival, Phase, Workload

__all__ = ["Arrival", "Phase", "Workload", "describe", "make"]
