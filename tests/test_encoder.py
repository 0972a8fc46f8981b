"""The encoder and the action spaces: ranges, tables, versions, hostile numbers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import observe, request

from kvpolicy.control.actions import ACTIONS, make_actions
from kvpolicy.control.encoder import DEFAULT_GROUPS, Encoder
from kvpolicy.control.observation import MissCurve, Observation, StoreView
from kvpolicy.control.plan import FULL
from kvpolicy.control.projection import project
from kvpolicy.errors import UserError

STORES = (StoreView("a", 1, 16, 256, 12, 512), StoreView("b", 4, 32, 1024, 3, 512))
EVERY = Encoder((*DEFAULT_GROUPS, "stores", "requests"), 2, 3)


def seen(count: int = 4, free: int = 500, **changes: Any) -> Observation:
    requests = tuple(
        replace(
            request(i, (100 + 40 * i,) * 2, (32, 64)),
            selected_rows=64,
            unique_rows=60,
            fetched_rows=6 * i,
        )
        for i in range(count)
    )
    return replace(observe(STORES, requests, free), **changes)


def test_the_table_names_every_number() -> None:
    table = EVERY.table()
    assert [row[0] for row in table] == list(range(EVERY.size)) == list(range(29 + 2 * 3 + 3 * 6))
    assert len({row[1] for row in table}) == EVERY.size
    assert EVERY.encode(seen()).shape == (EVERY.size,)


def test_values_follow_the_table() -> None:
    observation = seen(waiting=3, oldest_wait=10, tokens=32, step_seconds=0.01, slo_tpot=0.01)
    values = dict(zip((row[1] for row in EVERY.table()), EVERY.encode(observation), strict=True))
    assert values["waiting"] == pytest.approx(math.log1p(3) / math.log1p(1024))
    assert values["running"] == pytest.approx(4 / 12)
    assert values["miss_rate"] == pytest.approx((0 + 6 + 12 + 18) / 240)
    assert values["miss_rate_worst"] == pytest.approx(0.3)
    assert values["tpot"] == pytest.approx(0.5)  # 4 requests, 8 steps, 32 tokens, 10 ms a step
    assert values["request3.here" if "request3.here" in values else "request2.here"] == 1.0
    assert values["store1.budget"] == pytest.approx((64 / 32) / (64 / 32 + 4))
    pool = observation.pool_bytes
    assert values["free"] == pytest.approx(observation.free_bytes / pool)


def test_an_empty_engine_and_a_new_vector() -> None:
    empty = seen(0)
    first, second = EVERY.encode(empty), EVERY.encode(empty)
    assert np.isfinite(first).all() and not np.shares_memory(first, second)


@given(
    st.integers(0, 5),
    st.integers(-(10**12), 10**15),
    st.integers(0, 10**9),
    st.floats(allow_nan=True, allow_infinity=True),
)
def test_whatever_is_observed_stays_in_range(
    count: int, size: int, many: int, seconds: float
) -> None:
    odd = {"free_bytes": size, "waiting": many, "tokens": many, "host_to_device_bytes": many}
    vector = EVERY.encode(
        seen(count, **odd, step_seconds=abs(seconds), slo_tpot=1e-9, slo_ttft=1.0)
    )
    assert vector.dtype == np.float32 and (vector >= 0).all() and (vector <= 1).all()


def test_specs_make_the_same_encoder_and_actions() -> None:
    again = Encoder.from_spec(json.loads(json.dumps(EVERY.spec())))
    assert again.features == EVERY.features
    with pytest.raises(UserError, match="version '0'"):
        Encoder.from_spec(EVERY.spec() | {"version": "0"})
    for name in ACTIONS:
        actions = make_actions(name, 3, 2)
        assert make_actions(**actions.spec()).knobs == actions.knobs


@pytest.mark.parametrize("wrong", [("laod",), (), ("load", "load"), ("stores",)])
def test_wrong_groups(wrong: tuple[str, ...]) -> None:
    with pytest.raises(UserError):
        Encoder(wrong)


# --- actions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.parametrize("free", [0, 500, 5000])
def test_any_action_gives_a_plan_that_can_be_projected(name: str, free: int) -> None:
    actions, observation = make_actions(name, 3, 2), seen(free=free)
    random = np.random.default_rng(0)
    for _ in range(20):
        if actions.kind == "box":
            action: Any = random.uniform(-1, 1, len(actions.knobs)).astype(np.float32)
        else:
            action = random.integers([k.levels for k in actions.knobs])
        plan = actions.decode(action if actions.kind != "discrete" else action[0], observation)
        budgets = project(plan, observation).budgets
        assert set(budgets) == {r.request_id for r in observation.requests}


def test_global_gives_all_nothing_and_half() -> None:
    actions, observation = make_actions("global"), seen(free=5000)
    everything = actions.decode([1, -1, -1], observation)
    assert set(everything.targets.values()) == {FULL}
    nothing = actions.decode([-1, -1, -1], observation)
    assert set(nothing.targets.values()) == {(0, 0)}
    assert not project(everything, observation).changed
    tight = seen(free=0)
    half = actions.decode([0, -1, -1], tight)
    given = project(half, tight)
    assert not given.changed
    size = sum(r[0] * 256 + r[1] * 1024 for r in given.budgets.values())
    assert 0.8 * tight.optional_bytes / 2 < size <= tight.optional_bytes / 2
    assert len({rows[1] / rows[0] for rows in half.targets.values()}) == 1  # top-k 16 and 32
    assert actions.decode([0, 1, -1], observation).reserve_bytes == 0.25 * observation.pool_bytes


def test_skew_follows_measured_misses() -> None:
    curves = (
        MissCurve((8, 16, 32), (8.0, 4.0, 2.0), 99.0),
        MissCurve((8, 16, 32), (32.0, 16.0, 8.0), 99.0),
    )
    tight = seen(free=0, curves=curves)
    rows = {s: make_actions("global").decode([0.9, -1, s], tight).targets[0] for s in (-1, 1)}
    # misses x rows: 64 and 256, so roots 8 and 16, over top-k 16 and 32: the same as the even split
    assert rows[-1][1] / rows[-1][0] == pytest.approx(2, rel=0.1)
    assert rows[1][1] / rows[1][0] == pytest.approx(2, rel=0.1)
    hungry = replace(tight, curves=(curves[0], MissCurve((8, 16, 32), (128.0, 64.0, 32.0), 99.0)))
    rows = make_actions("global").decode([0.9, -1, 1], hungry).targets[0]
    assert rows[1] / rows[0] == pytest.approx(4, rel=0.1)


def test_actions_of_another_shape_are_refused() -> None:
    for name, wrong in (("global", [0.0]), ("discrete", 18), ("per_store_levels", [0, 99])):
        with pytest.raises(UserError):
            make_actions(name, 3, 2).decode(wrong, seen())
    with pytest.raises(UserError, match="did you mean"):
        make_actions("globl")
    with pytest.raises(UserError, match="at least 1"):
        make_actions("per_request")


def test_no_number_counts_as_nothing() -> None:
    plan = make_actions("global").decode([math.nan, math.inf, -math.inf], seen())
    assert set(plan.targets.values()) == {(0, 0)} and math.isfinite(plan.reserve_bytes)


def test_the_docstring_has_the_table() -> None:
    from kvpolicy.env.residency import ResidencyEnv

    text = ResidencyEnv.__doc__ or ""
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if "|" in line
    ]
    found = [tuple(row[:3]) for row in rows if len(row) == 4 and row[0].isdigit()]
    assert found == [(str(i), name, unit) for i, name, unit, _ in Encoder().table()]
