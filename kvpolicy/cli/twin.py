"""`kvpolicy calibrate` and `kvpolicy twin-gap`: fitting the deterministic twin, and how far it is
from the machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpolicy.cli import interrupts
from kvpolicy.cli.output import check_output, emit_json, table, warn, write_text
from kvpolicy.errors import UserError

if TYPE_CHECKING:
    from kvpolicy.episodes.gap import ScenarioGap
    from kvpolicy.episodes.runs import Runs
    from kvpolicy.twin.cost import CostModel
    from kvpolicy.twin.fit import Error

__all__ = ["calibrate_command", "twin_gap_command"]

CONTROLLERS = ["resident", "hisparse", "hybrid", "adaptive", "random"]

Scenarios = Annotated[
    list[str] | None,
    typer.Option(
        "--scenario", metavar="NAME", help="A registered scenario. May be given several times."
    ),
]
Controllers = Annotated[
    list[str] | None,
    typer.Option(
        "--controller",
        metavar="SPEC",
        help=f"May be given several times (default: {', '.join(CONTROLLERS)}).",
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of the loads.")]
Recording = Annotated[
    str | None,
    typer.Option(
        "--recording", metavar="FILE", help="Selections, instead of those of the scenario's family."
    ),
]
Saved = Annotated[
    Path | None,
    typer.Option("--runs", metavar="FILE", help="Keep the live runs in this file, as JSON."),
]
From = Annotated[
    list[Path] | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="Live runs that --runs kept, instead of runs on this machine.",
    ),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Seconds = Annotated[
    float, typer.Option("--seconds", help="Begin no live run after so many seconds.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]


def calibrate_command(
    scenario: Scenarios = None,
    controller: Controllers = None,
    held_out: Annotated[
        str,
        typer.Option(
            "--held-out", metavar="NAME", help="Scenario whose runs only measure the error."
        ),
    ] = "burst",
    name: Annotated[str, typer.Option("--name", help="Of the calibration.")] = "mine",
    seed: Seed = 0,
    recording: Recording = None,
    runs: Saved = None,
    given: From = None,
    device: Device = "auto",
    seconds: Seconds = 1e9,
    as_json: Json = False,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE.json", help="The calibration.")
    ] = None,
) -> None:
    """Fit the twin's cost model to live runs of scenarios, and measure its error on one held out.

    The calibration is a file for 'cost=' of the replay environment and '--cost' of twin-gap.
    """
    for path, option in ((output, "--output"), (runs, "--runs")):
        check_output(path, option)
    names = [*(scenario or ["pressure", "load-step"]), held_out]
    _check(names)
    found = _live(names, controller, seed, recording, runs, given, device, seconds, as_json)
    from kvpolicy.twin.fit import error_of, fit

    fitted = [w for run in found.runs if run.scenario != held_out for w in run.windows]
    kept = [w for run in found.runs if run.scenario == held_out for w in run.windows]
    about = {
        "runs": sorted(
            {f"{r.scenario} {r.controller}" for r in found.runs if r.scenario != held_out}
        ),
        "held_out": held_out,
        "machine": found.record.get("device_name"),
        "model": found.record.get("config", {}).get("model"),
        "commit": found.record.get("commit"),
        "versions": found.record.get("versions"),
    }
    model = fit(name, fitted, about)
    error = error_of(model, kept)
    model = type(model)(
        model.name, model.seconds, {**model.source, "held_out_error": error.to_dict()}
    )
    if output is not None:
        model.write(output)
    document = {"name": name, "seconds": dict(model.seconds), "source": dict(model.source)}
    emit_json(document, as_json, None)
    if not as_json:
        write_text(_terms(model, error, len(fitted)))


def twin_gap_command(
    scenario: Scenarios = None,
    controller: Controllers = None,
    cost: Annotated[
        str | None,
        typer.Option(
            "--cost", metavar="NAME", help="A calibration, instead of the scenario's family's."
        ),
    ] = None,
    seed: Seed = 1,
    recording: Recording = None,
    runs: Saved = None,
    given: From = None,
    device: Device = "auto",
    seconds: Seconds = 1e9,
    as_json: Json = False,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write the JSON to a file too.")
    ] = None,
) -> None:
    """Serve the same loads under the same controllers live and in the twin, and show how they differ."""
    for path, option in ((output, "--output"), (runs, "--runs")):
        check_output(path, option)
    names = scenario or ["load-step", "burst", "pressure"]
    _check(names, cost)
    found = _live(names, controller, seed, recording, runs, given, device, seconds, as_json)
    from kvpolicy.episodes.gap import gaps

    result = gaps(
        [r for r in found.runs if scenario is None or r.scenario in names], recording, cost
    )
    document = {"record": found.record, "scenarios": [each.to_dict() for each in result]}
    emit_json(document, as_json, output)
    if not as_json:
        write_text(_gaps(result))


def _check(names: Sequence[str], cost: str | None = None) -> None:
    """UserError for what would be found wrong only after the live runs."""
    from kvpolicy.episodes.scenarios import find
    from kvpolicy.twin.cost import load_cost

    for name in names:
        find(name)
    if cost is not None:
        load_cost(cost)


def _live(
    scenarios: Sequence[str],
    controllers: list[str] | None,
    seed: int,
    recording: str | None,
    save: Path | None,
    given: list[Path] | None,
    device: str,
    seconds: float,
    quiet: bool,
) -> Runs:
    """Live runs, of files or made now."""
    with interrupts.loading():
        from kvpolicy.episodes.runs import measure, read_runs
        from kvpolicy.episodes.scenarios import find
    if given:
        if save is not None:
            raise UserError("--runs goes with live runs, not with --from")
        return read_runs(given)
    changes: dict[str, Any] = {"device": device}
    if recording is not None:
        stretched = {find(name).own.context for name in scenarios} - {None}
        if len(stretched) > 1:
            raise UserError("--recording: these scenarios stretch it over different contexts")
        if stretched:
            changes["selection"] = f"{recording}:context={stretched.pop()}"
    say = (lambda line: None) if quiet else warn
    return measure(
        [(name, controllers or CONTROLLERS) for name in dict.fromkeys(scenarios)],
        seed,
        say=say,
        save=save,
        seconds=seconds,
        **changes,
    )


def _terms(model: CostModel, error: Error, windows: int) -> str:
    unit = {"link_bytes": ("GB", 1e9), "moved_bytes": ("GB", 1e9)}
    rows = []
    for term, value in model.seconds.items():
        name, factor = unit.get(term, ("million", 1e6))
        if term.endswith("_steps"):
            name, factor = "1", 1.0
        rows.append([term, f"{value * factor * 1e3:,.3f}", name])
    fitted = model.source["fit"]
    return (
        table(["term", "ms", "per"], rows)
        + f"\nfitted to {windows} windows: {fitted['mean']:.1%} a window, {fitted['total']:+.1%} in all\n"
        + f"held out ({model.source['held_out']}), {error.windows} windows, {error.seconds:.0f} s: "
        + f"{error.mean:.1%} a window, {error.total:+.1%} in all\n"
    )


def _gaps(found: Sequence[ScenarioGap]) -> str:
    rows = []
    for each in found:
        for gap in each.gaps:
            rows.append(
                [
                    each.scenario,
                    gap.controller,
                    f"{gap.live:,.0f}",
                    f"{gap.twin:,.0f}",
                    f"{gap.throughput:+.1%}",
                    f"{gap.live_goodput:,.0f}",
                    f"{gap.twin_goodput:,.0f}",
                    f"{gap.live_miss_rate:.1%}",
                    f"{gap.twin_miss_rate:.1%}",
                ]
            )
    headings = [
        "scenario",
        "controller",
        "live tok/s",
        "twin",
        "gap",
        "in bounds",
        "twin",
        "misses",
        "twin",
    ]
    lines = [table(headings, rows), ""]
    for each in found:
        same = "same" if each.agrees("live_goodput", "twin_goodput") else "OTHER"
        lines.append(
            f"{each.scenario}: largest gap {each.worst:.1%}, {same} ranking by tokens in the bounds "
            f"(live {' > '.join(each.order('live_goodput'))})"
        )
    return "\n".join(lines) + "\n"
