"""The `kvpolicy` command: finds a command, turns every error into one line and an exit code.

Exit codes: 0 success, 1 a difference or a failed request, 2 bad input, 130 interrupted.
Commands are imported when they are asked for, so that `--version` and `list` need no torch.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperGroup

from kvpolicy import __version__
from kvpolicy.cli import interrupts
from kvpolicy.errors import UserError, reason, unknown_name

__all__ = ["COMMANDS", "PLUGIN_GROUP", "app", "main"]

COMMANDS = {
    "demo": "kvpolicy.cli.demo:demo_command",
    "run": "kvpolicy.cli.run:run_command",
    "compare": "kvpolicy.cli.compare:compare_command",
    "serve": "kvpolicy.cli.serve:serve_command",
    "load": "kvpolicy.cli.load:load_command",
    "record": "kvpolicy.cli.record:record_command",
    "oracle": "kvpolicy.cli.oracle:oracle_command",
    "regret": "kvpolicy.cli.regret:regret_command",
    "check": "kvpolicy.cli.check:check_command",
    "dashboard": "kvpolicy.cli.dashboard:dashboard_command",
    "calibrate": "kvpolicy.cli.twin:calibrate_command",
    "twin-gap": "kvpolicy.cli.twin:twin_gap_command",
    "bench": "kvpolicy.cli.bench:app",
    "new": "kvpolicy.cli.new:app",
    "list": "kvpolicy.cli.listing:list_command",
    "info": "kvpolicy.cli.info:info_command",
}
"""Command name -> module:function, in the order of the help."""

PLUGIN_GROUP = "kvpolicy.commands"
"""Entry-point group of other distributions: command name -> typer app or function."""

_USAGE_EXIT, _INTERRUPT_EXIT = 2, 130
_HELP = {"help_option_names": ["-h", "--help"]}

# The base of the parser's errors. Newer versions of typer carry their own copy of click, so it can
# not be imported by one name: BadParameter < UsageError < ClickException in both.
_ParserError: type[Any] = typer.BadParameter.__mro__[2]


class CommandGroup(TyperGroup):
    """A group whose commands load on demand and whose errors are one line on stderr."""

    def list_commands(self, ctx: Any) -> list[str]:
        plugins = (point.name for point in _plugins())
        return list(dict.fromkeys((*COMMANDS, *sorted(plugins))))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The named command, or None."""
        if cmd_name in COMMANDS:
            module, _, function = COMMANDS[cmd_name].partition(":")
            return _as_command(cmd_name, getattr(import_module(module), function))
        point = next((p for p in _plugins() if p.name == cmd_name), None)
        return None if point is None else _load_plugin(point)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        command = self.get_command(ctx, name)
        if command is not None:
            return name, command, args[1:]
        raise unknown_name("command", name, self.list_commands(ctx))

    def invoke(self, ctx: Any) -> Any:
        """Run the command. A closed pipe and Ctrl-C end it without a traceback."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except KeyboardInterrupt:
            typer.echo("kvpolicy: interrupted", err=True)
            raise typer.Exit(_INTERRUPT_EXIT) from None
        return result

    def main(self, *args: Any, **extra: Any) -> Any:
        """Parse, run and exit; with standalone_mode=False, return the exit code instead."""
        standalone = extra.pop("standalone_mode", True)
        extra["prog_name"] = "kvpolicy"
        parse: Any = super().main
        _tolerant_output()
        try:
            code = parse(*args, standalone_mode=False, **extra)
        except UserError as error:
            code = _complain(str(error))
        except _ParserError as error:
            code = _complain(error.format_message(), error.exit_code)
        except typer.Abort:
            code = _complain("aborted", _INTERRUPT_EXIT)
        code = code if isinstance(code, int) else 0
        if standalone:
            sys.exit(code)
        return code


def _plugins() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=PLUGIN_GROUP))


def _load_plugin(point: EntryPoint) -> Any:
    """The command of a plug-in. One that fails to import stays in the help and says so when run."""
    try:
        return _as_command(point.name, point.load())
    except Exception as error:
        note = f"command {point.name!r} ({point.value}) cannot be loaded: {reason(error)}"

    def unusable() -> None:
        raise UserError(note)

    unusable.__doc__ = note
    return _as_command(point.name, unusable, allow_extra_args=True, ignore_unknown_options=True)


def _as_command(name: str, target: typer.Typer | Callable[..., Any], **settings: Any) -> Any:
    """A parser command from a typer app or a function."""
    if not isinstance(target, typer.Typer):
        single = typer.Typer(add_completion=False)
        single.command(name, context_settings=_HELP | settings)(target)
        target = single
    command = typer.main.get_command(target)
    command.name = name
    return command


def _complain(message: str, code: int = _USAGE_EXIT) -> int:
    typer.echo(f"kvpolicy: error: {' '.join(message.split())}", err=True)
    return code


def _tolerant_output() -> None:
    """A terminal or pipe that cannot encode a character gets a replacement, not a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvpolicy {__version__}")
        raise typer.Exit()


app = typer.Typer(
    cls=CommandGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
    invoke_without_command=True,
    context_settings=_HELP,
)


@app.callback()
def _root(
    ctx: typer.Context,
    show_version: bool = typer.Option(
        False,
        "--version",
        callback=_print_version,
        is_eager=True,
        help="Show the version and exit.",
    ),
) -> None:
    """Explore residency policies of a hierarchical sparse KV cache on a real decode loop.

    A policy (a controller) decides how much of each request's history stays in device memory. It can
    change speed and memory, never one bit of the output. Start with 'kvpolicy demo'.
    """
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def main() -> None:
    """The console entry point."""
    # Read when torch is imported. The operators of a small model are too short to share: a second
    # thread gains little on an idle machine and loses much beside a busy process, because threads
    # spin at every barrier.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    interrupts.take_over()
    if sys.stdout is None or sys.stderr is None:
        os._exit(_USAGE_EXIT)  # nobody to tell: a standard stream was closed by the caller
    app()


if __name__ == "__main__":
    main()
