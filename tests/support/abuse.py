"""Four requests under anything that may happen to them: what the promise has to survive.

One :class:`Setting` is one way to run them: controller, swaps, reloads, forced preemptions, cancels,
deadlines, batch mix, chunking and memory. :func:`check` runs it and holds every request against itself
alone, token by token.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from drafters import Garbage, Scripted
from hostile import Hostile
from hypothesis import strategies as st

from kvpolicy import CacheRule, Engine, EngineConfig, Observation, Plan, SamplingParams
from kvpolicy.controllers import ControllerLike
from kvpolicy.engine.handle import RequestHandle
from kvpolicy.models.loader import DecodeModel

# Growth comes in lots of 64 tokens: every context crosses one of their ends, the second one two.
PROMPTS = [
    b"def f(x):\n    return x + 1\n" * 2 + b"# 0",
    b"z" * 61,
    bytes(range(60)) * 2,
    b"import os\n" * 4,
]
PARAMS = [
    SamplingParams(max_new_tokens=14),
    SamplingParams(max_new_tokens=70, temperature=0.7, seed=5),
    SamplingParams(max_new_tokens=11, temperature=1.2, top_k=20, top_p=0.9, seed=5),
    SamplingParams(max_new_tokens=30, temperature=1.0, seed=9),
]

Spec = str | tuple[str, int]
"""A controller's name with parameters, or the name of one of ours and its seed."""


class Restless:
    """Draws every request and store a new budget at each decision: nothing, some rows, everything."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.cache_rule = CacheRule(
            eviction=self._random.choice(["lru", "clock", "fifo", "random"]),
            admit_newest=self._random.random() < 0.5,
            seed=self._random.choice(["selection", "first"]),  # type: ignore[arg-type]
        )

    def decide(self, observation: Observation) -> Plan:
        draw = self._random.choice
        return Plan(
            targets={
                r.request_id: [draw((0, 1, 7, 17, 42, most)) for most in r.max_rows]
                for r in observation.requests
            }
        )


OURS: dict[str, Callable[[int], ControllerLike]] = {"restless": Restless, "hostile": Hostile}


def made(spec: Spec) -> ControllerLike:
    """Ours begin anew in every run."""
    return spec if isinstance(spec, str) else OURS[spec[0]](spec[1])


@dataclass(frozen=True)
class Event:
    """Something that happens after so many steps. kind: swap, reload, preempt or cancel."""

    steps: int
    kind: str
    spec: Spec = ""
    eviction: str | None = None
    victim: int = 0


@dataclass(frozen=True)
class Setting:
    """One way to run the same requests. spare: frames beyond what the largest request needs.

    deadlines: of which requests, in steps. floor, chunk, staging, concurrency, interval: as in
    EngineConfig. gap: steps between two arrivals. drafter: none, ngram, or one of ours by name: scripted,
    garbage; draft: its most tokens, its window and its seed. Verification is coupled, under which even
    sampled tokens must be those without a drafter.
    """

    controller: Spec = "hisparse"
    eviction: str | None = None
    chunk: int = 16
    staging: int = 64
    concurrency: int = 4
    interval: int = 3
    floor: int = 0
    spare: int = 100
    order: tuple[int, ...] = (0, 1, 2, 3)
    gap: int = 0
    deadlines: dict[int, int] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    drafter: str = "none"
    draft: tuple[int, int, int] = (4, 9, 0)


NAMES = (
    "resident",
    "hisparse",
    "hisparse:device_buffer_rows=16",
    "adaptive:split=equal",
    "adaptive:split=marginal",
    "hybrid",
    "hybrid:watermark=0.4",
)
EVICTIONS = (None, "lru", "clock", "fifo", "random")
DRAFTERS = ("none", "none", "ngram", "scripted", "scripted", "garbage")
KINDS = ("swap", "swap", "reload", "preempt", "preempt", "preempt", "cancel")


def draw_spec(draw: random.Random) -> Spec:
    """Any controller, each kind as likely as another."""
    return draw.choice(
        (
            *NAMES,
            f"static:device_buffer_rows={draw.choice((0, 1, 15, 16, 17, 40, 150))}",
            f"static:device_buffer_rows={draw.randrange(150)}",
            f"random:seed={draw.randrange(99)}",
            *[("restless", draw.randrange(999)), ("hostile", draw.randrange(999))] * 2,
        )
    )


def draw_event(draw: random.Random) -> Event:
    return Event(
        steps=draw.randrange(13),
        kind=draw.choice(KINDS),
        spec=draw_spec(draw),
        eviction=draw.choice(EVICTIONS),
        victim=draw.randrange(4),
    )


def draw_setting(seed: int) -> Setting:
    """The setting of a seed: everything is drawn evenly, not from small to large."""
    draw = random.Random(seed)
    return Setting(
        controller=draw_spec(draw),
        eviction=draw.choice(EVICTIONS),
        chunk=draw.choice((1, 3, draw.randint(1, 70), draw.randint(10, 70), draw.randint(10, 70))),
        staging=draw.choice((16, 17, 64, draw.randint(16, 64))),
        concurrency=draw.choice((1, 2, 3, 4, 4, 4)),
        interval=draw.randint(1, 8),
        floor=draw.choice((0, 0, 4, 17)),
        spare=draw.choice((0, 0, 1, 2, 3, 5, 8, 12, 20, 200)),
        order=tuple(draw.sample(range(4), 4)),
        gap=draw.choice((0, 0, draw.randrange(6))),
        deadlines={draw.randrange(4): draw.randint(1, 90)} if draw.random() < 0.3 else {},
        events=tuple(draw_event(draw) for _ in range(draw.randrange(7))),
        drafter=draw.choice(DRAFTERS),
        draft=(draw.randint(1, 7), draw.choice((2, 3, 9, 40)), draw.randrange(99)),
    )


SETTINGS = st.integers(0, 2**32 - 1).map(draw_setting)


@dataclass(frozen=True)
class Alone:
    """A request by itself. digests: fingerprint of the logits after every number of tokens."""

    tokens: tuple[int, ...]
    digests: tuple[str, ...]
    reason: str


def drafter_of(setting: Setting, alone: dict[int, Alone]) -> Any:
    """Anew for every run; the scripted one knows the answers."""
    tokens, window, seed = setting.draft
    if setting.drafter == "scripted":
        texts = [[*PROMPTS[which], *own.tokens] for which, own in alone.items()]
        return Scripted(texts, tokens, window, wrong=2 + seed % 7)
    return Garbage(seed, tokens) if setting.drafter == "garbage" else setting.drafter


def config(setting: Setting, mib: float, values: dict[str, Any]) -> EngineConfig:
    return EngineConfig(
        **{
            "device": "cpu",
            "controller": made(setting.controller),
            "eviction": setting.eviction,
            "prefill_chunk": setting.chunk,
            "staging_rows": setting.staging,
            "control_interval": setting.interval,
            "floor_rows": setting.floor,
            "max_concurrency": setting.concurrency,
            "device_kv_mib": mib,
            "host_kv_mib": 1,
            "clock": "steps",
            "validate": True,
            **values,
        }
    )


def run_alone(model: DecodeModel, which: int, **values: Any) -> Alone:
    """Fully resident, with nobody else, its prompt in one chunk."""
    setting = Setting("resident", chunk=200, concurrency=1)
    with Engine(config(setting, 4, values), model=model) as engine:
        handle = engine.submit(PROMPTS[which], PARAMS[which])
        digests = [handle._request.output().logits_sha256]
        for _ in handle:
            digests.append(handle._request.output().logits_sha256)
        output = handle.result()
    return Alone(tuple(output.tokens), tuple(digests), output.finish_reason)


def device_mib(
    model: DecodeModel, setting: Setting, which: list[int], values: dict[str, Any]
) -> float:
    """Memory for the largest of the requests, resident, at its floor or with what it is promised, and
    ``spare`` frames."""
    with Engine(config(setting, 4, values), model=model) as engine:
        memory = engine.memory
        stores = len(memory.layout.stores)
        most = [len(PROMPTS[i]) + PARAMS[i].max_new_tokens for i in which]
        promised = tuple(int(min(rows, 1 << 20)) for rows in engine.control.promised)
        forms = ((0,) * stores, (1 << 20,) * stores, promised)
        least = max(memory.frames_of(n, rows) for n in most for rows in forms)
        return (memory._shared + least + setting.spare) * memory.layout.frame_bytes / 2**20


def happen(engine: Engine, event: Event, handles: dict[int, RequestHandle]) -> None:
    for _ in range(event.steps):
        engine.step()
    if event.kind == "swap":
        engine.set_controller(made(event.spec))
    elif event.kind == "reload":
        changed = {"controller": made(event.spec), "eviction": event.eviction}
        engine.reload(engine.config.model_copy(update=changed))
    elif event.kind == "preempt" and engine.scheduler.running:
        running = engine.scheduler.running
        engine.residents.preempt(running[event.victim % len(running)], engine.steps)
    elif event.kind == "cancel":
        handles[list(handles)[event.victim % len(handles)]].cancel()


def check(
    model: DecodeModel, alone: dict[int, Alone], setting: Setting, **values: Any
) -> dict[str, Any]:
    """Run the requests of ``alone`` under a setting: AssertionError unless each of their tokens and
    logits is what it is alone, and all memory comes back. Returns the metrics."""
    values = {"drafter": drafter_of(setting, alone), "verification": "coupled", **values}
    mib = device_mib(model, setting, list(alone), values)
    handles: dict[int, RequestHandle] = {}
    with Engine(config(setting, mib, values), model=model) as engine:
        before = engine.memory.usage(), engine.memory.arena.frames.owners()
        for which in setting.order:
            if which not in alone:
                continue
            limit = {"deadline_ms": setting.deadlines.get(which)}
            handles[which] = engine.submit(PROMPTS[which], PARAMS[which].model_copy(update=limit))
            for _ in range(setting.gap):
                engine.step()
        for event in setting.events:
            happen(engine, event, handles)
        for which, handle in handles.items():
            output = handle.result()
            count = len(output.tokens)
            assert output.tokens == list(alone[which].tokens[:count])
            assert output.logits_sha256 == alone[which].digests[count]
            if output.finish_reason != "cancelled":
                assert (count, output.finish_reason) == (
                    len(alone[which].tokens),
                    alone[which].reason,
                )
        assert (engine.memory.usage(), engine.memory.arena.frames.owners()) == before
        assert not engine.requests and not engine.memory.suspended
        engine.check_integrity()
        metrics = engine.metrics()
        assert metrics["device_kv_bytes_peak"] <= mib * 2**20
        if setting.drafter in ("ngram", "scripted"):
            assert metrics["speculation"]["drafter_failures"] == 0
        return metrics
