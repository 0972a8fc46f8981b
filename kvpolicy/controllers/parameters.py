"""Checks of controller parameters."""

from __future__ import annotations

from kvpolicy.errors import UserError


def row_count(name: str, value: object, lowest: int = 0) -> int:
    """A whole number of rows, at least ``lowest``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise UserError(f"{name} = {value!r}: must be a whole number of rows, at least {lowest}")
    return value
