"""How many examples an expensive property test takes."""

from __future__ import annotations

from hypothesis import settings


def examples(short: int, full: int) -> int:
    """``short`` in CI, ``full`` under ``make test-full`` (the profile that conftest.py loaded)."""
    return full if settings.default.max_examples >= 200 else short
