"""Reading YAML without surprises: whatever is wrong with it is one clear line."""

from __future__ import annotations

from typing import Any

import yaml

from kvpolicy.errors import UserError

# Besides its own errors the reader lets through those of the constructors it calls (a date that
# does not exist, a number of 5,000 digits, text nested 3,000 deep).
_ERRORS = (yaml.YAMLError, ValueError, KeyError, AttributeError, TypeError, RecursionError)


def read_yaml(text: str, what: str) -> Any:
    """The value of a YAML text. UserError: ``what`` is not valid YAML, and why."""
    try:
        return yaml.safe_load(text)
    except _ERRORS as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{what} is not valid YAML: {reason[:200]}") from None
