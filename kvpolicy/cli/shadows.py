"""`--shadow`: checking the specs, and the table of what shadows would have missed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvpolicy.cli.output import MIB, shown, table

if TYPE_CHECKING:
    from kvpolicy.cli.run import Decoded

__all__ = ["check_shadows", "shadow_table"]

LEGEND = """\
shadow: its bookkeeping on the same batches as the live controller. exact: a live run of it on these
  batches misses these very rows; else how often its own memory would have made other batches: grown
  contexts that took rows back, admissions without room, steps in which a request waited needlessly.
"""


def check_shadows(specs: Sequence[str]) -> None:
    """UserError for a spec that names no controller, before any work is done."""
    if specs:
        from kvpolicy.controllers import make

        for spec in specs:
            make(spec)


def shadow_table(runs: Mapping[str, Decoded]) -> str:
    """One row per live controller and shadow, nothing without shadows. runs: by controller."""
    rows = [_row(name, shadow.report) for name, run in runs.items() for shadow in run.shadows]
    if not rows:
        return ""
    headings = [
        *("shadow", "beside", "miss rate", "fetched", "promoted", "optional", "fallbacks"),
        "same batches",
    ]
    return "\n" + table(headings, rows) + LEGEND


def _row(live: str, report: Mapping[str, Any]) -> list[str]:
    verdict = "exact"
    if not report["exact"]:
        verdict = " + ".join(
            f"{report[name]:,} {name}"
            for name in ("shortages", "squeezed", "early")
            if report[name]
        )
    return [
        str(report["controller"]),
        live,
        shown(report["miss_rate"], "{:.1%}"),
        f"{report['fetched_rows']:,}",
        f"{report['promoted_rows']:,}",
        shown(report["optional_bytes_mean"], "{:,.2f}", MIB),
        f"{report['controller_fallbacks']:,}",
        verdict,
    ]
