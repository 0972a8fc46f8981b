"""`kvpolicy serve`: an OpenAI-compatible server over one engine."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpolicy.cli.logs import check_logdir
from kvpolicy.cli.options import Options, takes
from kvpolicy.cli.settings import resolve
from kvpolicy.config import load_yaml
from kvpolicy.errors import UserError

if TYPE_CHECKING:
    from kvpolicy.serving.server import ServeConfig

__all__ = ["ServeOptions", "serve_command"]

_SERVER = "Server"
_NEEDED = ("fastapi", "uvicorn", "prometheus_client")
# Not on the command line: it can be read by every user of the machine.
_SECRETS = {"api_key": "KVPOLICY_API_KEY", "policy_token": "KVPOLICY_POLICY_TOKEN"}


def _option(flag: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(
        flag, metavar=metavar, help=help, rich_help_panel=_SERVER, show_default=False
    )


@dataclass(frozen=True, kw_only=True)
class ServeOptions(Options):
    """Those of `run`, and the server's."""

    host: Annotated[
        str | None, _option("--host", "Address to listen on (default 127.0.0.1).", "HOST")
    ] = None
    port: Annotated[
        int | None,
        _option("--port", "Port (default 8000); 0 takes a free one and prints it.", "PORT"),
    ] = None
    max_waiting: Annotated[
        int | None,
        _option("--max-waiting", "Requests that may wait; more get 429 (default 256).", "N"),
    ] = None
    drain_seconds: Annotated[
        float | None,
        _option("--drain-seconds", "What runs may go on so long after SIGTERM (default 30).", "S"),
    ] = None
    allow_controller_files: Annotated[
        bool | None,
        _option(
            "--allow-controller-files",
            "PUT /v1/policy may name PATH.py:NAME: whoever may swap then runs code here.",
        ),
    ] = None


@takes(ServeOptions)
def serve_command(options: ServeOptions) -> None:
    """Serve /v1/completions and /v1/chat/completions; swap the policy with PUT /v1/policy or SIGHUP.

    --config is a file of settings as elsewhere, with two blocks more: 'policy' and 'server'
    (docs/serving.md). An API key and a policy token come from there, or from the environment:
    KVPOLICY_API_KEY, KVPOLICY_POLICY_TOKEN.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise UserError(f"serve needs {', '.join(missing)}: pip install 'kvpolicy[serve]'")
    config = read_config(options)
    check_logdir(options.logdir)
    from kvpolicy.serving.process import LOG_FORMAT
    from kvpolicy.serving.server import model_name, serve

    logging.basicConfig(level=logging.WARNING, format=LOG_FORMAT)
    logging.getLogger("kvpolicy").setLevel(logging.INFO)

    def announce(host: str, port: int) -> None:
        name = f"[{host}]" if ":" in host else host
        typer.echo(f"kvpolicy serves {model_name(config.engine)} at http://{name}:{port}/v1")

    if asyncio.run(serve(config, lambda: read_config(options), announce)):
        raise KeyboardInterrupt


def read_config(options: ServeOptions) -> ServeConfig:
    """Everything that the server is told, from file, environment and options; the later one wins."""
    from kvpolicy.serving.server import ServeConfig
    from kvpolicy.serving.settings import ServerSettings

    _refuse_foreign(options)
    blocks = _blocks(options.config)
    resolved = resolve(options, extra=policy_settings(blocks.get("policy")))
    if len(resolved.controllers) > 1:
        raise UserError("serve takes one --controller; PUT /v1/policy swaps it")
    if resolved.engine.clock != "wall":
        raise UserError("clock = 'steps': a server runs on the wall clock")
    values = dict(blocks.get("server") or {})
    values |= {name: os.environ[key] for name, key in _SECRETS.items() if key in os.environ}
    own = {field.name for field in fields(ServeOptions)} - {field.name for field in fields(Options)}
    values |= {name: given for name in own if (given := getattr(options, name)) is not None}
    logdir = None if options.logdir is None else str(options.logdir)
    return ServeConfig(resolved.engine, resolved.sampling, ServerSettings(**values), logdir)


def policy_settings(block: Any) -> dict[str, Any]:
    """The engine settings that a block ``policy`` gives."""
    from kvpolicy.serving.policy import PolicyBlock

    return {} if block is None else PolicyBlock(**block).settings()


def _blocks(path: Path | None) -> dict[str, Any]:
    found = {} if path is None else load_yaml(path)
    for name in ("policy", "server"):
        if not isinstance(found.get(name), dict | None):
            raise UserError(f"config {str(path)!r}: {name}: must be a mapping")
    return found


def _refuse_foreign(options: ServeOptions) -> None:
    """Options of `run` that a server has no use for."""
    given = {
        "PROMPT": options.prompts,
        "--prompt-file": options.prompt_file,
        "--workload": options.workload,
        "--slo": options.slo,
        "--tpot-bound-ms": options.tpot_bound_ms,
        "--output": options.output,
        "--json": options.as_json,
        "--fingerprint": options.fingerprint,
    }
    for flag, value in given.items():
        if value:
            raise UserError(f"{flag}: serve takes its requests over HTTP (see 'kvpolicy load')")
