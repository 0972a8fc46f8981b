"""`kvpolicy check`: a scorecard of a controller."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvpolicy.cli.output import check_output, emit_json, table, write_text

if TYPE_CHECKING:
    from kvpolicy.testing import Scorecard

__all__ = ["check_command"]

VERDICT = {True: "pass", False: "FAIL", None: "-"}


def check_command(
    spec: Annotated[
        str, typer.Argument(metavar="SPEC", help="NAME or PATH.py:NAME, and :key=value,...")
    ],
    states: Annotated[
        int, typer.Option("--states", min=9, metavar="N", help="Hostile states to try.")
    ] = 180,
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="Of the states.")] = 0,
    deadline_ms: Annotated[
        float,
        typer.Option(
            "--deadline-ms", min=0.001, metavar="MS", help="Bound of the p99 decision time."
        ),
    ] = 5.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write the JSON to a file too.")
    ] = None,
) -> None:
    """Put a controller through hostile states and a real run, and say what came of it.

    Exit code 0 if it passes, 1 if it fails, 2 for a SPEC that names no controller.
    """
    check_output(output)
    from kvpolicy.testing import check_controller

    card = check_controller(spec, states, seed, deadline_ms)
    emit_json(card.to_dict(), to_stdout=as_json, path=output)
    if not as_json:
        write_text(_report(card))
    if not card.passed:
        raise typer.Exit(1)


def _report(card: Scorecard) -> str:
    rows = [[check.name, VERDICT[check.passed], check.figure] for check in card.checks]
    return f"{table(['check', 'result', 'figure'], rows)}\n{card.line}\n"
