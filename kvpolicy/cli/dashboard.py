"""`kvpolicy dashboard`: TensorBoard on a folder of events."""

from __future__ import annotations

import threading
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from kvpolicy.cli.output import check_output, warn
from kvpolicy.errors import UserError

__all__ = ["dashboard_command"]

DEFAULT_PORT = 6006


def dashboard_command(
    logdir: Annotated[
        Path,
        typer.Argument(metavar="LOGDIR", help="The folder that --logdir of a command named."),
    ],
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="0 takes any that is free.")
    ] = DEFAULT_PORT,
    host: Annotated[str, typer.Option("--host", help="Address to listen at.")] = "127.0.0.1",
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture", metavar="FILE.png", help="Draw the charts into a file instead, and end."
        ),
    ] = None,
) -> None:
    """Show the diagnostics of every run below LOGDIR (docs/dashboard.md). Ctrl-C ends it.

    Starts TensorBoard; the charts are under Custom Scalars, the maps under Images. Runs that begin
    later appear by themselves.
    """
    check_output(picture, "--picture")
    from kvpolicy.telemetry.dashboard import event_runs, serving

    runs = event_runs(logdir)
    if picture is not None:
        _draw(logdir, picture)
        return
    if not runs:
        warn(f"there are no events below {str(logdir)!r} yet")
    with serving(logdir, port, host) as address:
        page = f"{address}#custom_scalars"
        typer.echo(f"{len(runs)} runs at {page} (Ctrl-C ends it)")
        if not no_open:
            webbrowser.open(page)
        # An event that nobody sets: an interrupt ends the wait, and the command with 130.
        while not threading.Event().wait(0.5):
            pass


def _draw(logdir: Path, picture: Path) -> None:
    from kvpolicy.telemetry.charts import draw_dashboard
    from kvpolicy.telemetry.picture import available

    if not available():
        raise UserError("--picture needs matplotlib: pip install 'kvpolicy[plot]'")
    typer.echo(f"picture: {draw_dashboard(logdir, picture)}")
