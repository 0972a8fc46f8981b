"""Reading a plan: whatever was proposed becomes plain numbers, or one refusal. The only place that does."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from itertools import islice

from kvpolicy.control.plan import Plan, Target

# Requests that a plan may name, 16 times as many as can run: a mapping may have no end.
MOST_TARGETS = 1 << 16


class UnreadablePlan(ValueError):
    """A plan with something in it that is no number: text, NaN, an object. Says where."""


def read(plan: Plan, stores: int) -> Plan:
    """The plan as plain dicts, tuples and floats, infinities too. Reading it again changes nothing.

    Nothing of the caller's is alive in the result: looking at it runs none of their code. Too long a
    target keeps one number too many, for the projection to refuse. Raises UnreadablePlan, and whatever
    the plan's own objects raise.
    """
    named = plan.targets
    pairs = named.items() if isinstance(named, Mapping) else named
    targets: dict[int, Target] = {}
    for count, (key, target) in enumerate(pairs):
        if count == MOST_TARGETS:
            raise UnreadablePlan(f"targets names more than {MOST_TARGETS} requests")
        try:
            number = operator.index(key)
        except TypeError:
            raise UnreadablePlan(f"targets has {key!r:.80}, which is no request id") from None
        targets[int(number)] = _target(target, stores, f"targets[{number}]")  # type: ignore[assignment]
    return Plan(
        targets=targets,
        default=_target(plan.default, stores, "default"),
        reserve_rows=_number(plan.reserve_rows, "reserve_rows"),
        reserve_bytes=_number(plan.reserve_bytes, "reserve_bytes"),
        draft_tokens=_number(plan.draft_tokens, "draft_tokens"),
    )


def per_store(target: object, stores: int, name: str) -> tuple[float, ...] | None:
    """A target as one number per store, None for a wrong count of them. UnreadablePlan as above."""
    values = _values(target, stores, name)
    if isinstance(values, float):
        return (values,) * stores
    return values if len(values) == stores else None


def _target(target: object, stores: int, name: str) -> Target | None:
    return None if target is None else _values(target, stores, name)


def _values(target: object, stores: int, name: str) -> float | tuple[float, ...]:
    """A number, or any sequence or array of them. Of too many one too many is read: there may be no
    end of them."""
    if isinstance(target, Iterable) and not isinstance(target, (str, bytes, Mapping)):
        try:
            return tuple(_number(value, name) for value in islice(target, stores + 1))
        except TypeError:  # an array without dimensions
            pass
    return _number(target, name)


def _number(value: object, name: str) -> float:
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:  # a whole number beyond 1.8e308
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]
    except (TypeError, ValueError):
        raise UnreadablePlan(f"{name} is not a number: {value!r:.80}") from None
    if math.isnan(number):
        raise UnreadablePlan(f"{name} is not a number: nan")
    return number
