"""`kvpolicy oracle`: a recorded run beside other policies and beside the best in hindsight."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpolicy.cli.output import MIB, check_output, emit_json, table, write_text
from kvpolicy.errors import UserError

if TYPE_CHECKING:
    from kvpolicy.recording.oracle import Oracle, Row

__all__ = ["oracle_command"]

_LEGEND = """\
fetched: rows copied from the host for decoding; promoted: because a cache came to hold the whole
  history. Rows are per layer, % of the rows that were selected. regret: fetched + promoted beyond
  the bound.
split: recorded, the run's budgets; equal, the same slots for every request and store; best, where
  a row saves most (stack distances); clairvoyant, the same, and a cache becomes full only where the
  load to come lets that pay. bound: Belady over all of them in the same memory.
"""

_RULES = "lru,clock,belady"


def oracle_command(
    recording: Annotated[
        str,
        typer.Argument(
            metavar="RECORDING",
            help="A file that 'kvpolicy record' wrote, or tiny-dsa-step, which comes with kvpolicy.",
        ),
    ],
    evictions: Annotated[
        str,
        typer.Option(
            "--evictions", metavar="NAMES", help="lru, clock, fifo, random, belady; by commas."
        ),
    ] = _RULES,
    splits: Annotated[
        str | None,
        typer.Option(
            "--splits",
            metavar="NAMES",
            help="recorded, equal, best, clairvoyant; by commas (default: all that the memory allows).",
        ),
    ] = None,
    device_kv_mib: Annotated[
        float | None,
        typer.Option(
            "--device-kv-mib",
            metavar="MIB",
            help="Memory of another engine under the recorded load (default: as recorded).",
        ),
    ] = None,
    interval: Annotated[
        int | None,
        typer.Option(
            "--interval",
            metavar="N",
            min=1,
            help="Steps that a split holds (default: as recorded).",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write the JSON to a file too.")
    ] = None,
) -> None:
    """Say how far a recorded run is from the best that hindsight allows.

    The same selections under other evictions and other splits of the same memory, and the bound that
    no controller can beat. On a CPU, from the recording alone.
    """
    check_output(output)
    from kvpolicy.recording import Recording
    from kvpolicy.recording.caches import RULES
    from kvpolicy.recording.oracle import BELADY, SPLITS, Oracle

    rules = _names("--evictions", evictions, (*RULES, BELADY))
    size = None
    if device_kv_mib is not None:
        if not 0 < device_kv_mib < float("inf"):
            raise UserError(f"--device-kv-mib {device_kv_mib:g}: must be a number above 0")
        size = int(device_kv_mib * MIB)
    # The recorded budgets belong to the recorded memory.
    usual = SPLITS if size is None else SPLITS[1:]
    shares = usual if splits is None else _names("--splits", splits, usual)
    with _progress() as advance:
        oracle = Oracle(Recording(recording), size, interval, advance)
        rows = [oracle.row(rule, share) for share in shares for rule in rules]
        bound = oracle.bound()
    document = _document(oracle, rows, bound)
    emit_json(document, as_json, output)
    if not as_json:
        write_text(_report(oracle, rows, bound))


def _names(flag: str, text: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    wrong = [name for name in names if name not in allowed]
    if wrong or not names:
        raise UserError(f"{flag} {text!r}: allowed, by commas: {', '.join(allowed)}")
    return names


@contextmanager
def _progress() -> Iterator[Callable[[], None]]:
    """A count of requests and stores on stderr, for a terminal."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("oracle: {task.completed:,.0f} caches replayed"))
    console = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
        task = bars.add_task("", total=None)
        yield lambda: bars.advance(task)


def _recorded(oracle: Oracle) -> dict[str, Any]:
    """What the engine itself counted."""
    record = oracle.recording.record
    metrics = record.get("metrics", {})
    return {
        "controller": str(record.get("config", {}).get("controller", "?")),
        "eviction": record.get("cache_rule", {}).get("eviction", "?"),
        "fetched_rows": metrics.get("fetched_rows"),
        "unique_rows": metrics.get("unique_rows"),
    }


def _document(oracle: Oracle, rows: list[Row], bound: Row) -> dict[str, Any]:
    found = [*rows, bound]
    return {
        "recording": str(oracle.recording.path),
        "recorded": _recorded(oracle),
        "wanted_rows": oracle.wanted,
        "interval": oracle.interval,
        "rows": [
            {
                **row.to_dict(),
                "fetched_share": row.fetched / max(oracle.wanted, 1),
                "regret_rows": row.moved - bound.moved,
            }
            for row in found
        ],
        "bound_rows": bound.moved,
        "stores": [store.name for store in oracle.recording.header.stores],
        "record": oracle.recording.record,
    }


def _report(oracle: Oracle, rows: list[Row], bound: Row) -> str:
    wanted, known = max(oracle.wanted, 1), _recorded(oracle)
    lines = [_line(row.split, row.eviction, row, bound, wanted) for row in rows]
    lines.append(_line("bound", "belady", bound, bound, wanted))
    counted = known["fetched_rows"]
    if counted is not None:
        share = f"{counted / wanted:.2%}"
        name = f"run ({known['controller']})"
        lines.insert(0, [name, known["eviction"], f"{counted:,}", share, "", ""])
    headings = ["split", "eviction", "fetched", "of selected", "promoted", "regret"]
    return table(headings, lines) + "\n" + _LEGEND


def _line(split: str, eviction: str, row: Row, bound: Row, wanted: int) -> list[str]:
    share, regret = f"{row.fetched / wanted:.2%}", f"{(row.moved - bound.moved) / wanted:.2%}"
    return [split, eviction, f"{row.fetched:,}", share, f"{row.promoted:,}", regret]
