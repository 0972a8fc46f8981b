"""The options that commands share, as one record."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from kvpolicy.config import EngineConfig, SamplingParams

__all__ = ["ENGINE_DEFAULTS", "SAMPLING_DEFAULTS", "SETTINGS", "Options", "takes"]

_Options = TypeVar("_Options", bound="Options")


def _defaults(kind: type[EngineConfig] | type[SamplingParams]) -> dict[str, Any]:
    return {f.alias or name: f.default for name, f in kind.model_fields.items()}


ENGINE_DEFAULTS, SAMPLING_DEFAULTS = _defaults(EngineConfig), _defaults(SamplingParams)
SETTINGS = ENGINE_DEFAULTS | SAMPLING_DEFAULTS
"""Every key of --config and --set, with its default."""


def _option(flag: str, panel: str, help: str, metavar: str | None = None) -> Any:
    """An option; the shown default is that of the setting of the same name."""
    key = flag.split("/")[0].lstrip("-").replace("-", "_")
    default = SETTINGS.get(key)
    shown = str(default).lower() if default not in (None, ()) else False
    return typer.Option(
        flag,
        metavar=metavar,
        help=help,
        rich_help_panel=panel,
        show_default=shown,
    )


def _flag(name: str, help: str) -> Any:
    return typer.Option(name, help=help, rich_help_panel="Output", show_default=False)


def _later(flag: str) -> Any:
    return typer.Option(flag, hidden=True)


_WHAT, _MEMORY, _SAMPLE, _PROMPT = "Model and policy", "Memory", "Sampling", "Prompts and settings"
_LOAD = "Load"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `run` and `compare` take; None and empty mean "not given"."""

    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROMPT]...", help="Prompts, UTF-8. '-' reads one from standard input."
        ),
    ] = None
    prompt_file: Annotated[
        list[Path] | None,
        _option("--prompt-file", _PROMPT, "One prompt, raw bytes. Repeatable.", "PATH"),
    ] = None
    bos: Annotated[
        bool | None,
        _option("--bos/--no-bos", _PROMPT, "Put the beginning-of-sequence token first."),
    ] = None
    config: Annotated[
        Path | None,
        _option(
            "--config", _PROMPT, "YAML mapping of settings (flat: 'device_kv_mib: 64').", "FILE"
        ),
    ] = None
    overrides: Annotated[
        list[str] | None,
        _option(
            "--set",
            _PROMPT,
            "One setting, the value as YAML. Wins over --config. Repeatable.",
            "K=V",
        ),
    ] = None

    model: Annotated[
        str | None,
        _option("--model", _WHAT, "An embedded model or a checkpoint folder.", "NAME|PATH"),
    ] = None
    device: Annotated[
        str | None, _option("--device", _WHAT, "Where to compute.", "auto|cpu|cuda")
    ] = None
    backend: Annotated[
        str | None, _option("--backend", _WHAT, "Kernels to use.", "auto|reference|triton")
    ] = None
    dtype: Annotated[str | None, _option("--dtype", _WHAT, "Arithmetic.", "float32")] = None
    kv_dtype: Annotated[
        str | None, _option("--kv-dtype", _WHAT, "Format of KV rows.", "float32|bf16")
    ] = None
    controller: Annotated[
        list[str] | None,
        _option(
            "--controller",
            _WHAT,
            "NAME or PATH.py:NAME, and :key=value,... (kvpolicy list; kvpolicy new controller).",
            "SPEC",
        ),
    ] = None
    eviction: Annotated[
        str | None,
        _option("--eviction", _WHAT, "Eviction rule of the hot cache (kvpolicy list).", "NAME"),
    ] = None
    admission: Annotated[
        str | None, _option("--admission", _WHAT, "Which fetched rows may stay.", "all")
    ] = None
    max_concurrency: Annotated[
        int | None, _option("--max-concurrency", _WHAT, "Requests at a time.", "N")
    ] = None
    prefill_chunk: Annotated[
        int | None, _option("--prefill-chunk", _WHAT, "Prompt rows per step.", "N")
    ] = None
    control_interval: Annotated[
        int | None,
        _option("--control-interval", _WHAT, "Steps between two decisions of the controller.", "N"),
    ] = None
    decision_deadline_ms: Annotated[
        float | None,
        _option(
            "--decision-deadline-ms", _WHAT, "Later, adaptive decides instead; 0: no limit.", "MS"
        ),
    ] = None
    decision_log: Annotated[
        str | None, _option("--decision-log", _WHAT, "Append every decision as JSON.", "FILE")
    ] = None
    clock: Annotated[
        str | None,
        _option("--clock", _WHAT, "What latencies count; a step counts as 1 ms.", "wall|steps"),
    ] = None
    validate: Annotated[
        bool | None,
        _option(
            "--validate/--no-validate", _WHAT, "Check all bookkeeping after every step (slow)."
        ),
    ] = None

    device_kv_mib: Annotated[
        float | None,
        _option("--device-kv-mib", _MEMORY, "Device memory for KV of all kinds.", "MIB"),
    ] = None
    host_kv_mib: Annotated[
        float | None, _option("--host-kv-mib", _MEMORY, "Host memory for the history.", "MIB")
    ] = None
    staging_rows: Annotated[
        int | None,
        _option("--staging-rows", _MEMORY, "Transient rows shared by all requests.", "N"),
    ] = None
    floor_rows: Annotated[
        int | None,
        _option(
            "--floor-rows", _MEMORY, "Rows per request and layer that no controller can take.", "N"
        ),
    ] = None

    max_new_tokens: Annotated[
        int | None, _option("--max-new-tokens", _SAMPLE, "Tokens to generate.", "N")
    ] = None
    temperature: Annotated[float | None, _option("--temperature", _SAMPLE, "0 is greedy.", "T")] = (
        None
    )
    top_k: Annotated[int | None, _option("--top-k", _SAMPLE, "0 is off.", "K")] = None
    top_p: Annotated[float | None, _option("--top-p", _SAMPLE, "1 is off.", "P")] = None
    seed: Annotated[int | None, _option("--seed", _SAMPLE, "Seed of every request.", "S")] = None
    stop: Annotated[
        list[str] | None,
        _option("--stop", _SAMPLE, "End where this text appears. Repeatable.", "TEXT"),
    ] = None

    deadline_ms: Annotated[
        float | None,
        _option("--deadline-ms", _SAMPLE, "Cancel a request that is not done after this.", "MS"),
    ] = None
    workload: Annotated[
        str | None,
        _option("--workload", _LOAD, "synthetic:NAME?... or trace:NAME|PATH?...", "URI"),
    ] = None
    slo: Annotated[
        str | None,
        _option("--slo", _LOAD, "Latency bounds that goodput counts.", "tpot_ms=X,ttft_ms=Y"),
    ] = None
    tpot_bound_ms: Annotated[
        float | None,
        _option(
            "--tpot-bound-ms", _LOAD, "compare: find the most requests at a time within it.", "X"
        ),
    ] = None
    logdir: Annotated[
        Path | None,
        _option("--logdir", _LOAD, "TensorBoard events, record and picture of the run.", "DIR"),
    ] = None

    fingerprint: Annotated[bool, _flag("--fingerprint", "Add logits_sha256 to every request.")] = (
        False
    )
    as_json: Annotated[bool, _flag("--json", "Print the result as JSON.")] = False
    output: Annotated[
        Path | None, _option("--output", "Output", "Also write the JSON to a file.", "FILE")
    ] = None

    drafter: Annotated[list[str] | None, _later("--drafter")] = None
    verification: Annotated[str | None, _later("--verification")] = None
    num_draft_tokens: Annotated[int | None, _later("--num-draft-tokens")] = None
    shadow: Annotated[list[str] | None, _later("--shadow")] = None
    layers: Annotated[int | None, _later("--layers")] = None
    dummy_weights: Annotated[bool | None, _later("--dummy-weights")] = None


def takes(kind: type[_Options]) -> Callable[[Callable[[_Options], None]], Callable[..., None]]:
    """Turn a function of an options record into one whose parameters are the record's fields."""
    hints = get_type_hints(kind, include_extras=True)
    parameters = [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=f.default,
            annotation=hints[f.name],
        )
        for f in fields(kind)
    ]

    def wrap(function: Callable[[_Options], None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            function(kind(**values))

        command.__doc__ = function.__doc__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return wrap
