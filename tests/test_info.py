"""`describe` against hand arithmetic, and the `info` command's output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvpolicy.cli.info import info_command
from kvpolicy.config import EngineConfig
from kvpolicy.errors import UserError
from kvpolicy.geometry.info import describe
from kvpolicy.geometry.presets import PRESETS, TOY, preset, preset_names
from kvpolicy.models.checkpoint import checkpoint_folder

GIB = 1 << 30
MIB = 1 << 20


def run(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(info_command)
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80"})
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


# --- describe -------------------------------------------------------------------------------------


def test_glm_5_3_request_by_hand() -> None:
    report = describe(preset("glm-5.3"), 100_000, "fp8")
    one = report.per_request
    assert report.index_dtype == "fp8"
    assert one.hot_rows == 2 * 2048 * 656 * 78
    assert one.index_keys == 100_000 * 21 * 132
    assert one.slot_maps == 100_000 * 21 * 4
    assert one.pinned == 0
    assert one.resident == one.host == 5_394_000_000
    assert one.hot == one.hot_rows + one.index_keys + one.slot_maps
    assert report.fetch_bytes_per_token == 2048 * 656 * 78
    assert report.fit is None


def test_toy_request_by_hand() -> None:
    one = describe(TOY, 101, "float32").per_request
    assert one.hot_rows == 8 * 24 + 8 * 48
    assert one.index_keys == 50 * 16 + 101 * 16
    assert one.slot_maps == 4 * (50 + 101)
    assert one.pinned == 8 * 6 * 24
    assert one.resident == 50 * 24 + 101 * 48 + one.index_keys + one.pinned


def test_hot_buffer_holds_no_more_than_the_context() -> None:
    one = describe(TOY, 3, "float32").per_request
    assert one.hot_rows == 1 * 24 + 3 * 48


def test_hot_buffer_size_can_be_set() -> None:
    assert describe(TOY, 101, "float32", hot_rows_per_layer=5).per_request.hot_rows == 5 * (24 + 48)


def test_more_requests_fit_with_hot_buffers_than_resident() -> None:
    report = describe(preset("glm-5.3"), 100_000, "fp8", None, 80 * GIB, 1000 * GIB)
    fit = report.fit
    assert fit is not None
    assert fit.resident == 80 * GIB // 5_394_000_000
    assert fit.hot_device == 80 * GIB // report.per_request.hot
    assert fit.hot_host == 1000 * GIB // 5_394_000_000
    assert (fit.hot, fit.binding) == (fit.hot_device, "device")


@pytest.mark.parametrize(
    ("device", "host", "binding"),
    [
        (80, None, "device"),
        (None, 80, "host"),
        (80, 100, "host"),
        (80, 10_000, "device"),
        (1 / 1024, 1 / 1024, "device and host"),
    ],
)
def test_binding_tier(device: float | None, host: float | None, binding: str) -> None:
    sizes = [None if x is None else int(x * GIB) for x in (device, host)]
    fit = describe(preset("glm-5.3"), 100_000, "fp8", None, *sizes).fit
    assert fit is not None
    assert fit.binding == binding


def test_default_context_is_what_the_model_allows() -> None:
    assert describe(preset("tiny-dsa")).context == 32768
    assert describe(preset("glm-5.3")).context == 100_000


@pytest.mark.parametrize("context", [0, -5, 32769])
def test_context_out_of_range(context: int) -> None:
    with pytest.raises(UserError, match=f"context is {context}: tiny-dsa allows 1 to 32768"):
        describe(preset("tiny-dsa"), context)


def test_bad_numbers_name_the_field() -> None:
    for field in ("device_kv_bytes", "host_kv_bytes", "hot_rows_per_layer"):
        with pytest.raises(UserError, match=f"{field} is 0: needs an integer >= 1"):
            describe(TOY, **{field: 0})  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"unknown kv_dtype 'mxfp8' .*allowed: float32, bf16, fp8"):
        describe(preset("glm-5.3"), kv_dtype="mxfp8")


@settings(deadline=None)
@given(
    st.sampled_from(sorted(PRESETS)),
    st.integers(1, 512),
    st.integers(1, 10**9),
    st.integers(1, 10**9),
)
def test_what_fits_fits_and_one_more_does_not(
    name: str, context: int, device: int, host: int
) -> None:
    report = describe(PRESETS[name], context, "bf16", None, device, host)
    one, fit = report.per_request, report.fit
    assert fit is not None
    assert fit.hot * one.hot <= device
    assert fit.hot * one.host <= host
    more = fit.hot + 1
    over = {"device": more * one.hot > device, "host": more * one.host > host}
    assert all(over[tier] for tier in fit.binding.split(" and "))
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()


# --- the command ----------------------------------------------------------------------------------


def test_json_of_the_default_model() -> None:
    result = json.loads(run("--json"))
    assert result["geometry"]["name"] == "tiny-dsa"
    assert result["context"] == 32768
    assert (result["kv_dtype"], result["index_dtype"]) == ("float32", "float32")
    assert result["bytes_per_token"] == {"rows": 2560, "index": 512, "pinned": 0, "total": 3072}
    assert result["bytes_at_context"]["total"] == 3072 * 32768
    assert result["fit"] is None


def test_a_model_that_runs_is_shown_as_engines_keep_it() -> None:
    """By its name or by its folder; a geometry without weights in bf16."""
    kept = EngineConfig().kv_dtype
    for model, dtype in (
        ("tiny-dsa", kept),
        (str(checkpoint_folder("tiny-dsa")), kept),
        (str(checkpoint_folder("tiny-dsa") / "config.json"), "bf16"),
        ("glm-5.3", "bf16"),
    ):
        assert json.loads(run("--model", model, "--json"))["kv_dtype"] == dtype
        assert f"({dtype} rows" in run("--model", model)


def test_json_with_memory() -> None:
    arguments = ["--model", "glm-5.3", "--kv-dtype", "fp8", "--context", "50000"]
    result = json.loads(run(*arguments, "--device-kv-mib", "81920", "--host-kv-mib", "1", "--json"))
    assert result["device_kv_bytes"] == 81920 * MIB
    assert result["fit"]["hot_host"] == result["fit"]["hot"] == 0
    assert result["fit"]["binding"] == "host"
    assert result["fit"]["resident"] == 81920 * MIB // (53940 * 50000)


def test_layers_takes_a_slice() -> None:
    result = json.loads(run("--model", "glm-5.3", "--layers", "6", "--json"))
    assert result["geometry"]["name"] == "glm-5.3[:6]"
    assert result["bytes_per_token"]["total"] == 6 * 1152 + 3 * 256


def test_output_writes_the_same_json(tmp_path: Path) -> None:
    path = tmp_path / "info.json"
    text = run("--json", "--output", str(path))
    assert json.loads(path.read_text()) == json.loads(text)
    assert "KV of one request" in run("--output", str(path))


def test_output_that_can_not_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--output '.*': folder .* does not exist"):
        run("--output", str(tmp_path / "no" / "info.json"))


@pytest.mark.parametrize("name", [*preset_names(), "toy-shared"])
def test_tables_read_whole_at_80_columns(name: str) -> None:
    limits = ["--device-kv-mib", "81920", "--host-kv-mib", "1000000"]
    text = run("--model", name, *limits)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text, "a cell was cut"
    for heading in ("Row stores", "Selectors", "KV of one request", "Device memory of one"):
        assert heading in text
    assert "memory binds)" in text
    assert ("Pinned rows" in text) == bool(PRESETS[name].pinned)


def test_tables_state_the_numbers() -> None:
    text = run("--model", "glm-5.3", "--kv-dtype", "fp8")
    for number in ("53,940.0", "2,772.0", "5.024 GiB", "99.938 MiB", "19 x", "Add --device-kv-mib"):
        assert number in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "glm5.3"], "did you mean 'glm-5.3'"),
        (["--kv-dtype", "int8"], "unknown kv_dtype 'int8'"),
        (["--index-dtype", "fp4"], "unknown index_dtype 'fp4'"),
        (["--context", "0"], "context is 0"),
        (["--layers", "9"], "layers is 9: tiny-dsa allows 1 to 8"),
        (["--device-kv-mib", "0"], "--device-kv-mib is 0: needs an integer >= 1"),
        (["--host-kv-mib", "-1"], "--host-kv-mib is -1"),
    ],
)
def test_bad_arguments_raise_user_errors(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        run(*arguments)
    assert "\n" not in str(error.value)


def test_markup_in_a_folder_name_is_shown_as_it_is(tmp_path: Path) -> None:
    config: dict[str, Any] = {"model_type": "glm_moe_dsa", "index_topk": 8, "index_n_heads": 2}
    config |= {"num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 8, "num_attention_heads": 2}
    config |= {"max_position_embeddings": 64, "kv_lora_rank": 4, "qk_rope_head_dim": 2}
    config |= {"index_head_dim": 4}
    folder = tmp_path / "my[red]model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    assert "my[red]model: 2 layers" in run("--model", str(folder))
