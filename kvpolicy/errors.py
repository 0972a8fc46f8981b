"""The exceptions of kvpolicy. A `UserError` is the caller's to mend and says how in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CapacityError",
    "IntegrityError",
    "KvPolicyError",
    "UserError",
    "reason",
    "unknown_name",
]


class KvPolicyError(Exception):
    """Base of every error that kvpolicy raises on purpose."""


class UserError(KvPolicyError):
    """Bad input: one line naming the field, the value and what is allowed (CLI exit code 2)."""


class CapacityError(UserError):
    """A request or configuration that can never fit; `tier` names the memory that binds."""

    def __init__(self, tier: str, message: str) -> None:
        super().__init__(f"{tier} memory: {message}")
        self.tier = tier
        self.message = message

    def __reduce__(self) -> tuple[type[CapacityError], tuple[str, str]]:
        return type(self), (self.tier, self.message)


class IntegrityError(KvPolicyError):
    """`check_integrity()` found bookkeeping that contradicts itself: a bug, never bad input."""


def unknown_name(kind: str, value: str, allowed: Iterable[str]) -> UserError:
    """The error for a name that is not in `allowed`, with the closest one as a suggestion."""
    names = list(allowed)
    close = difflib.get_close_matches(value, names, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return UserError(f"unknown {kind} {value!r}{hint}; allowed: {', '.join(names) or 'none'}")


def reason(error: BaseException) -> str:
    """Type and message of a foreign exception in one line, at most 300 characters."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # its text may fail as well
        text = ""
    name = type(error).__name__
    return f"{name}: {text[:300]}" if text else name
