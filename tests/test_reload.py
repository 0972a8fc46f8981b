"""Swap by config: what may change while an engine runs, and that it changes no bit of the output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from micro import micro_model
from mix import PARAMS, PROMPTS

from kvpolicy import CacheRule, Engine, EngineConfig, Observation, Plan, UserError
from kvpolicy.controllers import files
from kvpolicy.engine.reload import RUN_TIME, changes, read
from kvpolicy.models.loader import DecodeModel

BASE: dict[str, Any] = {
    "device": "cpu",
    "device_kv_mib": 2,
    "host_kv_mib": 4,
    "controller": "static:device_buffer_rows=20",
    "clock": "steps",  # without a deadline, so that a busy machine changes no decision
    "validate": True,
}


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> DecodeModel:
    return micro_model(Path(tmp_path_factory.mktemp("micro")))


def config(**values: Any) -> EngineConfig:
    return EngineConfig(**{**BASE, **values})


# --- the pure function ----------------------------------------------------------------------------


def test_equal_configs_change_nothing() -> None:
    assert changes(config(), config()).names == ()


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"controller": "resident"}, ("controller",)),
        ({"controller": "static:device_buffer_rows=21"}, ("controller",)),
        ({"control_interval": 3}, ("control_interval",)),
        ({"eviction": "fifo"}, ("eviction",)),
        ({"admission": "accepted"}, ("admission",)),
        ({"eviction": "fifo", "controller": "resident"}, ("controller", "eviction")),
    ],
)
def test_what_may_change(values: dict[str, Any], names: tuple[str, ...]) -> None:
    found = changes(config(), config(**values))
    assert found.names == names
    new = config(**values)
    assert [getattr(found, name) for name in RUN_TIME] == [getattr(new, name) for name in RUN_TIME]


FIXED = [name for name in EngineConfig.model_fields if name not in RUN_TIME]


@pytest.mark.parametrize("name", FIXED)
def test_what_may_not(name: str) -> None:
    """Every other field there is, whatever its type."""
    new = config(controller="resident").model_copy(update={name: "another"})
    message = f"^{name.rstrip('_')} = 'another': cannot change while the engine runs"
    with pytest.raises(UserError, match=message):
        changes(config(), new)


def test_a_file_is_made_again_even_under_the_same_spec() -> None:
    same = config(controller="./mine.py:Lazy")
    assert changes(same, same).names == ("controller",)


def test_objects_are_compared_by_identity() -> None:
    first, second = (type("Own", (), {"decide": lambda self, o: Plan()})() for _ in range(2))
    assert changes(config(controller=first), config(controller=first)).names == ()
    assert changes(config(controller=first), config(controller=second)).names == ("controller",)


# --- files ----------------------------------------------------------------------------------------


def test_what_a_file_does_not_name_stays(tmp_path: Path) -> None:
    old = config(eviction="lru", control_interval=5)
    (tmp_path / "a.yaml").write_text("control-interval: 3\neviction: null\n")
    new = read(tmp_path / "a.yaml", old)
    assert (new.controller, new.control_interval, new.eviction) == (old.controller, 3, None)
    assert changes(old, new).names == ("eviction", "control_interval")


@pytest.mark.parametrize("text", ["", "# controller: static\n"])
def test_a_file_that_names_nothing_is_said_to(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    old, path = config(eviction="lru"), tmp_path / "empty.yaml"
    path.write_text(text)
    assert read(path, old) == old
    assert [r.getMessage() for r in caplog.records] == [
        f"config {str(path)!r} names no settings: nothing changes"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("temperature: 1", "temperature belongs to each request"),
        ("controler: static", "did you mean 'controller'"),
        ("controller: 3", "controller = 3: should be a spec"),
        ("eviction: mru", "eviction = 'mru'"),
        ("prefill_chunk: 3", "prefill_chunk = 3: cannot change"),
        ("control_interval: 0", "control_interval = 0"),
        ("controller: statik", "did you mean 'static'"),
        ("[", "not valid YAML"),
        (None, "No such file"),
    ],
)
def test_a_bad_file_changes_nothing(
    micro: DecodeModel, tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "a.yaml"
    if text is not None:
        path.write_text(f"{text}\n")
    with Engine(config(), model=micro) as engine:
        before = engine.config, engine.control.controller, engine.control.interval
        with pytest.raises(UserError, match=message):
            engine.reload(path)
        assert before == (engine.config, engine.control.controller, engine.control.interval)


# --- on a running engine --------------------------------------------------------------------------


class Own:
    """Keeps its state across reloads that are about something else."""

    cache_rule = CacheRule(eviction="lru")

    def decide(self, observation: Observation) -> Plan:
        return Plan.even(18)


def test_reload_in_the_middle_of_decoding(
    micro: DecodeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names, intervals, evictions and an edited file: each takes effect, none changes a bit."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "_loaded", {})
    source = "from kvpolicy import Plan\ndef mine(observation):\n    return Plan.even(17)\n"
    Path("mine.py").write_text(source)
    path = tmp_path / "engine.yaml"
    with Engine(config(), model=micro) as engine:
        want = [o.logits_sha256 for o in engine.generate(PROMPTS, PARAMS)]
    with Engine(config(), model=micro) as engine:
        handles = [engine.submit(p, s) for p, s in zip(PROMPTS, PARAMS, strict=True)]

        def rows() -> int:
            """Hot rows of the requests with more than that many entries, after one more step."""
            engine.step()
            running = engine.memory.requests.values()
            return max(cache.capacity for request in running for cache in request.hot)

        assert rows() == 20
        for text, expected in (
            ("controller: static:device_buffer_rows=19\ncontrol_interval: 2", 19),
            ("eviction: fifo", 19),
            ("controller: ./mine.py:mine", 17),
        ):
            path.write_text(text)
            engine.reload(path)
            assert rows() == expected
        assert (engine.control.interval, engine.control.rule.eviction) == (2, "fifo")
        Path("mine.py").write_text(source.replace("17", "16"))
        assert engine.reload(path).names == ("controller",)
        assert rows() == 16
        own = Own()
        engine.reload(engine.config.model_copy(update={"controller": own, "eviction": None}))
        assert rows() == 18 and engine.control.rule.eviction == "lru"
        engine.reload(engine.config.model_copy(update={"eviction": "random"}))
        assert engine.control.controller is own and engine.control.rule.eviction == "random"
        assert [h.result().logits_sha256 for h in handles] == want
        assert engine.record()["config"]["controller"].endswith("test_reload.Own")


def test_the_config_follows_set_controller(micro: DecodeModel) -> None:
    """So that a reload compares with what really runs."""
    with Engine(config(), model=micro) as engine:
        engine.set_controller("resident")
        assert engine.config.controller == "resident"
        assert engine.reload(config()).names == ("controller",)
        assert engine.config == config()
        assert engine.reload(config()).names == ()


def test_admission_is_swapped_and_given_back(micro: DecodeModel) -> None:
    """Other swaps leave it; None leaves it to the controller again."""
    with Engine(config(), model=micro) as engine:
        assert engine.reload(config(admission="accepted")).names == ("admission",)
        assert engine.memory.rule.admission == "accepted"
        engine.set_controller("resident")
        assert engine.memory.rule.admission == "accepted"
        engine.reload(config())
        assert engine.memory.rule.admission == "all"


def test_a_function_in_a_config(micro: DecodeModel) -> None:
    """And one that is set later; both are named in the record."""

    def lazy(observation: Observation) -> Plan:
        return Plan.even(21)

    with Engine(config(controller=lazy), model=micro) as engine:
        engine.generate([b"abc"])
        assert engine.metrics()["controller_fallbacks"] == 0
        assert engine.control.log[-1].plan == Plan.even(21)
        assert engine.record()["config"]["controller"].endswith("lazy")
        engine.set_controller(lambda observation: Plan.even(22))
        engine.generate([b"abc"])
        assert engine.control.log[-1].plan == Plan.even(22)
