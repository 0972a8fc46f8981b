"""What a recording says about itself: its stores, selectors and columns (docs/recordings.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvpolicy.errors import UserError

__all__ = ["FORMAT", "KINDS", "VERSION", "Header", "SelectorInfo", "StoreInfo"]

FORMAT, VERSION = "kvpolicy-recording", 1

KINDS = ("prompt", "seed", "decode")
"""What a segment is: rows of a prompt, the last of them (its last row seeds the caches), generation."""

STEP_COLUMNS: Mapping[str, type[np.generic]] = {
    "step": np.int64,  # engine step
    "room": np.int64,  # device bytes that hot rows had or could have had
    "hot": np.int64,  # device bytes that they had
}
SEGMENT_COLUMNS: Mapping[str, type[np.generic]] = {
    "at": np.int64,  # which row of the step columns
    "request": np.int64,
    "position": np.int64,  # of the first row
    "count": np.int64,  # rows
    "accepted": np.int64,  # of them
    "kind": np.int64,  # see KINDS
    "seat": np.int64,  # of the request, CLOCK's lazy stamps go by it
    "joined": np.int64,  # 1 where the request came to the device in this step, or came back
}
LANE_COLUMNS: Mapping[str, type[np.generic]] = {
    "request": np.int64,
    "selector": np.int64,
    "rows": np.int64,
    "bytes": np.int64,
}
REQUEST_COLUMNS: Mapping[str, type[np.generic]] = {
    "request": np.int64,
    "prompt_tokens": np.int64,
    "output_tokens": np.int64,
    "max_tokens": np.int64,
    "arrived_step": np.int64,
    "waited_steps": np.int64,
    "arrived": np.float64,
    "admitted": np.float64,
    "first_token": np.float64,
    "last_token": np.float64,
}
"""Times in seconds of the engine's clock from the start of the run, NaN for what never happened;
-1 for steps and tokens that are not known (a request that never ran)."""


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """A row store. layers: rows in a record. record_bytes: as it lies on the device."""

    name: str
    layers: int
    tokens_per_entry: int
    record_bytes: int


@dataclass(frozen=True, slots=True)
class SelectorInfo:
    """A selector. store: its number. topk: entries per query row."""

    name: str
    store: int
    topk: int


@dataclass(frozen=True, slots=True)
class Header:
    """The first member of a recording."""

    model: str
    stores: tuple[StoreInfo, ...]
    selectors: tuple[SelectorInfo, ...]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Any) -> Header:
        """UserError for anything that :meth:`to_dict` would not have written."""
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise UserError(f"it is no {FORMAT}")
        if values.get("version") != VERSION:
            raise UserError(
                f"version {values.get('version')!r}: this kvpolicy reads version {VERSION}"
            )
        try:
            header = cls(
                str(values["model"]),
                tuple(StoreInfo(**store) for store in values["stores"]),
                tuple(SelectorInfo(**selector) for selector in values["selectors"]),
            )
        except (KeyError, TypeError) as error:
            raise UserError(f"its header cannot be read: {error}") from None
        header.check()
        return header

    def check(self) -> None:
        """UserError unless numbers are in range and selectors name stores."""
        sizes = [(s.layers, s.tokens_per_entry, s.record_bytes) for s in self.stores]
        sizes += [(s.topk, 1, 1) for s in self.selectors]
        whole = all(isinstance(n, int) and n > 0 for each in sizes for n in each)
        named = all(s.store in range(len(self.stores)) for s in self.selectors)
        if not (self.stores and self.selectors and whole and named):
            raise UserError("its header names no stores and selectors that fit together")
