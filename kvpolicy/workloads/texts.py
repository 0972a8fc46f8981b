"""The texts that prompts are cut from."""

from __future__ import annotations

import sysconfig
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from kvpolicy.errors import KvPolicyError, UserError

__all__ = ["Corpus", "default_corpus", "load_corpus"]

# Ends the reading of endless files; far more than any run of a small model needs.
MAX_BYTES = 64 << 20

HELD_OUT = "heldout"


class Corpus:
    """One text that pieces are cut from: each begins at the start of a line and has any length.

    The text repeats where a piece runs past its end.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __len__(self) -> int:
        return len(self._content)

    def piece(self, at: float, size: int) -> bytes:
        """``size`` bytes from the first line that starts at or after the fraction ``at`` (0 to 1)
        of the text."""
        text = self._content
        offset = int(at * len(text))
        start = 0 if offset == 0 else text.find(b"\n", offset - 1) + 1
        found = text[start : start + size]
        while len(found) < size:
            found += text[: size - len(found)]
        return found


def load_corpus(name: str | None) -> Corpus:
    """The texts of a file, or of every file in a folder in the order of their names; ``heldout``:
    those that the embedded model was not trained on; None: ``default_corpus()``.

    UserError if there is nothing to read.
    """
    if name is None:
        return default_corpus()
    if name == HELD_OUT:
        return Corpus(_held_out())
    root = Path(name).expanduser()
    try:
        found = sorted(p for p in root.rglob("*") if p.is_file()) if root.is_dir() else [root]
        content = _read(found)
    except OSError as error:
        raise UserError(f"text = {name!r}: {error.strerror or error}") from None
    if not content:
        raise UserError(f"text = {name!r}: there is no text in it")
    return Corpus(content)


@lru_cache(maxsize=1)
def default_corpus() -> Corpus:
    """The held-out texts of the embedded model, then the top-level modules of the standard library
    of the Python that runs, in the order of their names.

    So it differs from one Python to the next; the others do not.
    """
    library = Path(sysconfig.get_path("stdlib"))
    return Corpus(_held_out() + _read(sorted(library.glob("*.py"))))


def _held_out() -> bytes:
    folder = files("kvpolicy.models").joinpath("tiny_dsa", "heldout")
    found = (f for f in folder.iterdir() if f.name.endswith(".txt"))
    content = b"".join(text.read_bytes() for text in sorted(found, key=lambda f: f.name))
    if not content:
        raise KvPolicyError("the installation lacks its held-out texts")
    return content


def _read(paths: list[Path]) -> bytes:
    parts: list[bytes] = []
    left = MAX_BYTES
    for path in paths:
        with path.open("rb") as stream:
            parts.append(stream.read(left))
        left -= len(parts[-1])
    return b"".join(parts)
