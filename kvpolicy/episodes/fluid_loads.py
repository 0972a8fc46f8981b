"""A load as columns, for episodes that are stepped together."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kvpolicy.workloads.workload import Workload

__all__ = ["MOST_REQUESTS", "Loads"]

Floats = NDArray[np.float64]

# Requests of an episode that are laid out ahead; a closed load that outlasts them begins again.
MOST_REQUESTS = 512


@dataclass(frozen=True)
class Loads:
    """A load as columns: arrival times, prompt tokens to read, contexts before them, tokens to make."""

    times: Floats
    read: Floats
    context: Floats
    output: Floats
    closed: bool
    ends: Floats
    levels: Floats
    uri: str

    @classmethod
    def of(cls, load: Workload, read: int | None) -> Loads:
        """The first requests of a workload."""
        rows = [
            (a.time, float(len(a.prompt)), float(a.max_new_tokens))
            for a in islice(load.requests(), MOST_REQUESTS)
        ]
        columns = np.array(rows, dtype=np.float64).reshape(-1, 3)
        size = columns[:, 1]
        fresh = size if read is None else np.minimum(size, read)
        ends = np.array([phase.end for phase in load.phases])
        levels = np.array([float(phase.level or 0) for phase in load.phases])
        return cls(
            columns[:, 0], fresh, size - fresh, columns[:, 2], load.closed, ends, levels, load.uri
        )
