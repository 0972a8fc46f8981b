"""A controller's answer: a plan of plain numbers, or one failure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvpolicy.control.observation import Observation
from kvpolicy.control.plan import Plan
from kvpolicy.control.reading import UnreadablePlan, read
from kvpolicy.controllers.base import Controller
from kvpolicy.errors import reason

Kind = Literal["late", "busy", "stuck", "starting", "died", "raised", "type", "number"]
"""What went wrong: no answer within the deadline; still at an earlier call; not asked, since too many
earlier ones never returned; its process is being started again; its process ended; an exception; no
plan; a plan with what is no number."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no plan, in one line."""

    kind: Kind
    text: str


def answer(controller: Controller, observation: Observation, interrupts: bool) -> Plan | Failure:
    """Call ``decide`` and read its plan into plain dicts, tuples and floats.

    interrupts: let KeyboardInterrupt through (on the main thread it is the user's).
    """
    try:
        plan: object = controller.decide(observation)
        if not isinstance(plan, Plan):
            return Failure("type", f"decide() returned {type(plan).__name__}, not a Plan")
        return read(plan, len(observation.stores))
    except UnreadablePlan as error:
        return Failure("number", str(error))
    except BaseException as error:  # a foreign plug-in may raise anything, SystemExit too
        if interrupts and isinstance(error, KeyboardInterrupt):
            raise
        return Failure("raised", reason(error))
