"""`kvpolicy load`: drive a server with a workload, and report it as `kvpolicy compare` does."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from kvpolicy.cli import interrupts
from kvpolicy.cli.options import takes
from kvpolicy.cli.output import (
    SUMMARY,
    aligned,
    check_output,
    emit_json,
    finite,
    warn,
    write_text,
)
from kvpolicy.cli.phases import goodput_line, legend, phase_table
from kvpolicy.cli.progress import load_progress
from kvpolicy.config import SamplingParams
from kvpolicy.errors import UserError
from kvpolicy.telemetry.slo import Slo, parse_slo

if TYPE_CHECKING:
    from kvpolicy.engine.engine import Engine
    from kvpolicy.serving.remote import RemoteEngine
    from kvpolicy.workloads.runner import RunResult
    from kvpolicy.workloads.workload import Workload

__all__ = ["LoadOptions", "load_command"]

COUNTERS = (
    *("selected_rows", "unique_rows", "fetched_rows", "host_to_device_bytes"),
    *("generated_tokens", "decode_steps", "preemptions"),
)
"""Metrics that are differences of the server's samples."""


def _option(flag: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(flag, metavar=metavar, help=help, show_default=False)


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """What `load` takes."""

    url: Annotated[str, typer.Argument(metavar="URL", help="http://HOST:PORT", show_default=False)]
    workload: Annotated[
        str | None,
        _option("--workload", "As of run and compare (docs/workloads.md). Needed.", "URI"),
    ] = None
    max_new_tokens: Annotated[
        int | None, _option("--max-new-tokens", "Tokens per request.", "N")
    ] = None
    temperature: Annotated[
        float | None, _option("--temperature", "0 is greedy (default 0).", "T")
    ] = None
    top_k: Annotated[int | None, _option("--top-k", "0 is off.", "K")] = None
    top_p: Annotated[float | None, _option("--top-p", "1 is off.", "P")] = None
    seed: Annotated[int | None, _option("--seed", "Seed of every request.", "S")] = None
    slo: Annotated[
        str | None,
        _option("--slo", "Latency bounds that goodput counts.", "tpot_ms=X,ttft_ms=Y"),
    ] = None
    fingerprint: Annotated[
        bool, typer.Option("--fingerprint", metavar=" ", help="Add logits_sha256 to every request.")
    ] = False
    as_json: Annotated[
        bool,
        typer.Option("--json", metavar=" ", help="Print the result as JSON, and nothing else."),
    ] = False
    output: Annotated[Path | None, _option("--output", "Write the JSON to a file too.", "FILE")] = (
        None
    )


@takes(LoadOptions)
def load_command(options: LoadOptions) -> None:
    """Send a --workload to a server, and report time to first token, time per token, goodput and errors.

    Latencies are this client's. What the memory did comes from the server (GET /v1/policy), so the report
    compares with that of 'kvpolicy compare' in one process. KVPOLICY_API_KEY and KVPOLICY_POLICY_TOKEN
    are sent where they are set.
    """
    check_output(options.output)
    if options.workload is None:
        raise UserError("load needs --workload")
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
    given = {n: value for n in names if (value := getattr(options, n)) is not None}
    sampling = SamplingParams(**given)
    slo = None if options.slo is None else parse_slo(options.slo)
    from kvpolicy.workloads import make

    workload = make(
        options.workload, "wall", seed=options.seed, output_tokens=options.max_new_tokens
    )
    document = drive(options.url, workload, sampling, slo, options.fingerprint)
    emit_json(finite(document), to_stdout=options.as_json, path=options.output)
    if not options.as_json:
        write_text(report(document, slo))
    errors = document["results"][0]["errors"]
    if errors:
        warn(", ".join(f"{count} x {kind}" for kind, count in errors.items()))
        raise typer.Exit(1)


def drive(
    url: str, workload: Workload, sampling: SamplingParams, slo: Slo | None, fingerprint: bool
) -> dict[str, Any]:
    """Take the server through the workload; the document of the result."""
    with interrupts.loading():
        from kvpolicy.serving.client import Client, split_url
        from kvpolicy.serving.remote import RemoteEngine
        from kvpolicy.workloads.runner import Runner

        host, port = split_url(url)
    key = os.environ.get("KVPOLICY_API_KEY")
    token = os.environ.get("KVPOLICY_POLICY_TOKEN", key)
    remote = RemoteEngine(Client(host, port, key), Client(host, port, token))
    try:
        with load_progress("load:") as on_step:
            # A remote engine has what a runner asks of one.
            runner = Runner(cast("Engine", remote), workload, sampling, every=1, on_step=on_step)
            result = runner.run()
        return _document(remote, result, workload, slo, fingerprint)
    finally:
        remote.close()


def _document(
    remote: RemoteEngine,
    result: RunResult,
    workload: Workload,
    slo: Slo | None,
    fingerprint: bool,
) -> dict[str, Any]:
    from kvpolicy.telemetry.phases import phase_reports

    latencies = [output.latencies for output in result.outputs]
    policy = remote.policy
    record = {
        **policy.get("record", {}),
        "workload": workload.uri,
        "server": f"http://{remote._client.host}:{remote._client.port}",
        "slo": None if slo is None else slo.to_dict(),
    }
    found = {
        "controller": policy.get("controller", "unknown"),
        "drafter": "none",
        "requests": [output.to_dict(fingerprint=fingerprint) for output in result.outputs],
        "metrics": _metrics(remote, result, slo),
        "errors": dict(remote.errors),
        "phases": [phase.to_dict() for phase in phase_reports(result.timeline, latencies, slo)],
        "timeline": result.timeline.to_dict(),
        "latencies": {
            name: [getattr(one, name) for one in latencies]
            for name in ("arrived", "first_token", "last_token")
        },
    }
    return {"results": [found], "record": record}


def _metrics(remote: RemoteEngine, result: RunResult, slo: Slo | None) -> dict[str, Any]:
    """Under the names of `run` and `compare`; what only the engine's process knows is left out."""
    from kvpolicy.telemetry.latency import percentiles_ms
    from kvpolicy.telemetry.slo import goodput

    line = result.timeline
    latencies = [output.latencies for output in result.outputs]
    gained = {name: float(line.column(name)[-1] - line.column(name)[0]) for name in COUNTERS}
    tokens, seconds = sum(one.tokens for one in latencies), result.end - line.origin
    unique, selected = gained["unique_rows"], gained["selected_rows"]
    used = line.column("required_bytes") + line.column("optional_bytes")
    policy = remote.policy
    return {
        **gained,
        "steps": float(line.column("step")[-1] - line.column("step")[0]),
        "generated_tokens": tokens,
        "tokens_per_s": tokens / seconds if seconds > 0 else None,
        "goodput_tokens_per_s": goodput(latencies, slo, line.origin, result.end),
        "tpot_ms": percentiles_ms([one.tpot for one in latencies if one.tpot is not None]),
        "ttft_ms": percentiles_ms([one.ttft for one in latencies if one.ttft is not None]),
        "miss_rate": gained["fetched_rows"] / unique if unique else None,
        "miss_rate_selected": gained["fetched_rows"] / selected if selected else None,
        "required_bytes": float(line.column("required_bytes").max()),
        "optional_bytes_mean": float(line.column("optional_bytes").mean()),
        "device_kv_bytes_peak": float(used.max()),
        "controller_decisions": policy.get("decisions"),
        "controller_projections": policy.get("projections"),
        "controller_fallbacks": policy.get("fallbacks"),
    }


def report(document: dict[str, Any], slo: Slo | None) -> str:
    """Phases, then the whole run, then what failed."""
    from kvpolicy.telemetry.phases import PhaseReport

    found = document["results"][0]
    phases = {str(found["controller"]): [PhaseReport(**phase) for phase in found["phases"]]}
    metrics = found["metrics"]
    lines = [[heading, show(metrics)] for heading, show in SUMMARY]
    failed = sum(found["errors"].values())
    lines.append(["requests answered", f"{len(found['requests']) - failed:,}"])
    lines.append(["requests that failed", f"{failed:,}"])
    text = f"{phase_table(phases, False)}{legend(slo, False)}\n{aligned(lines)}"
    return text if slo is None else text + goodput_line(metrics, slo, False)
