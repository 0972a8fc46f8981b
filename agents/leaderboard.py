"""The leaderboard file: rows of `kvpolicy evaluate`, which can be played again and compared."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvpolicy.agents.judging import Row, artifact_hash, confidence, play
from kvpolicy.cli.output import json_text, write_atomic
from kvpolicy.episodes.scenarios import find
from kvpolicy.errors import UserError
from kvpolicy.telemetry.record import commit, package_version

__all__ = ["add_rows", "read_board", "verify"]

FORMAT = 1
# The twin is deterministic; what differs between machines is the last bit of a sum.
TOLERANCE = 1e-9


def read_board(path: Path) -> list[Row]:
    """The rows of a file. UserError for anything else."""
    try:
        values: Any = json.loads(path.read_text())
        if values["format"] != FORMAT:
            raise UserError(
                f"leaderboard {str(path)!r}: format {values['format']!r}, must be {FORMAT}"
            )
        return [Row.from_dict(each) for each in values["rows"]]
    except OSError as error:
        raise UserError(f"leaderboard {str(path)!r}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"leaderboard {str(path)!r}: it holds no rows ({error})") from None


def add_rows(path: Path, rows: Sequence[Row]) -> None:
    """Put rows into a file. A row of the same controller, scenario, split and machine is replaced."""
    known = {_key(row): row for row in (read_board(path) if path.exists() else [])}
    known |= {_key(row): row for row in rows}
    ordered = sorted(known.values(), key=lambda row: (row.scenario, row.split, -row.mean))
    document = {
        "format": FORMAT,
        "kvpolicy": package_version("kvpolicy"),
        "commit": commit(),
        "rows": [row.to_dict() for row in ordered],
    }
    write_atomic(path, json_text(document).encode())


def verify(row: Row, most: int, say: Callable[[str], None] = lambda line: None) -> list[str]:
    """Play up to ``most`` of a row's episodes again. Returns what differs, a line each."""
    name = f"{row.scenario} {row.controller}"
    if row.live:
        return [f"{name}: a live row cannot be played again"]
    found = []
    scores = [each.score for each in row.episodes]
    summed = (row.mean, row.low, row.high)
    wanted = (math.fsum(scores) / max(len(scores), 1), *confidence(scores)) if scores else ()
    if len(wanted) != 3 or any(abs(a - b) > 1e-6 for a, b in zip(summed, wanted, strict=True)):
        found.append(f"{name}: mean and interval are not those of its episodes")
    sha256 = artifact_hash(row.controller)
    if sha256 != row.sha256:
        found.append(f"{name}: its policy artifact is another one")
    scenario = find(row.scenario)
    for each in row.episodes[:most]:
        again = play(scenario, row.controller, row.split, each.seed)
        say(f"{name}, seed {each.seed}: {again.score:.4f}")
        if not math.isclose(again.score, each.score, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            found.append(
                f"{name}, seed {each.seed}: {each.score:.6f} in the file, {again.score:.6f} now"
            )
    return found


def _key(row: Row) -> tuple[str, str, str, bool, str]:
    return row.controller, row.scenario, row.split, row.live, row.cost
