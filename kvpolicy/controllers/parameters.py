"""Checks of controller parameters."""

from __future__ import annotations

from collections.abc import Sequence

from kvpolicy.errors import UserError, unknown_name


def row_count(name: str, value: object, lowest: int = 0) -> int:
    """A whole number of rows, at least ``lowest``."""
    return whole_number(name, value, lowest, "a whole number of rows")


def whole_number(name: str, value: object, lowest: int = 0, what: str = "a whole number") -> int:
    """A whole number, at least ``lowest``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise UserError(f"{name} = {value!r}: must be {what}, at least {lowest}")
    return value


def share(name: str, value: object) -> float:
    """A part of the whole, from 0 up to but not including 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise UserError(f"{name} = {value!r}: must be a number from 0 to below 1")
    return float(value)


def one_of(name: str, value: object, allowed: Sequence[str]) -> str:
    """One of a few words."""
    if value not in allowed:
        raise unknown_name(name, str(value), allowed)
    return str(value)
