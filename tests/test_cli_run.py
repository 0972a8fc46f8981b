"""`kvpolicy run` on the embedded model."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from kvpolicy.cli import run
from kvpolicy.cli.main import app

# Names of the documentation; more may follow.
METRICS = {
    "selected_rows",
    "unique_rows",
    "fetched_rows",
    "miss_rate",
    "host_to_device_bytes",
    "device_kv_bytes_peak",
    "required_bytes",
    "optional_bytes_mean",
    "staging_bytes",
    "ring_bytes",
    "release_steps",
    "request_waves",
    "steps",
    "generated_tokens",
    "tokens_per_s",
    "goodput_tokens_per_s",
    "tpot_ms",
    "ttft_ms",
    "accepted_length",
    "controller_decisions",
    "controller_projections",
    "controller_fallbacks",
    "preemptions",
}

SHORT = ("--max-new-tokens", "4")


def invoke(*arguments: str, input: bytes | None = None) -> Result:
    return CliRunner().invoke(app, ["run", *arguments], input=input)


def run_json(*arguments: str, input: bytes | None = None) -> dict[str, Any]:
    result = invoke(*arguments, "--json", input=input)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    document = json.loads(result.stdout)
    assert isinstance(document, dict)
    return document


# --- results --------------------------------------------------------------------------------------


def test_json(tmp_path: Path) -> None:
    raw = tmp_path / "prompt"
    raw.write_bytes(b"\xff\x00\r\n" * 3)
    found = run_json("import os\n", "é", "--prompt-file", str(raw), *SHORT, "--fingerprint")
    assert list(found) == ["requests", "metrics", "record"]
    assert [r["prompt_tokens"] for r in found["requests"]] == [10, 2, 12]
    assert [r["id"] for r in found["requests"]] == [0, 1, 2]
    for request in found["requests"]:
        assert 1 <= len(request["tokens"]) <= 4
        assert request["finish_reason"] in ("stop", "length")
        assert re.fullmatch("[0-9a-f]{64}", request["logits_sha256"])
    assert set(found["metrics"]) >= METRICS
    assert set(found["metrics"]["tpot_ms"]) == set(found["metrics"]["ttft_ms"]) == {"p50", "p99"}
    assert found["record"]["config"]["model"] == "tiny-dsa"


def test_fingerprints_only_when_asked_for() -> None:
    (request,) = run_json("x", *SHORT)["requests"]
    assert list(request) == ["id", "prompt_tokens", "tokens", "text", "finish_reason"]


def test_text_has_a_header_the_text_and_the_metrics() -> None:
    (request,) = run_json("def main():\n", *SHORT)["requests"]
    result = invoke("def main():\n", *SHORT, "--fingerprint")
    assert (result.exit_code, result.stderr) == (0, "")
    header, digest, rest = result.stdout.split("\n", 2)
    generated = len(request["tokens"])
    reason = request["finish_reason"]
    assert header == f"== request 0: 12 prompt tokens, {generated} generated, {reason}"
    assert re.fullmatch("   logits sha256 [0-9a-f]{64}", digest)
    assert rest.startswith(request["text"] + "\n\nsteps ")
    assert "miss rate" in rest


def test_standard_input_is_raw_bytes() -> None:
    (request,) = run_json("-", *SHORT, input=b"\xff\x00\r\n")["requests"]
    assert request["prompt_tokens"] == 4


def test_bos_counts_and_makes_an_empty_prompt_possible() -> None:
    requests = run_json("", "abc", "--bos", *SHORT)["requests"]
    assert [request["prompt_tokens"] for request in requests] == [1, 4]


def test_output_file_beside_text_and_json(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    result = invoke("x", *SHORT, "--output", str(target))
    assert result.exit_code == 0 and result.stdout.startswith("== request 0")
    found = run_json("x", *SHORT, "--output", str(tmp_path / "again.json"))
    assert json.loads(target.read_text())["requests"] == found["requests"]
    assert json.loads((tmp_path / "again.json").read_text()) == found


def test_settings_reach_the_engine() -> None:
    found = run_json(
        *("x", "--controller", "static:device_buffer_rows=130", "--eviction", "lru", "--validate"),
        *("--set", "prefill_chunk=7", "--set", "max_new_tokens=3", "--seed", "5"),
    )
    config = found["record"]["config"]
    assert config["controller"] == "static:device_buffer_rows=130"
    assert (config["eviction"], config["prefill_chunk"], config["validate"]) == ("lru", 7, True)
    assert found["metrics"]["generated_tokens"] <= 3


def test_a_failed_request_ends_with_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = run.decode

    def failing(*arguments: Any, **named: Any) -> run.Decoded:
        result = decode(*arguments, **named)
        return replace(result, outputs=[replace(result.outputs[0], finish_reason="error")])

    monkeypatch.setattr(run, "decode", failing)
    result = invoke("x", *SHORT)
    assert result.exit_code == 1
    assert result.stdout.startswith("== request 0")
    assert result.stderr == "kvpolicy: error: requests that failed: 0\n"


# --- mistakes that the engine finds ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--model", "tiny-dsb"], "tiny-dsb"),
        (["--model", "."], "config.json"),
        (["--controller", "residnet"], "(did you mean 'resident'?)"),
        (["--controller", "hisparse:rows=3"], "'rows'"),
        (["--controller", "hisparse:device_buffer_rows"], "must be key=value"),
        (["--controller", "hisparse:device_buffer_rows=few"], "device_buffer_rows"),
        (["--controller", ""], "controller"),
        (["--max-new-tokens", "40000"], "context"),
        (["--device-kv-mib", "0.001"], "device memory"),
        (["--host-kv-mib", "0.001"], "host memory"),
    ],
)
def test_engine_errors_are_one_line(arguments: list[str], part: str) -> None:
    result = invoke("x", *arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("kvpolicy: error: ") and result.stderr.count("\n") == 1
    assert part in result.stderr


def test_cuda_is_refused_where_there_is_none() -> None:
    result = invoke("x", *SHORT, "--device", "cuda")
    if torch.cuda.is_available():
        assert result.exit_code == 0
    else:
        assert result.exit_code == 2 and result.stderr.count("\n") == 1
        assert "cuda" in result.stderr.lower()


# --- processes ------------------------------------------------------------------------------------

# Says when decoding is under way. A shell may have started the tests with SIGINT ignored.
STEPPING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from kvpolicy.engine.engine import Engine
step, close = Engine.step, Engine.close
def loud_step(self):
    more = step(self)
    if self.steps == 3:
        print("stepping", flush=True)
    return more
def loud_close(self):
    close(self)
    print("closed", flush=True)
Engine.step, Engine.close = loud_step, loud_close
from kvpolicy.cli.main import main
main()
"""
LONG = ("run", "x", "--max-new-tokens", "20000", "--temperature", "1")


def test_interrupt_is_clean() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STEPPING, *LONG],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "stepping\n"
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, "closed\n")
    assert stderr == "kvpolicy: interrupted\n"


def test_interrupt_closes_the_progress_display() -> None:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", STEPPING, *LONG],
        stdout=subprocess.DEVNULL,
        stderr=slave,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(slave)
    shown = read_until(master, b"1 running, 0 waiting, 0 finished")
    assert b"run: decode" in shown
    process.send_signal(signal.SIGINT)
    shown += read_until(master, None)
    assert process.wait(timeout=60) == 130
    os.close(master)
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")  # the cursor is back
    assert shown.rstrip().endswith(b"kvpolicy: interrupted")
    assert b"Traceback" not in shown


def read_until(master: int, mark: bytes | None) -> bytes:
    """What a terminal shows until it shows `mark`, or until the other side is closed."""
    shown = b""
    while mark is None or mark not in shown:
        try:
            piece = os.read(master, 4096)
        except OSError:  # Linux reports a closed terminal so
            piece = b""
        if not piece:
            assert mark is None, shown
            break
        shown += piece
    return shown


def test_text_that_stdout_cannot_encode_is_replaced() -> None:
    code = (
        "from kvpolicy.cli.output import write_text; from kvpolicy.cli import main as cli\n"
        "cli._plugins = lambda: ()\n"
        "cli._tolerant_output(); write_text('a\\ufffdb\\n')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, b"a?b\n", b"")


def test_decisions_of_the_fallback_are_not_passed_off(tmp_path: Path) -> None:
    """A controller that fails: the table says how many decisions were another's."""
    path = tmp_path / "broken.py"
    path.write_text("def broken(observation):\n    raise RuntimeError('no idea')\n")
    arguments = ("x = 1\n", "--controller", f"{path}:broken", "--max-new-tokens", "4")
    failed, plain = invoke(*arguments), invoke("x = 1\n", "--max-new-tokens", "4")
    assert failed.exit_code == plain.exit_code == 0
    assert "decisions were made by adaptive in its place" in failed.stdout
    assert "in its place" not in plain.stdout
    compared = CliRunner().invoke(app, ["compare", *arguments])
    assert f"{path}:broken: " in compared.stdout and "in its place" in compared.stdout
