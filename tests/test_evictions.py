"""Eviction rules by name, registered ones too, from CacheRule and config down to the caches."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from micro import micro_model

import kvpolicy
from kvpolicy import CacheRule, Engine, EngineConfig, SamplingParams, UserError, evictions
from kvpolicy.kernels.eviction import RULES, EvictionRule
from kvpolicy.models.loader import DecodeModel


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> DecodeModel:
    return micro_model(Path(tmp_path_factory.mktemp("micro")))


@pytest.fixture
def oldest() -> Iterator[EvictionRule]:
    """A registered copy of fifo, for one test."""
    rule = replace(RULES["fifo"], name="oldest")
    assert evictions.register(rule) is rule
    yield rule
    del RULES["oldest"]


def test_names_and_descriptions(oldest: EvictionRule) -> None:
    assert evictions.names() == [*evictions.BUILT_IN, "oldest"]
    rules, refused = kvpolicy.evictions.catalogue()
    assert [rule.name for rule in rules] == evictions.names() and refused == ()
    assert all(rule.description and not rule.problem for rule in rules)
    assert evictions.find("oldest") is oldest and evictions.find("lru") is RULES["lru"]


def test_what_cannot_be_registered() -> None:
    before = dict(RULES)
    for rule, message in (
        (RULES["lru"], "'lru' is taken"),
        (replace(RULES["lru"], name="a b"), "eviction name 'a b'"),
        (replace(RULES["lru"], name=""), "eviction name ''"),
        ("lru", "must be a kvpolicy.kernels.eviction.EvictionRule"),
    ):
        with pytest.raises(UserError, match=message):
            evictions.register(rule)  # type: ignore[arg-type]
    assert before == RULES


@pytest.mark.parametrize("name", ["olddest", "LRU", "", 3, None, ["lru"]])
def test_unknown_names_are_told_where_they_are_given(oldest: EvictionRule, name: object) -> None:
    with pytest.raises(UserError, match=r"unknown eviction .*allowed: clock, lru, .*oldest"):
        CacheRule(eviction=name)  # type: ignore[arg-type]
    if name is not None:
        with pytest.raises(UserError, match="eviction = "):
            EngineConfig(eviction=name)  # type: ignore[arg-type]


def test_a_registered_rule_decides_the_victims(micro: DecodeModel, oldest: EvictionRule) -> None:
    """By config and by the controller's own cache rule: the rows of fifo, not those of lru."""

    class Own(kvpolicy.controllers.Controller):
        cache_rule = CacheRule(eviction="oldest")

        def decide(self, observation: kvpolicy.Observation) -> kvpolicy.Plan:
            return kvpolicy.Plan.even(24)

    def run(controller: object, eviction: str | None) -> tuple[int, str]:
        config = EngineConfig(
            controller=controller, eviction=eviction, device="cpu", clock="steps",
            device_kv_mib=2, host_kv_mib=4,
        )  # fmt: skip
        with Engine(config, model=micro) as engine:
            output = engine.generate([b"ab cd" * 20], SamplingParams(max_new_tokens=24))[0]
            return engine.metrics()["fetched_rows"], output.logits_sha256

    static = "static:device_buffer_rows=24"
    fifo, lru = run(static, "fifo"), run(static, "lru")
    assert fifo[0] != lru[0] and fifo[1] == lru[1]
    assert run(static, "oldest") == run(Own(), None) == fifo
    assert run(Own(), "lru") == lru


def test_built_in_names_need_no_torch() -> None:
    code = (
        "import sys, kvpolicy\n"
        "kvpolicy.EngineConfig(eviction='lru'); kvpolicy.CacheRule('fifo')\n"
        "for make in (lambda n: kvpolicy.EngineConfig(eviction=n), kvpolicy.CacheRule):\n"
        "    try: make('mru')\n"
        "    except kvpolicy.UserError as error: assert \"did you mean 'lru'\" in str(error)\n"
        "kvpolicy.controllers.catalogue(), kvpolicy.evictions.catalogue()\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
