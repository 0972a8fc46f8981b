"""Sizes that only just fit: contexts one off every boundary, tiers and staging without spare, one seat."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from abuse import Restless
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from micro import micro_model
from quick_model import QUICK, QuickModel
from scale import examples

from kvpolicy import Engine, EngineConfig, SamplingParams
from kvpolicy.controllers import ControllerLike
from kvpolicy.errors import CapacityError
from kvpolicy.memory import accounting
from kvpolicy.memory.accounting import Reserve
from kvpolicy.memory.layout import Layout
from kvpolicy.models.loader import DecodeModel

NO_SHRINK = (Phase.explicit, Phase.reuse, Phase.generate)
MIB = 1 << 20
NEW = 4
# Of the micro model: top-k 16, 21 and 42 records a frame, 64 keys; growth in lots of 64 tokens.
LENGTHS = sorted({n + d for n in (16, 21, 42, 64, 84, 128) for d in (-NEW, -1, 0, 1)})
QUICK_LAYOUT = Layout(QUICK, "float32")


def exact(
    layout: Layout,
    tokens: int,
    rows: tuple[int, ...],
    controller: ControllerLike,
    seats: int = 1,
    frames: int = 0,
    host: int = 0,
    **values: Any,
) -> EngineConfig:
    """A config whose memory is exactly that of one request of so many tokens with these hot rows, and
    so many frames and host bytes more; staging is one top-k."""
    chunk = values.setdefault("prefill_chunk", 300)
    floor = values.get("floor_rows", 0)
    reserve = Reserve(layout.topk, seats + chunk, seats)
    wanted = tuple(max(r, floor) for r in rows)
    frames += accounting.staging_frames(layout, reserve) + accounting.inflight_frames(
        layout, reserve
    )
    frames += accounting.request_frames(layout, tokens)
    frames += accounting.hot_frames(layout, wanted, tokens)
    return EngineConfig(
        **{
            "device": "cpu",
            "controller": controller,
            "clock": "steps",
            "validate": True,
            "control_interval": 1,
            "max_concurrency": seats,
            "staging_rows": layout.topk,
            "device_kv_mib": frames * layout.frame_bytes / MIB,
            "host_kv_mib": (accounting.host_bytes(layout, tokens) + host) / MIB,
            **values,
        }
    )


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> DecodeModel:
    return micro_model(Path(tmp_path_factory.mktemp("micro")))


def prompt_of(size: int) -> bytes:
    return bytes((7 * i + 3) % 256 for i in range(size))


@pytest.mark.parametrize("size", LENGTHS)
def test_lengths_one_off_every_boundary(micro: DecodeModel, size: int) -> None:
    """One seat, staging for one row, a chunk longer than the prompt, both tiers filled to the last
    frame and line: resident, nothing, one row less than top-k, top-k, one more."""
    layout, prints = Layout(micro.geometry, "float32"), set()
    params = SamplingParams(max_new_tokens=NEW)
    for rows in (1 << 20, 0, 15, 16, 17):
        spec = "resident" if rows == 1 << 20 else f"static:device_buffer_rows={rows}"
        config = exact(layout, size + NEW, (rows,) * len(layout.stores), spec)
        with Engine(config, model=micro) as engine:
            output = engine.generate([prompt_of(size)], params)[0]
            assert output.finish_reason == "length"
            prints.add(output.logits_sha256)
            with pytest.raises(CapacityError, match=r"^(host|device) memory: "):
                engine.submit(prompt_of(size + 64), params)
    assert len(prints) == 1


def test_the_longest_context(micro: DecodeModel) -> None:
    """A prompt and a generation that end exactly where the model does."""
    layout = Layout(micro.geometry, "float32")
    most = micro.geometry.max_context
    for spec, rows in (("resident", 1 << 20), ("static:device_buffer_rows=0", 0)):
        config = exact(layout, most, (rows,) * len(layout.stores), spec, prefill_chunk=200)
        with Engine(config, model=micro) as engine:
            params = SamplingParams(max_new_tokens=2)
            assert len(engine.generate([prompt_of(most - 2)], params)[0].tokens) == 2


# --- a floor that takes more frames than all rows do ----------------------------------------------


def test_a_floor_above_what_a_request_was_promised() -> None:
    """It would fit under `resident`, which has no metadata, and not with the floor of the next
    controller: refused when it comes, by name of the tier, rather than in a step."""
    config = exact(QUICK_LAYOUT, 16, (1 << 20,) * 2, "resident", floor_rows=12)
    params = SamplingParams(max_new_tokens=4)
    with Engine(config, model=QuickModel()) as engine:
        with pytest.raises(CapacityError, match=r"^device memory: a request of 16 tokens needs"):
            engine.submit(prompt_of(12), params)
    one_more = config.device_kv_mib + QUICK_LAYOUT.frame_bytes / MIB
    config = config.model_copy(update={"device_kv_mib": one_more})
    with Engine(config, model=QuickModel()) as engine:
        handle = engine.submit(prompt_of(12), params)
        engine.set_controller("static:device_buffer_rows=12")
        assert handle.result().finish_reason == "length"


def test_a_full_cache_of_the_size_of_its_floor_grows() -> None:
    """Resident while it is short. Then it needs a frame more that is not there, and its floor takes as
    many as it has: it has to leave its form, though that frees nothing."""
    spec = "static:device_buffer_rows=41"
    config = exact(QUICK_LAYOUT, 71, (41,) * 2, spec, floor_rows=40, prefill_chunk=1)
    with Engine(config, model=QuickModel()) as engine:
        handle = engine.submit(prompt_of(1), SamplingParams(max_new_tokens=70))
        for _ in range(3):
            engine.step()
        engine.set_controller("hybrid")
        engine.step()
        hot = engine.memory.requests[handle.id].hot
        assert any(cache.full for cache in hot)
        assert handle.result().logits_sha256 == quick_alone(1, 70)
        assert engine.metrics()["shortages"] > 0 == engine.metrics()["preemptions"]


# --- any sizes ------------------------------------------------------------------------------------


@cache
def quick_alone(size: int, new: int) -> str:
    config = exact(QUICK_LAYOUT, size + new, (1 << 20,) * 2, "resident", frames=60)
    with Engine(config, model=QuickModel()) as engine:
        params = SamplingParams(max_new_tokens=new)
        return engine.generate([prompt_of(size)], params)[0].logits_sha256


def lacking(engine: Engine, tokens: int) -> str | None:
    """The tier that cannot hold a request on an empty engine, the device first; by hand."""
    floor, size = engine.config.floor_rows, engine.memory.layout.frame_bytes
    promised = engine.control.initial_rows((tokens // 2, tokens))
    forms = [tuple(max(rows, floor) for rows in each) for each in (promised, (0, 0))]
    hot = max(accounting.hot_frames(QUICK_LAYOUT, rows, tokens) for rows in forms)
    needed = (accounting.request_frames(QUICK_LAYOUT, tokens) + hot) * size
    if needed > engine.memory.usage().free:
        return "device"
    host = accounting.host_bytes(QUICK_LAYOUT, tokens)
    return "host" if host > engine.memory.usage().host_free else None


SIZES = st.tuples(
    st.sampled_from((1, 15, 17, 31, 33, 60, 63, 65, 100)), st.sampled_from((1, 9, 70))
)
CONTROLLERS: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(["resident", "hisparse", "adaptive", "hybrid", "random"]),
    st.integers(0, 80).map(lambda rows: f"static:device_buffer_rows={rows}"),
    st.integers(0, 9**9).map(Restless),
)


@settings(max_examples=examples(25, 400), phases=NO_SHRINK)
@example([(1, 70)], "static:device_buffer_rows=41", "hybrid", 3, 1, 40, 0, 64)
@example([(100, 1), (1, 70)], "random", "static:device_buffer_rows=76", 1, 1, 20, 0, 30_000)
@given(
    requests=st.lists(SIZES, min_size=1, max_size=4),
    first=CONTROLLERS,
    second=CONTROLLERS,
    seats=st.integers(1, 3),
    chunk=st.sampled_from((1, 16, 200)),
    floor=st.sampled_from((0, 0, 7, 12, 20, 40)),
    frames=st.integers(-2, 6),
    host=st.sampled_from((-64, 0, 64, 30_000)),
)
def test_any_sizes_are_refused_by_tier_or_run_to_the_end(
    requests: list[tuple[int, int]],
    first: Any,
    second: Any,
    seats: int,
    chunk: int,
    floor: int,
    frames: int,
    host: int,
) -> None:
    """Memory about as large as the largest request, a swap while some wait: `submit` names the tier
    that lacks, and what it takes never raises in a step and gives what it gives alone."""
    most = max(size + new for size, new in requests)
    config = exact(
        QUICK_LAYOUT,
        most,
        (0, 0),
        first,
        seats,
        frames,
        host,
        floor_rows=floor,
        prefill_chunk=chunk,
    )
    with Engine(config, model=QuickModel()) as engine:
        before, handles = engine.memory.usage(), {}
        for i, (size, new) in enumerate(requests):
            try:
                handles[i] = engine.submit(prompt_of(size), SamplingParams(max_new_tokens=new))
                assert lacking(engine, size + new) is None
            except CapacityError as error:
                assert error.tier == lacking(engine, size + new)
        for _ in range(sum(seats for _ in handles)):
            engine.step()
        engine.set_controller(second)
        for i, handle in handles.items():
            assert handle.result().logits_sha256 == quick_alone(*requests[i])
        assert engine.memory.usage() == before
