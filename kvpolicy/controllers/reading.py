"""Reading a controller's answer: whatever it is, it becomes plain numbers or one refusal."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from kvpolicy.control.observation import Observation
from kvpolicy.control.plan import Plan, Target
from kvpolicy.controllers.base import Controller

Kind = Literal["late", "busy", "stuck", "raised", "type", "number"]
"""What a controller did wrong: no answer within the deadline; still at an earlier call; not asked,
since too many earlier ones never returned; an exception; no plan; a plan with what is no number."""

# Requests that a plan may name, 16 times as many as can run: a mapping may have no end.
MOST_TARGETS = 1 << 16


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no plan, in one line."""

    kind: Kind
    text: str


class _Refused(Exception):
    pass


def answer(controller: Controller, observation: Observation, interrupts: bool) -> Plan | Failure:
    """Call ``decide`` and read its plan into plain dicts, tuples and floats.

    Nothing of the controller's is alive in the result, so reading it later runs none of its code.
    interrupts: let KeyboardInterrupt through (on the main thread it is the user's).
    """
    stores = len(observation.stores)
    try:
        plan: object = controller.decide(observation)
        if not isinstance(plan, Plan):
            return Failure("type", f"decide() returned {type(plan).__name__}, not a Plan")
        return _plain(plan, stores)
    except _Refused as error:
        return Failure("number", str(error))
    except BaseException as error:  # a foreign plug-in may raise anything, SystemExit too
        if interrupts and isinstance(error, KeyboardInterrupt):
            raise
        return Failure("raised", _line(error))


def _line(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:300]
    except BaseException:  # its text may fail as well
        return type(error).__name__


def _plain(plan: Plan, stores: int) -> Plan:
    named = plan.targets
    pairs = named.items() if isinstance(named, Mapping) else named
    targets: dict[int, Target] = {}
    for count, (key, target) in enumerate(pairs):
        if count == MOST_TARGETS:
            raise _Refused(f"targets names more than {MOST_TARGETS} requests")
        try:
            number = operator.index(key)
        except TypeError:
            raise _Refused(f"targets has {key!r:.80}, which is no request id") from None
        targets[int(number)] = _target(target, stores, f"targets[{number}]")  # type: ignore[assignment]
    return Plan(
        targets=targets,
        default=_target(plan.default, stores, "default"),
        reserve_rows=_number(plan.reserve_rows, "reserve_rows"),
        reserve_bytes=_number(plan.reserve_bytes, "reserve_bytes"),
    )


def _target(target: object, stores: int, name: str) -> Target | None:
    """A number, one per store, or None to keep. Of too many numbers one too many is read: the
    projection refuses their count, and there may be no end of them."""
    if target is None:
        return None
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
        raise _Refused(f"{name} is not a number: {value!r:.80}") from None
    if math.isnan(number):
        raise _Refused(f"{name} is not a number: nan")
    return number
