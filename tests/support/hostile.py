"""Controllers that do what no controller should. Each act: what it does, and what must be noted of it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvpolicy import Observation, Plan

Act = Callable[[Observation], Any]
FALLBACK_KINDS = ("late", "busy", "stuck", "starting", "died", "raised", "type", "number")


class Acting:
    """A controller that does what it is told."""

    def __init__(self, act: Act) -> None:
        self.act = act

    def decide(self, observation: Observation) -> Plan:
        return self.act(observation)  # type: ignore[no-any-return]


def fail(error: BaseException) -> Act:
    def act(observation: Observation) -> Plan:
        raise error

    return act


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Endless(Mapping[int, float]):
    """Has a target for every whole number there is."""

    def __getitem__(self, key: int) -> float:
        return 1.0

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


class Greedy(Plan):
    """Its attributes allocate whenever they are read."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        if name == "default":
            return float(len(bytearray(8 << 20)))
        return super().__getattribute__(name)


class Refusing(Plan):
    """Its attributes cannot be read."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        if name == "targets":
            raise SystemExit(2)
        return super().__getattribute__(name)


def vandal(observation: Observation) -> Plan:
    for view in observation.requests:
        object.__setattr__(view, "budget", ("x",))
        object.__setattr__(view, "max_rows", ())
    object.__setattr__(observation, "requests", ())
    object.__setattr__(observation, "stores", ())
    object.__setattr__(observation, "free_bytes", 10**30)
    return Plan.even(1e9)


def each(value: Any) -> Act:
    """The same target, whatever it is, for every running request by its number."""
    return lambda o: Plan(targets={r.request_id: value for r in o.requests})


# What the fallback decides for, by the kind that is noted.
FAILING: dict[str, tuple[Act, str]] = {
    "nan": (lambda o: Plan.even(float("nan")), "number"),
    "nan in one store": (each((5.0, float("nan"))), "number"),
    "text": (each("many"), "number"),
    "digits": (each("12"), "number"),
    "complex": (each(1j), "number"),
    "an object": (each(object()), "number"),
    "a nested list": (each([[1], [2]]), "number"),
    "reserve of nan": (lambda o: Plan(reserve_rows=float("nan")), "number"),
    "a key that is no number": (lambda o: Plan(targets={"a": 3}), "number"),  # type: ignore[dict-item]
    "endless targets": (lambda o: Plan(targets=Endless()), "number"),
    "nothing": (lambda o: None, "type"),
    "a number": (lambda o: 3, "type"),
    "the class": (lambda o: Plan, "type"),
    "a generator": (lambda o: (x for x in range(3)), "type"),
    "a dictionary": (lambda o: {"default": 3}, "type"),
    "a list of targets": (lambda o: Plan(targets=[1, 2]), "raised"),  # type: ignore[arg-type]
    "an attribute that exits": (lambda o: Refusing(), "raised"),
    "error": (fail(RuntimeError("no idea")), "raised"),
    "unspeakable": (fail(Unspeakable()), "raised"),
    "exit": (fail(SystemExit(1)), "raised"),
    "interrupt": (fail(KeyboardInterrupt()), "raised"),
    "generator exit": (fail(GeneratorExit()), "raised"),
    "no memory": (fail(MemoryError()), "raised"),
    "recursion": (lambda o: FAILING["recursion"][0](o), "raised"),
}
# What is a plan all the same, and altered until it fits: by a piece of the reason that is noted.
PROJECTED: dict[str, tuple[Act, str]] = {
    "negative": (lambda o: Plan.even(-5), "negative"),
    "minus infinity": (lambda o: Plan.even(float("-inf")), "negative"),
    "1e300": (lambda o: Plan.even(1e300), "more than the memory there is"),
    "infinity": (lambda o: Plan.even(float("inf")), "more than the memory there is"),
    "10 to the 400": (lambda o: Plan.even(10**400), "more than the memory there is"),
    "too short": (each((3.0,)), "targets do not match"),
    "too long": (each((3.0,) * 99), "targets do not match"),
    "endless": (lambda o: Plan.even(itertools.count()), "targets do not match"),  # type: ignore[arg-type]
    "unknown request": (lambda o: Plan(targets={10**9: 3, -1: 5}), "unknown request"),
    "negative reserve": (lambda o: Plan(reserve_rows=-1), "reserve"),
    "allocating": (lambda o: Greedy(), "more than the memory there is"),
    "vandal": (vandal, "more than the memory there is"),
}


class Hostile:
    """Does one of all these at every decision."""

    def __init__(self, seed: int) -> None:
        # Interrupts are left out: asked inline, without a deadline, they are the user's.
        known = {**FAILING, **PROJECTED}
        self._acts = [act for name, (act, _) in known.items() if name != "interrupt"]
        self._random = random.Random(seed)

    def decide(self, observation: Observation) -> Plan:
        return self._random.choice(self._acts)(observation)  # type: ignore[no-any-return]
