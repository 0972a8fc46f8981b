"""How long a step takes: a sum of physical terms, each fitted to live runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter, mul
from pathlib import Path
from typing import Any

from kvpolicy.errors import UserError

__all__ = ["SHIPPED", "TERMS", "CostModel", "Work", "load_cost"]

SHIPPED = Path(__file__).parent / "data"


@dataclass(slots=True)
class Work:
    """What a step did, or several steps together. Each is a term of the cost.

    decode_steps, prompt_steps: steps with decode rows, with prompt rows. rows: decode rows.
    link_bytes: fetched for decode rows. resolved_rows: rows looked up in mapped caches. attended_rows: rows
    attended by decode rows, per layer. scanned_keys: index keys scored by decode rows. prompt_rows:
    rows of prompts. prompt_keys: index keys scored by them. prompt_mapped_rows: prompt rows times the
    layers whose cache was mapped, so that their history came over the link. moved_bytes: copied to
    fill caches (a prompt's end, promotion, return). entered_tokens: context that came with dummy
    weights, whose rows are invented on the host.
    """

    decode_steps: float = 0.0
    prompt_steps: float = 0.0
    rows: float = 0.0
    link_bytes: float = 0.0
    resolved_rows: float = 0.0
    attended_rows: float = 0.0
    scanned_keys: float = 0.0
    prompt_rows: float = 0.0
    prompt_keys: float = 0.0
    prompt_mapped_rows: float = 0.0
    moved_bytes: float = 0.0
    entered_tokens: float = 0.0

    def values(self) -> tuple[float, ...]:
        """In the order of :data:`TERMS`."""
        found: tuple[float, ...] = _VALUES(self)
        return found


TERMS = tuple(Work.__dataclass_fields__)
_VALUES = attrgetter(*TERMS)


@dataclass(frozen=True)
class CostModel:
    """Seconds per unit of each term of :class:`Work` (terms that are not named cost nothing).

    name: of the calibration. source: what it was fitted to, and its error on a run held out.
    """

    name: str
    seconds: Mapping[str, float]
    source: Mapping[str, Any] = field(default_factory=dict)
    _each: tuple[float, ...] = field(default=(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_each", tuple(float(self.seconds.get(t, 0.0)) for t in TERMS))
        for term, value in self.seconds.items():
            if term not in TERMS or not isinstance(value, (int, float)) or not 0 <= value < 1e6:
                raise UserError(
                    f"cost model {self.name!r}: {term} = {value!r}: must be one of {', '.join(TERMS)}, "
                    "with seconds of at least 0"
                )

    def time(self, work: Work) -> float:
        """Seconds that the work takes."""
        found: float = sum(map(mul, self._each, work.values()))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"name": self.name, "seconds": dict(self.seconds), "source": dict(self.source)}

    def write(self, path: Path) -> None:
        """As JSON. UserError if it cannot be written."""
        try:
            path.write_text(json.dumps(self.to_dict(), indent=1) + "\n")
        except OSError as error:
            raise UserError(f"{str(path)!r}: {error.strerror or error}") from None


def load_cost(name: str | Path) -> CostModel:
    """A calibration by the name of a shipped one, or from a file. UserError for anything else."""
    path = Path(name)
    if not path.exists() and path.name == str(name):
        path = SHIPPED / f"{name}.json"
    try:
        values = json.loads(path.read_text())
        return CostModel(str(values["name"]), dict(values["seconds"]), dict(values["source"]))
    except OSError as error:
        known = ", ".join(sorted(p.stem for p in SHIPPED.glob("*.json")))
        raise UserError(
            f"cost model {str(name)!r}: {error.strerror or error}; shipped: {known}"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"cost model {str(path)!r}: it is no calibration ({error})") from None
