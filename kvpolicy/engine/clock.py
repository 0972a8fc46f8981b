"""What time it is for an engine: the wall's, or counted in steps so that a run can be repeated."""

from __future__ import annotations

import time

# With the steps clock one engine step counts as one millisecond, so that bounds given in ms
# read as steps.
STEP_SECONDS = 1e-3


class Clock:
    """``wall``: seconds of time.perf_counter. ``steps``: engine steps, STEP_SECONDS each."""

    def __init__(self, kind: str) -> None:
        self.counts_steps = kind == "steps"
        self.steps = 0

    def now(self) -> float:
        """Seconds since some fixed moment."""
        return self.steps * STEP_SECONDS if self.counts_steps else time.perf_counter()
