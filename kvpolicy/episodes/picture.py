"""The pool as a small picture."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["picture"]

HEIGHT, WIDTH = 32, 256


def picture(required: float, history: float) -> NDArray[np.uint8]:
    """A bar, uint8 [32, 256, 3], of shares of the pool: required grey, history blue, free white; all
    black for
    two zeros, where an episode has ended."""
    image = np.zeros((HEIGHT, WIDTH, 3), dtype=np.uint8)
    if required or history:
        image[:] = 255
        image[:, : round(WIDTH * (required + history))] = (31, 119, 180)
        image[:, : round(WIDTH * required)] = 127
    return image
