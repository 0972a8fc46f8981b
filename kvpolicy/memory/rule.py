"""How hot caches behave, as plain data (no torch: controllers are listed without loading it)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kvpolicy import evictions
from kvpolicy.errors import unknown_name

Eviction = str
"""Name of an eviction rule, one of kvpolicy.evictions.names()."""
Seed = Literal["selection", "first"]
Admission = Literal["all", "accepted"]
EVICTIONS: tuple[Eviction, ...] = tuple(evictions.BUILT_IN)
SEEDS: tuple[Seed, ...] = get_args(Seed)
ADMISSIONS: tuple[Admission, ...] = get_args(Admission)


@dataclass(frozen=True, slots=True)
class CacheRule:
    """How hot caches behave; a controller states its own. UserError for an unknown name.

    eviction: which row gives way (a plug-in's rule is loaded here, and torch with it). admit_newest:
    a committed row enters the hot cache even if another must go (else only into free room). seed:
    what a cache holds after the prompt: ``selection`` (what the last prompt row selected, then the
    newest rows) or ``first`` (the first rows of the prompt, as SGLang's colocated prefill leaves
    them). admission: of fetched rows that a verify step wanted: ``all`` stay as if they had been used,
    ``accepted`` lets those go first that only rejected tokens wanted.
    """

    eviction: Eviction = "clock"
    admit_newest: bool = True
    seed: Seed = "selection"
    admission: Admission = "accepted"

    def __post_init__(self) -> None:
        if self.eviction not in EVICTIONS:
            evictions.find(self.eviction)
        if self.seed not in SEEDS:
            raise unknown_name("seed rule", str(self.seed), SEEDS)
        if self.admission not in ADMISSIONS:
            raise unknown_name("admission", str(self.admission), ADMISSIONS)
