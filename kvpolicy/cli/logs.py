"""What --logdir leaves behind: TensorBoard events of every run, the record, and a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvpolicy.cli.output import json_text, write_atomic
from kvpolicy.errors import UserError

if TYPE_CHECKING:
    from kvpolicy.cli.run import Decoded, Task

__all__ = ["PICTURE", "RECORD", "check_logdir", "event_folders", "write_logs"]

PICTURE, RECORD = "timeline.png", "record.json"
NO_PICTURE = "no picture: matplotlib is not installed (pip install 'kvpolicy[plot]')"


def check_logdir(folder: Path | None) -> None:
    """Make the folder, before any work is done. UserError if that cannot be."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f".{RECORD}.probe").touch()
        (folder / f".{RECORD}.probe").unlink()
    except OSError as error:
        raise UserError(f"--logdir {str(folder)!r}: {error.strerror or error}") from None


def event_folders(folder: Path | None, labels: list[str]) -> list[Path | None]:
    """Where the events of each run go, None without a folder."""
    if folder is None:
        return [None] * len(labels)
    from kvpolicy.telemetry.diagnostics import run_names

    return [folder / name for name in run_names(labels)]


def write_logs(
    folder: Path | None,
    runs: Mapping[str, Decoded],
    task: Task,
    quiet: bool = False,
    afterwards: bool = False,
) -> Path | None:
    """Write record and picture, and say where they and the events are; returns the picture's path if
    there is one.

    Files of an earlier call in the same folder are replaced. quiet: say it on stderr. afterwards: the
    events were not written while the runs went on (see ``Watch``), so write them from the timelines.
    """
    if folder is None:
        return None
    from kvpolicy.telemetry.diagnostics import run_names, write_timeline
    from kvpolicy.telemetry.picture import available, draw_timelines

    names = run_names(list(runs))
    try:
        for name, run in zip(names, runs.values(), strict=True):
            if afterwards:
                write_timeline(folder / name, run.timeline)
        write_atomic(folder / RECORD, json_text(_record(runs, names)).encode())
        typer.echo(f"events: kvpolicy dashboard {folder}", err=quiet)
        if not available():
            typer.echo(NO_PICTURE, err=True)
            return None
        config = next(iter(runs.values())).record["config"]
        memory = f"{config['device_kv_mib']:g} MiB of device memory for KV"
        title = f"{task.workload.uri}\n{config['model']}, {memory}"
        timelines = {label: run.timeline for label, run in runs.items()}
        path = draw_timelines(folder / PICTURE, timelines, title, config["clock"] == "steps")
    except OSError as error:
        raise UserError(f"--logdir {str(folder)!r}: {error.strerror or error}") from None
    typer.echo(f"picture: {path}", err=quiet)
    return path


def _record(runs: Mapping[str, Decoded], names: list[str]) -> dict[str, object]:
    """The record of the first run (the others differ in the controller), and each one's results."""
    results = [
        {
            "controller": label,
            "folder": name,
            "metrics": run.metrics,
            "phases": [phase.to_dict() for phase in run.phases],
            **run.beside(),
        }
        for name, (label, run) in zip(names, runs.items(), strict=True)
    ]
    return {"record": next(iter(runs.values())).record, "results": results}
