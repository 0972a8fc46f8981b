"""`kvpolicy new controller NAME`: a file to start from, that runs as it is."""

from __future__ import annotations

import keyword
import re
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvpolicy.cli.output import write_text
from kvpolicy.controllers.files import parse
from kvpolicy.errors import UserError, unknown_name

__all__ = ["app", "class_name", "module_name", "source"]


class _Kinds(TyperGroup):
    """Says what there is where something else is asked for."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            raise unknown_name("kind of file", args[0], self.commands)
        return super().resolve_command(ctx, args)


app = typer.Typer(add_completion=False, cls=_Kinds, invoke_without_command=True)

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*([-_][A-Za-z0-9]+)*")

TEMPLATE = '''\
"""CLASS, a residency controller: how many rows may each request keep in device memory?

It can change speed and memory, never one bit of the output, so try anything.
What it sees, field by field: python -m pydoc kvpolicy.control.observation
What it may answer:           python -m pydoc kvpolicy.control.plan
"""

import kvpolicy


class CLASS:
    """Shares spare memory by context length: a request with twice the history keeps twice the rows."""

    def __init__(self, share: float = 0.5) -> None:
        self.share = float(share)  # set it in the spec: SPEC:share=0.9

    def decide(self, observation: kvpolicy.Observation) -> kvpolicy.Plan:
        # Bytes that plans may give out: what requests keep beyond the minimum, and what is free.
        spare = self.share * (observation.optional_bytes + observation.free_bytes)
        if observation.waiting:
            spare /= 2  # leave room for those that want to start
        row = sum(store.record_bytes for store in observation.stores)  # one row in every store
        total = sum(request.context for request in observation.requests)
        targets = {}  # request id -> rows; more than it has means all of them, what does not fit shrinks
        for request in observation.requests:
            targets[request.request_id] = spare / row * request.context / max(total, 1)
        return kvpolicy.Plan(targets=targets)
'''


@app.callback()
def _new(ctx: typer.Context) -> None:
    """Write a file to start from: a controller of your own (kvpolicy new controller NAME)."""
    if ctx.invoked_subcommand is None:
        raise UserError("say what to write: kvpolicy new controller NAME")


@app.command("controller")
def controller_command(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="As lazy, lazy-rows, lazy_rows or LazyRows.")
    ],
    path: Annotated[
        Path | None,
        typer.Option("--path", metavar="FILE", help="Where to write it (./NAME.py)."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write a residency controller that runs at once, and say how to try it."""
    kind = class_name(name)
    target = Path(f"{module_name(name)}.py") if path is None else path
    spec = f"{_shown(target)}:{kind}"
    _check(target, spec)
    _write(target, source(kind, spec), force)
    quoted, file = shlex.quote(spec), shlex.quote(_shown(target))
    write_text(
        f"wrote {_shown(target)}: the class {kind}. Try it:\n\n"
        f"    kvpolicy run --controller {quoted} --prompt-file {file}\n"
        f"    kvpolicy compare --controller hisparse --controller {quoted} "
        f"--device-kv-mib 6 --prompt-file {file}\n"
    )


def class_name(name: str) -> str:
    """lazy-rows and lazy_rows become LazyRows. UserError for what cannot become a class and a file."""
    kind = "".join(part[:1].upper() + part[1:] for part in re.split("[-_]", name))
    if not _NAME.fullmatch(name):
        raise UserError(
            f"controller name {name!r}: must be letters and digits, a letter first, with single "
            "'-' or '_' between them"
        )
    for word in (module_name(name), kind):
        if keyword.iskeyword(word):
            raise UserError(f"controller name {name!r}: {word!r} is a word of Python's own")
    return kind


def module_name(name: str) -> str:
    """The name of the file without .py, so that it can be imported too."""
    return name.replace("-", "_")


def source(kind: str, spec: str) -> str:
    """The text of the file."""
    return TEMPLATE.replace("CLASS", kind).replace("SPEC", spec)


def _check(target: Path, spec: str) -> None:
    """The file must be one that a spec can name, in a folder that is there."""
    shown = str(target)
    parts = parse(spec)
    if parts is None or Path(parts.path) != target:
        raise UserError(f"--path {shown!r}: must end in .py and hold no ':', as in PATH.py:NAME")
    if target.stem in sys.stdlib_module_names or target.stem in ("kvpolicy", "numpy", "torch"):
        raise UserError(
            f"{shown!r} would hide the module {target.stem!r} from scripts beside it; use another "
            "name or --path"
        )
    if not target.parent.is_dir():
        raise UserError(f"--path {shown!r}: folder {str(target.parent)!r} does not exist")


def _write(target: Path, text: str, force: bool) -> None:
    try:
        with target.open("w" if force else "x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise UserError(f"{str(target)!r} exists; --force overwrites it") from None
    except OSError as error:
        raise UserError(f"{str(target)!r}: {error.strerror or error}") from None


def _shown(target: Path) -> str:
    """With ./ before a bare name, so that it reads as a file."""
    text = str(target)
    return text if target.is_absolute() or text.startswith(".") else f"./{text}"
