"""Speculation in the engine: what is written, kept, counted and never seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import Garbage, Scripted
from micro import micro_model, write_checkpoint
from torch import Tensor
from toy_model import ToyModel

from kvpolicy import Engine, EngineConfig, Observation, Plan, SamplingParams, UserError
from kvpolicy.engine.request import RequestOutput
from kvpolicy.engine.speculation import FAILURES, Places
from kvpolicy.geometry.geometry import Selector
from kvpolicy.kernels.paging import scatter
from kvpolicy.kernels.resolve import CacheTables
from kvpolicy.memory.layout import Layout, RingShape
from kvpolicy.memory.step import StepMemory
from kvpolicy.memory.verify import VerifyRows, VerifyStep
from kvpolicy.models.glm_dsa import GlmDsa
from kvpolicy.models.loader import DecodeModel, load_model
from kvpolicy.recording.recorder import Recorder
from kvpolicy.shadows import Shadows
from kvpolicy.speculative.proposal import OneHot, Proposal
from kvpolicy.twin.records import WorkLog

PROMPTS = [b"def f(x):\n    return x + 1\n" * 3, b"z" * 20]
GREEDY = SamplingParams(max_new_tokens=40)
SAMPLED = SamplingParams(max_new_tokens=40, temperature=0.8, seed=4)


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> GlmDsa:
    return micro_model(Path(tmp_path_factory.mktemp("micro")))


def make(model: DecodeModel, **changes: Any) -> Engine:
    values = {
        "device": "cpu",
        "device_kv_mib": 2,
        "host_kv_mib": 4,
        "clock": "steps",
        "controller": "static:device_buffer_rows=24",
        "validate": True,
        **changes,
    }
    return Engine(EngineConfig(**values), model=model)


def run(
    model: DecodeModel, params: SamplingParams = GREEDY, **changes: Any
) -> tuple[list[RequestOutput], dict[str, Any]]:
    with make(model, **changes) as engine:
        return engine.generate(PROMPTS, params), engine.metrics()


@pytest.fixture(scope="module")
def plain(micro: GlmDsa) -> dict[SamplingParams, list[RequestOutput]]:
    return {params: run(micro, params)[0] for params in (GREEDY, SAMPLED)}


class Sure(Scripted):
    """Sure of the first two tokens, and not at all of others."""

    def propose(self, *arguments: Any) -> Proposal:
        found = super().propose(*arguments)
        sure = torch.tensor([0.9, 0.8, *[0.0] * (self.tokens - 2)])
        return replace(found, confidence=sure.expand(found.tokens.shape))


def scripted(
    outputs: list[RequestOutput], kind: type[Scripted] = Scripted, **changes: Any
) -> Scripted:
    texts = [[*prompt, *output.tokens] for prompt, output in zip(PROMPTS, outputs, strict=True)]
    return kind(texts, **changes)


@pytest.mark.parametrize("rule", ["standard", "block", "coupled"])
@pytest.mark.parametrize("width", [1, 4, 7])
def test_greedy_output_is_that_without_a_drafter(
    micro: GlmDsa, plain: dict[SamplingParams, list[RequestOutput]], rule: str, width: int
) -> None:
    drafter = scripted(plain[GREEDY], tokens=7, wrong=5)
    found, metrics = run(micro, drafter=drafter, verification=rule, num_draft_tokens=width)
    assert found == plain[GREEDY]
    assert metrics["accepted_length"] > 1.4 and not metrics["speculation"]["drafter_failures"]


def test_coupled_output_is_that_without_a_drafter(
    micro: GlmDsa, plain: dict[SamplingParams, list[RequestOutput]]
) -> None:
    """At any length: a schedule may cut it, on the wall clock after what steps cost."""
    for length, clock in (("full", "steps"), ("scheduled", "steps"), ("scheduled", "wall")):
        drafter = scripted(plain[SAMPLED], kind=Sure, tokens=5)
        values = {"drafter": drafter, "verification": "coupled", "verify_length": length}
        found, metrics = run(micro, SAMPLED, clock=clock, **values)
        assert found == plain[SAMPLED] and not metrics["speculation"]["drafter_failures"]
        verified = metrics["speculation"]["verified"]
        assert verified[0] > 0 and (length == "full") == (verified[4] > 0.7 * verified[0])


def test_a_stop_text_inside_an_accepted_prefix_ends_there(
    micro: GlmDsa, plain: dict[SamplingParams, list[RequestOutput]]
) -> None:
    text = bytes(t for t in plain[SAMPLED][0].tokens if t < 256)
    params = SAMPLED.model_copy(update={"stop": (text[6:8],)})
    expected = run(micro, params)[0]
    drafter = scripted(plain[SAMPLED], tokens=7, wrong=1000)
    found, metrics = run(micro, params, drafter=drafter, verification="coupled")
    assert found == expected
    assert found[0].finish_reason == "stop" and len(found[0].tokens) < 12
    assert metrics["generated_tokens"] == sum(len(o.tokens) for o in found)


def test_a_block_ends_with_the_last_token(
    micro: GlmDsa, plain: dict[SamplingParams, list[RequestOutput]]
) -> None:
    """Everything is accepted, and yet no request gets a token too many, or computes a row for one."""
    for count in (1, 2, 7, 8, 9):
        params = GREEDY.model_copy(update={"max_new_tokens": count})
        drafter = scripted(plain[GREEDY], tokens=7, wrong=1000)
        found, metrics = run(micro, params, drafter=drafter)
        assert [o.tokens for o in found] == [o.tokens[:count] for o in plain[GREEDY]]
        assert metrics["steps"] <= 3 + 2 + -(-count // 8)
        assert sum(metrics["speculation"]["accepted"]) < 2 * count


def test_a_hostile_drafter_changes_no_token_and_is_given_up(
    micro: GlmDsa,
    plain: dict[SamplingParams, list[RequestOutput]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for params in (GREEDY, SAMPLED):
        found, metrics = run(micro, params, drafter=Garbage(1), verification="coupled")
        assert found == plain[params]
        assert metrics["speculation"]["drafter_failures"] == FAILURES
    assert "it is not asked again" in caplog.text
    law = run(micro, SAMPLED, drafter=Garbage(2), verification="standard")[0]
    assert [len(o.tokens) for o in law] == [40, 40]


def test_what_is_drafted_before_a_graph_keeps_its_confidence(micro: GlmDsa) -> None:
    with make(micro, drafter="ngram") as engine:
        assert engine.speculator is not None
        places: Places = {}
        found = []
        for sure in (torch.tensor([[0.5, 0.25]]), None, torch.tensor([[0.75, 0.5]])):
            tokens = torch.randint(0, 9, (1, 2))
            place = engine.speculator.placed(places, 1, 3, Proposal(tokens, OneHot(), sure))
            assert torch.equal(place.tokens, tokens)
            found.append(place)
    first, none, last = found
    assert last is first and none.confidence is None and first.confidence is not None
    assert first.confidence.tolist() == [[0.75, 0.5]]


class Silent(Scripted):
    """Fails at every call."""

    def propose(self, *arguments: Any) -> Proposal:
        raise RuntimeError("nothing to say")


@pytest.mark.parametrize("staging", [None, 16])
def test_only_sound_tokens_up_to_the_limit_count_as_proposed(
    micro: GlmDsa, plain: dict[SamplingParams, list[RequestOutput]], staging: int | None
) -> None:
    """In steps that the device shapes, and in those of the host."""
    changes = {} if staging is None else {"staging_rows": staging}
    drafter = scripted(plain[GREEDY], tokens=7)
    counts = run(micro, drafter=drafter, verify_length="full", **changes)[1]["speculation"]
    assert counts["proposed"] == counts["verified"] and counts["proposed"][0] > 0
    drafter = scripted(plain[GREEDY], kind=Silent, tokens=7)
    counts = run(micro, drafter=drafter, **changes)[1]["speculation"]
    assert counts["drafter_failures"] == FAILURES and counts["proposed"] == [0] * 7


def test_steps_with_prompt_rows_tell_no_price(
    micro: GlmDsa, plain: dict[SamplingParams, list[RequestOutput]]
) -> None:
    """The host shapes the steps; one request decodes while the other's prompt is read."""
    values = {"clock": "wall", "verify_length": "scheduled", "staging_rows": 16}
    drafter = scripted(plain[GREEDY], tokens=7)
    with make(micro, drafter=drafter, prefill_chunk=8, **values) as engine:
        assert engine.speculator is not None
        timed: list[int] = []
        engine.speculator.timed = lambda *_, **__: timed.append(1)  # type: ignore[method-assign, misc]
        mixed: list[tuple[bool, int]] = []
        engine.observers.append(
            lambda _, batch: mixed.append((bool(batch.decode and batch.prompts), len(timed)))
        )
        handles = [engine.submit(PROMPTS[1], GREEDY)]
        while not handles[0].done:
            engine.step()
            if len(handles) == 1 and timed:
                handles.append(engine.submit(PROMPTS[0], GREEDY))
    told = [0, *(count for _, count in mixed)]
    seen = [after - before for (both, after), before in zip(mixed, told, strict=False) if both]
    assert seen and not any(seen) and timed


# --- rejected rows --------------------------------------------------------------------------------

AfterStep = Callable[[list[tuple[int, int, int, int]], Callable[[Selector], Tensor]], None]
"""Told of a step before it commits: (seat, first row, rows, position) of each request that decodes, and what
its rows chose."""


def watch(engine: Engine, path: str, before: AfterStep, after: Callable[..., None]) -> None:
    """Call both around the commit of every step that decodes. path: which kind of step is taken; ``host`` has
    its shapes from the host. after: (seat, position, rows kept, rows) of each request."""
    memory = engine.memory
    if path == "host":
        engine.executor.verifier = None
        commit = memory.commit

        def committed(step: StepMemory, accepted: list[int]) -> None:
            pairs = list(zip(step.requests, step.segments, accepted, strict=True))
            own = [(r, s, n) for r, s, n in pairs if s.decode]
            before([(r.seat, s.start, s.count, s.position) for r, s, _ in own], step.selection)
            commit(step, accepted)
            after([(r.seat, s.position, n, s.count) for r, s, n in own])

        memory.commit = committed  # type: ignore[method-assign, assignment]
        return
    make_step = memory.verify_step

    def verify_step(rows: VerifyRows, most: int) -> VerifyStep:
        step = make_step(rows, most)
        keep = step.commit_accepted
        count = rows.alive.view(-1, rows.q).sum(1).tolist()
        seats, anchors = rows.seat.tolist(), rows.anchor.tolist()

        def committed(accepted: Tensor) -> None:
            own = list(
                zip(seats, range(0, len(seats) * rows.q, rows.q), count, anchors, strict=True)
            )
            before(own, step.selection)
            keep(accepted)
            kept = (accepted + 1).tolist()
            after(list(zip(seats, anchors, kept, count, strict=True)))

        step.commit_accepted = committed  # type: ignore[method-assign]
        return step

    memory.verify_step = verify_step  # type: ignore[method-assign]


BOTH = pytest.mark.parametrize("path", ["host", "device"])


@BOTH
def test_rejected_rows_are_never_seen_again(
    micro: GlmDsa, plain: dict[SamplingParams, list[RequestOutput]], path: str
) -> None:
    """Poison everything a step leaves behind: in-flight rows, staging, keys past the committed ones."""
    drafter = scripted(plain[GREEDY], tokens=5, wrong=3)
    with make(micro, drafter=drafter) as engine:
        tables, poisoned = engine.memory.tables, 0

        def poison(requests: list[tuple[int, int, int, int]]) -> None:
            nonlocal poisoned
            for table in (*tables.inflight, *tables.staging):
                table.paged.view[table.paged.frames] = float("nan")
            for seat, position, kept, count in requests:
                gone = torch.arange(position + kept, position + count)
                poisoned += len(gone)
                for own in tables.stores:
                    where = own.key_location(torch.full_like(gone, seat), gone)
                    nothing = torch.full((len(gone), *own.layout.key.shape), float("nan"))
                    scatter(own.keys.view, where, nothing)

        watch(engine, path, lambda requests, chosen: None, poison)
        assert engine.generate(PROMPTS, GREEDY) == plain[GREEDY]
        assert poisoned > 20


@BOTH
def test_each_step_fetches_the_union_once(
    micro: GlmDsa, plain: dict[SamplingParams, list[RequestOutput]], path: str
) -> None:
    """Every missing record once, whatever the number of rows that want it."""
    drafter = scripted(plain[GREEDY], tokens=7, wrong=3)
    with make(micro, drafter=drafter, controller="static:device_buffer_rows=0") as engine:
        memory = engine.memory
        last, steps = memory.counters.decode, 0

        def check(
            requests: list[tuple[int, int, int, int]], selection: Callable[[Selector], Tensor]
        ) -> None:
            nonlocal last, steps
            union = selected = 0
            for selector in memory.layout.geometry.selectors:
                layers = memory.layout.of(selector).store.n_layers
                for _, start, count, position in requests:
                    chosen = selection(selector)[start : start + count]
                    old = chosen[(chosen >= 0) & (chosen < position)]
                    selected += old.numel() * layers
                    union += old.unique().numel() * layers
            now = memory.counters.decode
            new = now.since(last)
            assert (new.selected_rows, new.unique_rows) == (selected, union)
            # Nothing may stay, so all of the union is missed, and fetched once.
            assert new.fetched_rows == union
            last, steps = now, steps + (union < selected)

        watch(engine, path, check, lambda requests: None)
        engine.generate(PROMPTS, GREEDY)
        assert steps > 5


@BOTH
@pytest.mark.parametrize("admission", ["all", "accepted"])
def test_what_only_rejected_rows_wanted_goes_first(
    micro: GlmDsa, plain: dict[SamplingParams, list[RequestOutput]], path: str, admission: str
) -> None:
    """After a step with ``accepted`` a record that it fetched has the oldest stamp if no kept row wanted it,
    and the step's stamp if one did."""
    drafter = scripted(plain[GREEDY], tokens=7, wrong=3)
    values = {
        "drafter": drafter,
        "admission": admission,
        "controller": "static:device_buffer_rows=64",
    }
    with make(micro, **values) as engine:
        stores, found = engine.memory.tables.stores, {"demoted": 0, "kept": 0}
        before: list[tuple[CacheTables, int, set[int], Tensor, int]] = []

        def note(
            requests: list[tuple[int, int, int, int]], selection: Callable[[Selector], Tensor]
        ) -> None:
            before.clear()
            for selector in engine.memory.layout.geometry.selectors:
                cache = stores[engine.memory.layout.of(selector).index].cache
                for seat, start, count, position in requests:
                    if seat >= 0:
                        rows = selection(selector)[start : start + count]
                        state = cache.state(seat)
                        slots = torch.arange(state.used)
                        new = state.stamp.get(slots) == 2 * engine.steps
                        fetched = state.entry_of.get(slots[new]).tolist()
                        before.append((cache, seat, set(fetched), rows, position))

        def check(requests: list[tuple[int, int, int, int]]) -> None:
            kept = {seat: count for seat, _, count, _ in requests}
            for cache, seat, fetched, rows, position in before:
                wanted = set(rows[: kept[seat]].flatten().tolist())
                state = cache.state(seat)
                slots = torch.arange(state.used)
                stamps = dict(
                    zip(
                        *(state.entry_of.get(slots).tolist(), state.stamp.get(slots).tolist()),
                        strict=True,
                    )
                )
                for entry in fetched & stamps.keys():
                    assert entry < position
                    gone = entry not in wanted and admission == "accepted"
                    assert stamps[entry] == (0 if gone else 2 * engine.steps)
                    found["demoted" if entry not in wanted else "kept"] += 1

        watch(engine, path, note, check)
        assert engine.generate(PROMPTS, GREEDY) == plain[GREEDY]
        assert all(count > 1 for count in found.values()), found


def test_a_step_that_the_host_shapes_says_the_same(
    micro: GlmDsa, plain: dict[SamplingParams, list[RequestOutput]]
) -> None:
    """Too little staging for all that the verify rows may miss: they are served in waves."""
    drafter = scripted(plain[SAMPLED], tokens=7, wrong=3)
    values = {"drafter": drafter, "verification": "coupled"}
    found, metrics = run(micro, SAMPLED, staging_rows=16, **values)
    assert found == plain[SAMPLED] and metrics["request_waves"] > 0


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(GREEDY, id="greedy", marks=pytest.mark.full),
        pytest.param(SAMPLED, id="sampled"),
    ],
)
def test_triton_kernels_verify_alike(
    tmp_path: Path, device: torch.device, params: SamplingParams
) -> None:
    """Both kinds of step, against the same kernels without a drafter: tokens, logits, rows fetched."""
    prompts, params = (
        [b"def", bytes(range(20))],
        params.model_copy(update={"max_new_tokens": 4}),
    )
    model = load_model(str(write_checkpoint(tmp_path)), device, "triton")
    values = {"device": device.type, "backend": "triton", "validate": False, "prefill_chunk": 64}
    with make(model, **values) as engine:
        plain = engine.generate(prompts, params)
    drafter = Scripted(
        [[*prompt, *output.tokens] for prompt, output in zip(prompts, plain, strict=True)],
        tokens=2,
        wrong=3,
    )
    values |= {"drafter": drafter, "verification": "coupled"}
    for staging in (16, None):
        with make(model, staging_rows=staging, **values) as engine:
            assert engine.generate(prompts, params) == plain
            metrics = engine.metrics()
            assert metrics["accepted_length"] > 1 and not metrics["speculation"]["drafter_failures"]


# --- memory ---------------------------------------------------------------------------------------


def test_staging_and_rings_do_not_grow_with_layers_or_context(tmp_path: Path) -> None:
    """Staging of 8 and of 32 layers, each a store of its own; rings of a short and a long request."""
    from micro import CONFIG

    staging, rings = [], []
    for layers in (8, 32):
        changes = {
            "num_hidden_layers": layers,
            "indexer_types": ["full"] * layers,
            "mlp_layer_types": ["dense"] * layers,
        }
        assert CONFIG["num_hidden_layers"] == 3
        folder = write_checkpoint(tmp_path / str(layers), **changes)
        model = GlmDsa(folder, torch.device("cpu"), "micro")
        with make(model, drafter="ngram", device_kv_mib=16, host_kv_mib=16) as engine:
            staging.append(engine.memory.usage().staging)
            for length in (10, 300):
                handle = engine.submit(b"x" * length, SamplingParams(max_new_tokens=2))
                engine.step()
                rings.append(engine.memory.usage().rings)
                handle.cancel()
    assert len(set(staging)) == 1 and staging[0] > 0
    assert len(set(rings)) == 1 and rings[0] > 0


@pytest.mark.parametrize("window", [2, 9, 33])
def test_ring_bytes_follow_the_window(micro: GlmDsa, window: int) -> None:
    layout = Layout(micro.geometry, "float32", RingShape(window - 1, 700))
    assert layout.ring is not None
    per_frame = layout.frame_bytes // (700 * 4)
    assert layout.ring.frames == -(-(window - 1) // per_frame)
    wide = Layout(micro.geometry, "float32", RingShape(window - 1, 3000)).ring
    assert wide is not None and wide.parts == 3 and wide.item.bytes <= layout.frame_bytes


def test_rings_survive_wraps_preemption_and_recycled_seats(
    micro: GlmDsa, plain: dict[SamplingParams, list[RequestOutput]]
) -> None:
    """The scripted drafter raises unless its window is the text before the anchor, exactly."""
    drafter = scripted(plain[GREEDY], tokens=4, window=6, wrong=4)
    with make(micro, drafter=drafter, max_concurrency=1, prefill_chunk=3) as engine:
        for _ in range(2):
            handles = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
            while not all(handle.done for handle in handles):
                engine.step()
                if engine.steps % 5 == 0 and engine.scheduler.running:
                    engine.residents.preempt(engine.scheduler.running[0], engine.steps)
            assert [h.result().tokens for h in handles] == [o.tokens for o in plain[GREEDY]]
        metrics = engine.metrics()
    assert metrics["preemptions"] > 8 and not metrics["speculation"]["drafter_failures"]
    assert metrics["ring_bytes"] > 0 and metrics["accepted_length"] > 1.5


def test_drafts_take_no_memory_from_anybody(micro: GlmDsa) -> None:
    """Room for proposed tokens is taken where it is free: no shortage, no preemption comes of it."""
    base = run(micro, device_kv_mib=0.24, max_concurrency=2, prefill_chunk=16)[1]
    metrics = run(micro, drafter="ngram", device_kv_mib=0.36, max_concurrency=2, prefill_chunk=16)[
        1
    ]
    assert (base["preemptions"], metrics["preemptions"]) == (0, 0)


# --- who decides, who watches ---------------------------------------------------------------------


class Capping:
    """Allows two draft tokens, and remembers what it saw."""

    def __init__(self, most: int = 2) -> None:
        self.most = most
        self.seen: list[Observation] = []

    def decide(self, observation: Observation) -> Plan:
        self.seen.append(observation)
        return replace(Plan.even(24), draft_tokens=self.most)


def test_a_controller_sees_acceptance_and_caps_the_draft(
    micro: GlmDsa, plain: dict[SamplingParams, list[RequestOutput]]
) -> None:
    controller, drafter = Capping(), scripted(plain[GREEDY], tokens=7, wrong=1000)
    found, metrics = run(micro, controller=controller, drafter=drafter, control_interval=2)
    assert found == plain[GREEDY]
    assert metrics["speculation"]["verified"][2:] == [0] * 5
    lengths = [o.accepted_length for o in controller.seen if o.cycles]
    assert lengths and all(length is not None and 1 <= length <= 3 for length in lengths)
    assert any(o.verify_rows > o.cycles and o.misses_per_verify_row > 0 for o in controller.seen)


def test_a_cap_narrows_what_is_weighed(
    micro: GlmDsa, plain: dict[SamplingParams, list[RequestOutput]]
) -> None:
    """K = 7 under a cap of 5: steps are booked as 5, and 3 and 0 are tried though 7 never runs."""
    values = {"clock": "wall", "verify_length": "scheduled", "controller": Capping(5)}
    drafter = scripted(plain[GREEDY], tokens=7)
    with make(micro, drafter=drafter, **values) as engine:
        booked = set()
        assert engine.speculator is not None and engine.speculator.schedule is not None
        schedule = engine.speculator.schedule
        timed = schedule.timed

        def note(requests: int, width: int, *rest: Any) -> None:
            booked.add(width)
            timed(requests, width, *rest)

        schedule.timed = note  # type: ignore[method-assign]
        assert engine.generate(PROMPTS, GREEDY) == plain[GREEDY]
    assert {5, 3, 0} <= booked and 7 not in booked


def test_a_recording_is_made_without_a_drafter(micro: GlmDsa, tmp_path: Path) -> None:
    with (
        make(micro, drafter="ngram") as engine,
        pytest.raises(UserError, match="without a drafter"),
    ):
        Recorder(engine, tmp_path / "a.npz")


@pytest.mark.parametrize("watch", [lambda e: Shadows(e, ["resident"]), WorkLog])
def test_who_follows_single_rows_refuses_a_drafter(
    micro: GlmDsa, watch: Callable[[Engine], Any]
) -> None:
    with make(micro, drafter="ngram") as engine:
        with pytest.raises(UserError, match=r"drafter = 'ngram': .* one row per request"):
            watch(engine)
        assert not engine.observers


class Tapping(Garbage):
    name, taps = "tapping", (0, 2)

    def context(self, taps: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.seen = taps.shape
        return taps[:, 0, :1]


def test_taps_are_the_layers_outputs(micro: GlmDsa) -> None:
    drafter = Tapping()
    run(micro, drafter=drafter)
    assert drafter.seen[1:] == (2, 32)
    with pytest.raises(UserError, match="reads layers, which this model does not show"):
        make(ToyModel(), drafter=Tapping())


@pytest.mark.parametrize(
    ("drafter", "changes", "part"),
    [
        ("ngramm", {}, "did you mean 'ngram'"),
        ("ngram", {"num_draft_tokens": 65}, "num_draft_tokens = 65"),
        (Garbage(), {"num_draft_tokens": 4}, "proposes up to 3"),
        (object(), {}, "should be a name or an object with propose"),
        ("dspark:/nowhere", {}, "is no folder"),
    ],
)
def test_drafters_that_cannot_be_had(
    micro: GlmDsa, drafter: Any, changes: dict[str, Any], part: str
) -> None:
    with pytest.raises(UserError, match=part):
        make(micro, drafter=drafter, **changes)
