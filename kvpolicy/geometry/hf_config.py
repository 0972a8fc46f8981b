"""Reading a Hugging Face config.json and its fields; whatever is wrong is one clear line. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpolicy.errors import UserError

# No field of a model is larger: beyond it a size is a typo that would exhaust memory.
LARGEST = 1 << 24
EMBEDDED = {"tiny-dsa": "tiny_dsa"}
"""Models shipped inside the package: name -> folder."""


def is_folder(path: Path) -> bool:
    """Whether a path is a folder; False too for what cannot be a path (a name of 300 characters)."""
    try:
        return path.is_dir()
    except OSError:
        return False


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. UserError naming the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"checkpoint {str(path.parent)!r} has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"model file {str(path)!r} is not readable JSON: {reason}") from None
    if not isinstance(content, dict):
        raise UserError(f"model file {str(path)!r} holds no JSON object")
    return content


def whole(config: Mapping[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    """An integer field, from ``least`` to LARGEST. UserError naming the field."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        raise UserError(f"config field {key} is missing: needs an integer >= {least}")
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= LARGEST:
        raise UserError(
            f"config field {key} is {value!r}: needs an integer from {least} to {LARGEST}"
        )
    return value


def positive(config: Mapping[str, Any], key: str, name: str | None = None) -> float:
    """A finite number above 0. name: how to call the field, where ``key`` alone does not say it."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
        raise UserError(f"config field {name or key} is {value!r}: needs a finite number > 0")
    return float(value)
