"""How hot caches behave, as plain data (no torch: controllers are listed without loading it)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheRule:
    """How hot caches behave; a controller states its own.

    eviction: name in kvpolicy.kernels.eviction.RULES. admit_newest: a committed row enters the hot
    cache even if another must go (else only into free room). seed: what a cache holds after the
    prompt: ``selection`` (what the last prompt row selected, then the newest rows) or ``first``
    (the first rows of the prompt, as SGLang's colocated prefill leaves them).
    """

    eviction: str = "clock"
    admit_newest: bool = True
    seed: str = "selection"
