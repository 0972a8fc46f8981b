"""Controllers in files: ``PATH.py:NAME`` and ``PATH.py:NAME:key=value,key=value``.

PATH ends at the first ``.py``; it has no colon but that of a Windows drive, and may hold ``=``,
commas and spaces. A relative one counts from the working directory, ``~`` is the home directory.

A file is imported under a module name of its own, again when it has changed: a swap to the same spec
takes up an edit. Nothing is put on ``sys.path``, so it can import installed modules only.
"""

from __future__ import annotations

import difflib
import itertools
import logging
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from kvpolicy.controllers.targets import kind_of
from kvpolicy.errors import UserError, reason

log = logging.getLogger(__name__)

_SPEC = re.compile(
    r"(?P<path>(?:[A-Za-z]:(?=[\\/]))?[^:]*?\.py)(?::(?P<name>[^:]*)(?::(?P<rest>.*))?)?", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class FileSpec:
    """A spec in parts. name: empty where none was given. rest: the text of the parameters."""

    path: str
    name: str
    rest: str

    @property
    def label(self) -> str:
        """The spec without parameters."""
        return f"{self.path}:{self.name}"


@dataclass(frozen=True, slots=True)
class _Loaded:
    modified_ns: int
    source: bytes
    module: ModuleType


_loaded: dict[Path, _Loaded] = {}
_numbers = itertools.count(1)


def parse(spec: str) -> FileSpec | None:
    """The parts of a spec that names a file; None for any other."""
    match = _SPEC.fullmatch(spec)
    if match is None:
        return None
    return FileSpec(match["path"], match["name"] or "", match["rest"] or "")


def find(spec: FileSpec) -> object:
    """What the file calls NAME. UserError, in one line, for a file that cannot be read or imported
    (with the line at fault) and for a name it does not define (with those that would do)."""
    module = load(spec.path)
    if spec.name and hasattr(module, spec.name):
        return getattr(module, spec.name)
    defined = candidates(module)
    what = f"it defines {', '.join(defined)}" if defined else "it defines no controller"
    if not spec.name:
        raise UserError(f"controller file {spec.path!r}: say which, as PATH.py:NAME; {what}")
    close = difflib.get_close_matches(spec.name, defined, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise UserError(f"controller file {spec.path!r} has no {spec.name!r}{hint}; {what}")


def candidates(module: ModuleType) -> list[str]:
    """Public names of a module that could be controllers and are not imported from elsewhere."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and kind_of(value) is not None
        and module.__name__ in (getattr(value, "__module__", ""), type(value).__module__)
    ]


def load(path: str) -> ModuleType:
    """The module of a file: imported once for each state of it (modification time and content)."""
    what = f"controller file {path!r}"
    try:
        file = Path(path).expanduser().resolve()
        modified = file.stat().st_mtime_ns
        source = file.read_bytes()
    except (OSError, RuntimeError, ValueError) as error:  # no home directory; a null byte
        cause = (isinstance(error, OSError) and error.strerror) or reason(error)
        raise UserError(f"{what}: {cause}") from None
    known = _loaded.get(file)
    # The content too: within some milliseconds two writes can carry the same time.
    if known is not None and (known.modified_ns, known.source) == (modified, source):
        return known.module
    module = _run(file, source, what)
    _loaded[file] = _Loaded(modified, source, module)
    return module


def _run(file: Path, source: bytes, what: str) -> ModuleType:
    # Compiled here, not by importlib: its cache of bytecode goes by whole seconds of the file's time.
    try:
        code = compile(source, str(file), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise UserError(f"{what}: {file.name}:{error.lineno or 1}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes; nested too deep
        raise UserError(f"{what}: {file.name}:1: {reason(error)}") from None
    module = ModuleType(
        f"kvpolicy_file_{next(_numbers)}_{re.sub(r'[^0-9A-Za-z_]', '_', file.stem)}"
    )
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # dataclasses and type hints look their module up
    try:
        exec(code, module.__dict__)
    except BaseException as error:
        del sys.modules[module.__name__]
        if not isinstance(error, (Exception, SystemExit)):
            raise
        log.debug("%s cannot be imported", what, exc_info=True)
        line = _line(error, str(file))
        raise UserError(f"{what}: {file.name}:{line}: {reason(error)}") from None
    return module


def _line(error: BaseException, file: str) -> int:
    """The last line of the file that the exception went through."""
    line, trace = 1, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
