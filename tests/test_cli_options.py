"""Settings and prompts: where they come from, and one clear line for every mistake."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvpolicy.cli.main import app
from kvpolicy.cli.options import SETTINGS, Options
from kvpolicy.cli.prompts import read_prompts
from kvpolicy.cli.settings import resolve
from kvpolicy.config import EngineConfig, SamplingParams
from kvpolicy.errors import UserError
from kvpolicy.telemetry.slo import Slo


def invoke_error(*arguments: str, input: bytes | None = None) -> str:
    """The one line that a wrong call of `run` answers; stdout stays empty."""
    result = CliRunner().invoke(app, ["run", *arguments], input=input)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("kvpolicy: error: ") and result.stderr.count("\n") == 1
    return result.stderr.removeprefix("kvpolicy: error: ").rstrip("\n")


def config_file(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    return path


# --- sources --------------------------------------------------------------------------------------


def test_nothing_given_is_the_defaults() -> None:
    settings = resolve(Options())
    assert (settings.engine, settings.sampling) == (EngineConfig(), SamplingParams())
    assert settings.controllers == ()


def test_every_setting_has_an_option() -> None:
    assert not [key for key in SETTINGS if not hasattr(Options(), key)]


def test_later_sources_win(tmp_path: Path) -> None:
    path = config_file(
        tmp_path,
        "device_kv_mib: 10\nhost-kv-mib: 20\nseed: 1\nmax_new_tokens: 3\nvalidate: true\n",
    )
    options = Options(config=path, overrides=["seed=2", "max-new-tokens=4"], max_new_tokens=5)
    settings = resolve(options)
    assert settings.engine == EngineConfig(device_kv_mib=10, host_kv_mib=20, validate=True)
    assert settings.sampling == SamplingParams(seed=2, max_new_tokens=5)
    assert not resolve(replace(options, validate=False)).engine.validate_


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("temperature=0.5", "temperature", 0.5),
        ("temperature=1e-3", "temperature", 0.001),
        ("stop=END", "stop", ("END",)),
        ("stop=[a, b]", "stop", ("a", "b")),
        ("eviction=lru", "eviction", "lru"),
        ("eviction=null", "eviction", None),
        ("bos=yes", "bos", True),
        ("controller=static:device_buffer_rows=7", "controller", "static:device_buffer_rows=7"),
    ],
)
def test_set_is_typed_by_yaml(text: str, key: str, value: Any) -> None:
    settings = resolve(Options(overrides=[text]))
    assert {**dict(settings.engine), **dict(settings.sampling)}[key] == value


def test_controllers_come_from_any_source(tmp_path: Path) -> None:
    path = config_file(tmp_path, "controller: resident")
    assert resolve(Options(config=path)).controllers == ("resident",)
    both = resolve(Options(config=path, controller=["static", "hisparse"]))
    assert both.controllers == ("static", "hisparse")
    assert both.engine.controller == "static"


def test_zero_and_false_are_given(tmp_path: Path) -> None:
    path = config_file(tmp_path, "seed: 4\ntemperature: 1\nbos: true")
    settings = resolve(Options(config=path, seed=0, temperature=0.0, bos=False))
    assert settings.sampling == SamplingParams()
    assert not settings.engine.bos


def test_empty_config(tmp_path: Path) -> None:
    assert resolve(Options(config=config_file(tmp_path, "# nothing\n"))).engine == EngineConfig()


# --- mistakes in settings -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("device_kv_mb: 3", "unknown option 'device_kv_mb' (did you mean 'device_kv_mib'?)"),
        ("sampling: {seed: 3}", "unknown option 'sampling'"),
        ("seed: 1\nseed: 2", "'seed' is given twice"),
        ("top_k: 1\ntop-k: 2", "'top_k' is given twice"),
        ("[1, 2]", "must be a mapping"),
        ("1: 2", "must be a mapping"),
        ("seed: [", "not valid YAML"),
        ("seed: soon", "seed = 'soon'"),
        ("device_kv_mib: -1", "device_kv_mib = -1"),
        ("device_kv_mib: .nan", "device_kv_mib = nan"),
        ("max_new_tokens: 0", "max_new_tokens = 0"),
        ("temperature: .inf", "temperature = inf"),
        ("controller: 3", "controller = 3"),
        ("controller: [resident]", "controller = ['resident']"),
    ],
)
def test_bad_config(tmp_path: Path, text: str, part: str) -> None:
    assert part in invoke_error("x", "--config", str(config_file(tmp_path, text)))


def test_unreadable_config(tmp_path: Path) -> None:
    assert "No such file" in invoke_error("x", "--config", str(tmp_path / "none.yaml"))
    assert "directory" in invoke_error("x", "--config", str(tmp_path)).lower()
    (tmp_path / "latin").write_bytes(b"stop: \xe9")
    assert "not UTF-8 text" in invoke_error("x", "--config", str(tmp_path / "latin"))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--set", "seed"], "must be KEY=VALUE"),
        (["--set", "=3"], "must be KEY=VALUE"),
        (["--set", "sede=3"], "(did you mean 'seed'?)"),
        (["--set", "seed=["], "not valid YAML"),
        (["--set", "seed=-1"], "seed = -1"),
        (["--set", "json=true"], "unknown option 'json'"),
        (["--device", "tpu"], "device = 'tpu'"),
        (["--backend", "fast"], "backend = 'fast'"),
        (["--eviction", "mru"], "eviction = 'mru'"),
        (["--admission", "none"], "admission = 'none'"),
        (["--dtype", "float64"], "dtype = 'float64'"),
        (["--kv-dtype", "int4"], "kv_dtype = 'int4'"),
        (["--device-kv-mib", "0"], "device_kv_mib = 0"),
        (["--host-kv-mib", "nan"], "host_kv_mib = nan"),
        (["--max-concurrency", "0"], "max_concurrency = 0"),
        (["--prefill-chunk", "0"], "prefill_chunk = 0"),
        (["--control-interval", "0"], "control_interval = 0"),
        (["--staging-rows", "0"], "staging_rows = 0"),
        (["--floor-rows", "-1"], "floor_rows = -1"),
        (["--temperature", "-1"], "temperature = -1"),
        (["--top-k", "-1"], "top_k = -1"),
        (["--top-p", "0"], "top_p = 0"),
        (["--top-p", "1.5"], "top_p = 1.5"),
        (["--seed", "-1"], "seed = -1"),
        (["--max-new-tokens", "0"], "max_new_tokens = 0"),
        (["--controller", "resident", "--controller", "static"], "run takes one --controller"),
        (["--output", "no/such/folder/x.json"], "folder 'no/such/folder' does not exist"),
        (["--output", "."], "is a directory"),
    ],
)
def test_bad_option(arguments: list[str], part: str) -> None:
    assert part in invoke_error("x", *arguments)


# --- load -----------------------------------------------------------------------------------------


def test_general_options_fill_in_a_workload() -> None:
    options = Options(workload="synthetic:step?low=2&high=40", seed=5, max_new_tokens=7)
    settings = resolve(replace(options, clock="steps"))
    assert settings.workload is not None
    first = next(settings.workload.requests())
    assert (first.seed, first.max_new_tokens) == (5, 7)
    assert settings.workload.end == pytest.approx(0.9)  # three phases of 300 steps
    assert settings.engine.max_concurrency == 40  # a seat for everything that is kept in the system
    assert resolve(replace(options, max_concurrency=3)).engine.max_concurrency == 3
    own = resolve(replace(options, workload="synthetic:step?seed=6&output_tokens=8")).workload
    assert own is not None
    first = next(own.requests())
    assert (first.seed, first.max_new_tokens) == (6, 8)


def test_bounds_are_in_milliseconds() -> None:
    settings = resolve(Options(slo="ttft_ms=200,tpot_ms=50", tpot_bound_ms=40))
    assert (settings.slo, settings.tpot_bound) == (Slo(tpot=0.05, ttft=0.2), 0.04)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--slo", "tpot=50"], "unknown bound 'tpot' (did you mean 'tpot_ms'?)"),
        (["--slo", "tpot_ms"], "must be tpot_ms=X, ttft_ms=Y, or both"),
        (["--slo", ""], "must be tpot_ms=X"),
        (["--slo", "tpot_ms=0"], "tpot_ms = '0': must be a number above 0"),
        (["--slo", "tpot_ms=nan"], "must be a number above 0"),
        (["--slo", "tpot_ms=fast"], "must be a number above 0"),
        (["--slo", "tpot_ms=1,tpot_ms=2"], "tpot_ms is given twice"),
        (["--tpot-bound-ms", "0"], "--tpot-bound-ms 0: must be a number above 0"),
        (["--tpot-bound-ms", "nan"], "--tpot-bound-ms nan"),
        (["--tpot-bound-ms", "50"], "--tpot-bound-ms goes with 'kvpolicy compare'"),
        (["--workload", "synthetic:step"], "give prompts or --workload, not both"),
        (["--workload", "synthetic:stpe"], "(did you mean 'step'?)"),
        (["--workload", "step"], "must be synthetic:NAME"),
        (["--logdir", "/dev/null/x"], "--logdir '/dev/null/x': Not a directory"),
    ],
)
def test_bad_load_option(arguments: list[str], part: str) -> None:
    assert part in invoke_error("x", *arguments)


# --- what comes later -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", "tiny-csa"],
    ],
)
def test_later_options_say_so(arguments: list[str]) -> None:
    line = invoke_error("x", *arguments)
    assert "is not available yet in version" in line and line.endswith("(see docs/claims.md)")


def test_later_options_accept_their_default() -> None:
    options = Options(shadow=[])
    assert resolve(options) == resolve(Options())


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--drafter", "ngramm"], "(did you mean 'ngram'?)"),
        (["--verification", "blok"], "verification = 'blok'"),
        (["--num-draft-tokens", "4"], "--num-draft-tokens goes with a --drafter"),
        (["--drafter", "ngram", "--num-draft-tokens", "0"], "num_draft_tokens = 0"),
        (["--drafter", "ngram", "--drafter", "none"], "run takes one --drafter"),
        (["--drafter", "ngram", "--shadow", "resident"], "not with a --drafter"),
    ],
)
def test_bad_drafter_options(arguments: list[str], part: str) -> None:
    assert part in invoke_error("x", *arguments)


# --- prompts --------------------------------------------------------------------------------------


def test_prompts_in_order_and_raw(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(b"\xff\x00\r\n")
    second.write_bytes(b"b")
    assert read_prompts(["é", "x"], [second, first], bos=False) == [
        "é".encode(),
        b"x",
        b"b",
        b"\xff\x00\r\n",
    ]


def test_empty_prompts_need_bos(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert read_prompts([""], [tmp_path / "empty"], bos=True) == [b"", b""]
    assert invoke_error("") == "prompt 1 is empty (allowed only with --bos)"
    assert "'" + str(tmp_path / "empty") + "' is empty" in invoke_error(
        "--prompt-file", str(tmp_path / "empty")
    )


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "no prompt"),
        (["-", "-"], "only once"),
        (["-"], "prompt 1 is empty"),
        (["--prompt-file", "no-such-file"], "prompt file 'no-such-file': No such file"),
        (["--prompt-file", "."], "prompt file '.': Is a directory"),
        (["--prompt-file", ""], "prompt file '.'"),
        (["good", "\udcff"], "prompt 2 is not UTF-8"),
    ],
)
def test_bad_prompts(arguments: list[str], part: str) -> None:
    assert part in invoke_error(*arguments, input=b"")


def test_unreadable_prompt_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "secret").write_text("x")
    monkeypatch.setattr(Path, "open", refuse)
    assert "Permission denied" in invoke_error("--prompt-file", str(tmp_path / "secret"))


def test_endless_files_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpolicy.cli.prompts.MAX_PROMPT_BYTES", 1000)
    assert "has more than 1000 bytes" in invoke_error("--prompt-file", "/dev/zero")


def test_closed_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match="standard input is closed"):
        read_prompts(["-"], [], bos=False)


def test_a_stop_text_must_be_utf8() -> None:
    assert "stop" in invoke_error("x", "--stop", "\udcff")
