"""The decision log: what was seen, said and done, as records and as JSON lines."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from kvpolicy.control.observation import Observation
from kvpolicy.control.plan import Plan
from kvpolicy.control.projection import ProjectedPlan
from kvpolicy.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision. plan: what was asked for, by the controller or in its place by the fallback.

    reason: why the plan was altered or replaced, or empty. fallback: what the controller did wrong
    (a kind of :class:`~kvpolicy.controllers.decider.Decider`), empty where its own plan was used.
    seconds: wall time until there was a plan, that of the fallback left out.
    """

    step: int
    observation: Observation
    plan: Plan
    projected: ProjectedPlan
    reason: str
    fallback: str = ""
    seconds: float = field(default=0.0, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; "full" for a target of everything, request ids as text."""
        plan = self.plan
        return {
            "step": self.step,
            "fallback": self.fallback,
            "reason": self.reason,
            "plan": {
                "targets": {str(i): _target(t) for i, t in plan.targets.items()},
                "default": _target(plan.default),
                "reserve_rows": _number(plan.reserve_rows),
                "reserve_bytes": _number(plan.reserve_bytes),
                "draft_tokens": _number(plan.draft_tokens),
            },
            "projected": {
                "budgets": {str(i): list(rows) for i, rows in self.projected.budgets.items()},
                "changed": self.projected.changed,
                "draft_tokens": self.projected.draft_tokens,
            },
            "observation": asdict(self.observation),
        }


def _target(target: Any) -> Any:
    return [_number(v) for v in target] if isinstance(target, tuple) else _number(target)


def _number(value: Any) -> Any:
    if isinstance(value, float) and math.isinf(value):
        return "full" if value > 0 else "-full"
    return value


class DecisionWriter:
    """Appends decisions to a file, one JSON object a line. UserError if it cannot be opened.

    A line of 128 requests takes about 40 KB. If the disk stops taking them, a warning says so once
    and decisions go on unwritten.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._file: TextIO | None = self.path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise UserError(f"decision_log = {str(path)!r}: {error.strerror or error}") from None

    def write(self, decision: Decision) -> None:
        """Append one line."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(decision.to_dict(), default=float) + "\n")
        except OSError as error:
            log.warning("decision log %s: %s; no more is written", self.path, error)
            self.close()

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                log.warning("decision log %s: %s", self.path, error)
