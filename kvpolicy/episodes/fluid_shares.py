"""Shares of spare memory in arrays over episodes, as ``control.actions`` decodes them for one."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpolicy.control.actions import MOST_RESERVE, RESERVES, RETAINED

__all__ = ["ACTIONS", "knobs_of", "levels"]

Floats = NDArray[np.float64]

ACTIONS = ("global", "discrete")


def knobs_of(name: str, actions: NDArray[Any]) -> tuple[Floats, Floats]:
    """(retained, reserve) of actions [episodes, ...], as the exact twin decodes them; the split between
    stores is even here."""
    if name == "discrete":
        reserve, retained = np.divmod(np.asarray(actions).reshape(-1), len(RETAINED))
        return np.array(RETAINED)[retained], np.array(RESERVES)[reserve]
    values = np.asarray(actions, dtype=np.float64).reshape(len(actions), -1)
    shares = np.clip((np.nan_to_num(values, nan=-1.0) + 1) / 2, 0.0, 1.0)
    return shares[:, 0], shares[:, 1] * MOST_RESERVE


def levels(need: Floats, room: Floats) -> Floats:
    """Of each episode the level such that everyone having the lesser of it and their need takes ``room``
    together, inf where all fit. need: [episodes, seats], inf where nobody sits."""
    order = np.sort(need, axis=1)
    many = np.isfinite(order).sum(axis=1)
    taken = np.cumsum(np.where(np.isfinite(order), order, 0.0), axis=1)
    before = taken - np.where(np.isfinite(order), order, 0.0)
    others = np.maximum(many[:, None] - np.arange(order.shape[1]), 1)
    short = np.isfinite(order) & (order * others > room[:, None] - before)
    at = short.argmax(axis=1)
    rows = np.arange(len(order))
    level = (room - before[rows, at]) / others[rows, at]
    found: Floats = np.where(short.any(axis=1), level, np.inf)
    return found
