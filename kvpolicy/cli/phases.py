"""The phases of a workload under one or more controllers, as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvpolicy.cli.output import MIB, aligned, shown

if TYPE_CHECKING:
    from kvpolicy.telemetry.phases import PhaseReport
    from kvpolicy.telemetry.slo import Slo

__all__ = ["goodput_line", "legend", "phase_table"]

Cell = Callable[["PhaseReport"], str]

_LEGEND = """\
miss rate: fetched over selected rows. optional: MiB kept beyond what decoding needs (mean). idle:
device memory that nothing uses (mean). wait: the longest for memory, from arrival to admission.
wait, TTFT, TPOT: {unit}.
"""


def legend(slo: Slo | None, counts_steps: bool) -> str:
    """What the columns mean."""
    text = _LEGEND.format(unit="engine steps" if counts_steps else "ms")
    if slo is None:
        return text
    within = _bounds(slo, counts_steps)
    return f"{text}goodput: tokens of requests that were served within {within}.\n"


def goodput_line(metrics: Mapping[str, Any], slo: Slo, counts_steps: bool) -> str:
    """Goodput of a whole run."""
    rate, unit = (1e3, "step") if counts_steps else (1.0, "s")
    value = shown(metrics["goodput_tokens_per_s"], "{:,.2f}", rate)
    return f"goodput: {value} tokens/{unit} within {_bounds(slo, counts_steps)}\n"


def _bounds(slo: Slo, counts_steps: bool) -> str:
    unit = "steps" if counts_steps else "ms"
    words = {"tpot_ms": "a token", "ttft_ms": "to the first token"}
    given = ((name, value) for name, value in slo.to_dict().items() if value is not None)
    return ", ".join(f"{value:g} {unit} {words[name]}" for name, value in given)


def phase_table(runs: Mapping[str, Sequence[PhaseReport]], counts_steps: bool) -> str:
    """One block per phase, one line per controller; the drain is left out.

    runs: the phases of each run, by label. counts_steps: whether times are engine steps.
    """
    found = {label: [p for p in reports if p.name != "drain"] for label, reports in runs.items()}
    columns = _columns([p for reports in found.values() for p in reports], counts_steps)
    groups = list(zip(*found.values(), strict=True))
    lines = [["phase", *(heading for heading, _ in columns)]]
    for phases in groups:
        pairs = zip(found, phases, strict=True)
        lines += [[f"  {label}", *(show(phase) for _, show in columns)] for label, phase in pairs]
    heading, *rows = aligned(lines).splitlines()
    text = [heading]
    for number, phases in enumerate(groups):
        level = phases[0].level
        text.append(phases[0].name + ("" if level is None else f": {level} requests at a time"))
        text += rows[number * len(found) : (number + 1) * len(found)]
    return "\n".join(text) + "\n"


def _columns(phases: Sequence[PhaseReport], counts_steps: bool) -> list[tuple[str, Cell]]:
    """Headings and cells; those that would say nothing are left out.

    Counted in steps a running request makes one token per step: its time per token says something
    only after preemptions.
    """
    per = "step" if counts_steps else "s"
    rate = 1e3 if counts_steps else 1.0
    decimals = 2 if counts_steps else 1
    preempted = any(p.preemptions for p in phases)
    columns: list[tuple[str, Cell]] = [
        ("miss rate", lambda p: shown(p.miss_rate_selected, "{:.1%}")),
        ("optional", lambda p: shown(p.optional_bytes_mean, "{:.1f}", MIB)),
        ("idle", lambda p: shown(p.idle_share, "{:.0%}")),
        ("wait", lambda p: _wait(p, counts_steps)),
        ("TTFT p50/p99", lambda p: _quantiles(p.ttft_ms, 0)),
    ]
    if preempted or not counts_steps:
        columns.append(("TPOT p50/p99", lambda p: _quantiles(p.tpot_ms, 1)))
    columns.append((f"tokens/{per}", lambda p: shown(p.tokens_per_s, f"{{:,.{decimals}f}}", rate)))
    if any(p.goodput_tokens_per_s is not None for p in phases):
        columns.append(
            ("goodput", lambda p: shown(p.goodput_tokens_per_s, f"{{:,.{decimals}f}}", rate))
        )
    if preempted:
        columns.append(("preempted", lambda p: shown(p.preemptions, "{:,.0f}")))
    return columns


def _wait(phase: PhaseReport, counts_steps: bool) -> str:
    if counts_steps:
        return shown(phase.longest_wait_steps, "{:,.0f}")
    return shown(phase.longest_wait_s, "{:,.0f}", 1e-3)


def _quantiles(values: Mapping[str, float | None], decimals: int) -> str:
    return "/".join(shown(values[name], f"{{:,.{decimals}f}}") for name in ("p50", "p99"))
