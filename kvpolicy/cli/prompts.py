"""Prompts from arguments, files and standard input, as bytes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kvpolicy.errors import UserError

__all__ = ["MAX_PROMPT_BYTES", "read_prompts"]

# Far above any context of a byte-level model; it ends the reading of /dev/zero and the like.
MAX_PROMPT_BYTES = 64 << 20


def read_prompts(arguments: Sequence[str], files: Sequence[Path], bos: bool) -> list[bytes]:
    """Arguments first, then files. An empty prompt is allowed only behind a BOS token."""
    if not arguments and not files:
        raise UserError("no prompt: give PROMPT, '-' for standard input, or --prompt-file PATH")
    if arguments.count("-") > 1:
        raise UserError("standard input ('-') can be read only once")
    named = [(f"prompt {i + 1}", _argument(i, text)) for i, text in enumerate(arguments)]
    named += [(f"prompt file {str(path)!r}", _file(path)) for path in files]
    for name, content in named:
        if not content and not bos:
            raise UserError(f"{name} is empty (allowed only with --bos)")
        if len(content) > MAX_PROMPT_BYTES:
            raise UserError(f"{name} has more than {MAX_PROMPT_BYTES} bytes")
    return [content for _, content in named]


def _argument(index: int, text: str) -> bytes:
    if text == "-":
        return _stdin()
    try:
        return text.encode()
    except UnicodeEncodeError:  # bytes of the command line that did not decode
        message = f"prompt {index + 1} is not UTF-8; --prompt-file takes raw bytes"
        raise UserError(message) from None


def _stdin() -> bytes:
    if sys.stdin is None:
        raise UserError("standard input is closed")
    try:
        return sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise UserError(f"standard input: {error.strerror or error}") from None


def _file(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise UserError(f"prompt file {str(path)!r}: {error.strerror or error}") from None
