"""The error kinds, and the did-you-mean line."""

from __future__ import annotations

import pickle

from kvpolicy.errors import (
    CapacityError,
    IntegrityError,
    KvPolicyError,
    UserError,
    reason,
    unknown_name,
)


def test_error_kinds() -> None:
    assert issubclass(CapacityError, UserError)
    assert issubclass(UserError, KvPolicyError)
    assert issubclass(IntegrityError, KvPolicyError)
    assert not issubclass(IntegrityError, UserError)
    error = CapacityError("host", "one request needs 12 bytes of 8")
    assert (error.tier, str(error)) == ("host", "host memory: one request needs 12 bytes of 8")
    twin = pickle.loads(pickle.dumps(error))
    assert (twin.tier, str(twin)) == (error.tier, str(error))


def test_unknown_name_without_a_close_one() -> None:
    assert str(unknown_name("model", "zzz", ["a", "b"])) == "unknown model 'zzz'; allowed: a, b"
    assert str(unknown_name("model", "zzz", [])) == "unknown model 'zzz'; allowed: none"


def test_reason_is_one_line() -> None:
    assert reason(ValueError("two\nlines")) == "ValueError: two lines"
    assert reason(KeyError()) == "KeyError"
    assert len(reason(RuntimeError("x" * 10**6))) < 400
