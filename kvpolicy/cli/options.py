"""The options that commands share, as one record."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from kvpolicy.config import EngineConfig, SamplingParams

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["ENGINE_DEFAULTS", "SAMPLING_DEFAULTS", "SETTINGS", "Options", "takes"]

_Options = TypeVar("_Options", bound="DataclassInstance")


def _defaults(kind: type[EngineConfig] | type[SamplingParams]) -> dict[str, Any]:
    return {f.alias or name: f.default for name, f in kind.model_fields.items()}


ENGINE_DEFAULTS, SAMPLING_DEFAULTS = _defaults(EngineConfig), _defaults(SamplingParams)
SETTINGS = ENGINE_DEFAULTS | SAMPLING_DEFAULTS
"""Every key of --config and --set, with its default."""


def _option(flag: str, panel: str, help: str, metavar: str | None = None) -> Any:
    """An option; its help ends with the default of the setting of the same name."""
    key = flag.split("/")[0].lstrip("-").replace("-", "_")
    default = SETTINGS.get(key)
    if default is not None and default != () and key not in ("controller", "drafter"):
        shown = f"{default:g}" if isinstance(default, float) else str(default)
        help = f"{help.removesuffix('.')} (default {shown})."
    return typer.Option(flag, metavar=metavar, help=help, rich_help_panel=panel, show_default=False)


def _flag(flag: str, panel: str, help: str) -> Any:
    return typer.Option(flag, metavar=" ", help=help, rich_help_panel=panel, show_default=False)


def _later(flag: str) -> Any:
    return typer.Option(flag, hidden=True)


_INPUT, _POLICY, _MEMORY, _SAMPLE = "What to decode", "Policy", "Memory", "Sampling"
_ENGINE, _SETTINGS, _OUTPUT = "Model and engine", "Settings in a file", "What to report"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `run` and `compare` take, in the order of the help; None and empty mean "not given"."""

    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT",
            help="Prompts, UTF-8. '-' reads one from standard input.",
            show_default=False,
        ),
    ] = None
    prompt_file: Annotated[
        list[Path] | None,
        _option("--prompt-file", _INPUT, "One prompt, raw bytes. Repeatable.", "PATH"),
    ] = None
    workload: Annotated[
        str | None,
        _option(
            "--workload",
            _INPUT,
            "A load instead of prompts: synthetic:step?low=2&high=16, trace:azure-conv?rate=2, ... "
            "(kvpolicy list; docs/workloads.md).",
            "URI",
        ),
    ] = None
    bos: Annotated[
        bool | None,
        _flag("--bos/--no-bos", _INPUT, "Put the beginning-of-sequence token first (default no)."),
    ] = None

    controller: Annotated[
        list[str] | None,
        _option(
            "--controller",
            _POLICY,
            "NAME or PATH.py:NAME, and :key=value,... (kvpolicy list; kvpolicy new controller). "
            f"run takes one (default {SETTINGS['controller']}), compare any number.",
            "SPEC",
        ),
    ] = None
    shadow: Annotated[
        list[str] | None,
        _option(
            "--shadow",
            _POLICY,
            "Another controller's bookkeeping beside the live one: what it would have missed on the "
            "same batches, exactly. Repeatable.",
            "SPEC",
        ),
    ] = None
    eviction: Annotated[
        str | None,
        _option(
            "--eviction",
            _POLICY,
            "Which row of a hot cache gives way: clock, lru, fifo, random or a plug-in's "
            "(default: the controller's own).",
            "NAME",
        ),
    ] = None
    admission: Annotated[
        str | None,
        _option(
            "--admission",
            _POLICY,
            "Which rows fetched for proposed tokens may stay: all, or let those go first that only rejected "
            "tokens wanted (default: the controller's own, mostly accepted).",
            "all|accepted",
        ),
    ] = None
    drafter: Annotated[
        list[str] | None,
        _option(
            "--drafter",
            _POLICY,
            "Who proposes tokens that the next step verifies (kvpolicy list). run takes one, compare any "
            "number (default none).",
            "NAME",
        ),
    ] = None
    num_draft_tokens: Annotated[
        int | None,
        _option(
            "--num-draft-tokens",
            _POLICY,
            "Most proposed tokens per request and step (default: the drafter's own).",
            "K",
        ),
    ] = None
    verification: Annotated[
        str | None,
        _option(
            "--verification",
            _POLICY,
            "What sampled tokens keep: standard and block their law, coupled their bits too.",
            "standard|block|coupled",
        ),
    ] = None
    verify_length: Annotated[
        str | None,
        _option(
            "--verify-length",
            _POLICY,
            "Verify all proposed tokens, or as many as pay for their rows and fetches.",
            "full|scheduled",
        ),
    ] = None
    control_interval: Annotated[
        int | None,
        _option("--control-interval", _POLICY, "Most steps between two decisions.", "N"),
    ] = None
    decision_deadline_ms: Annotated[
        float | None,
        _option(
            "--decision-deadline-ms",
            _POLICY,
            "If a decision takes longer, adaptive decides instead; 0: no limit.",
            "MS",
        ),
    ] = None
    controller_isolation: Annotated[
        str | None,
        _option(
            "--controller-isolation",
            _POLICY,
            "auto: controllers of files and plug-ins decide in a process of their own, on the wall "
            "clock; thread: in this one.",
            "auto|thread",
        ),
    ] = None
    decision_log: Annotated[
        str | None,
        _option("--decision-log", _POLICY, "Append every decision, a line of JSON each.", "FILE"),
    ] = None

    device_kv_mib: Annotated[
        float | None,
        _option("--device-kv-mib", _MEMORY, "Device memory for KV of all kinds.", "MIB"),
    ] = None
    host_kv_mib: Annotated[
        float | None, _option("--host-kv-mib", _MEMORY, "Host memory for the history.", "MIB")
    ] = None
    floor_rows: Annotated[
        int | None,
        _option(
            "--floor-rows",
            _MEMORY,
            "Rows per request and layer that no controller can take.",
            "N",
        ),
    ] = None
    staging_rows: Annotated[
        int | None,
        _option(
            "--staging-rows",
            _MEMORY,
            "Transient rows shared by all requests (default: max-concurrency x top-k).",
            "N",
        ),
    ] = None

    max_new_tokens: Annotated[
        int | None, _option("--max-new-tokens", _SAMPLE, "Most tokens per request.", "N")
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

    model: Annotated[
        str | None,
        _option("--model", _ENGINE, "An embedded model or a checkpoint folder.", "NAME|PATH"),
    ] = None
    device: Annotated[
        str | None, _option("--device", _ENGINE, "Where to compute.", "auto|cpu|cuda")
    ] = None
    backend: Annotated[
        str | None,
        _option(
            "--backend",
            _ENGINE,
            "Kernels; auto is triton on a GPU, else reference (plain torch).",
            "auto|reference|triton",
        ),
    ] = None
    dummy_weights: Annotated[
        bool | None,
        _flag(
            "--dummy-weights",
            _ENGINE,
            "Random weights in the dimensions of a preset, to measure speed: --model glm-5.3.",
        ),
    ] = None
    layers: Annotated[
        int | None,
        _option("--layers", _ENGINE, "With --dummy-weights: layers, whole groups (all).", "N"),
    ] = None
    vocab: Annotated[
        int | None,
        _option("--vocab", _ENGINE, "With --dummy-weights: vocabulary (the layers' share).", "N"),
    ] = None
    selection: Annotated[
        str | None,
        _option(
            "--selection",
            _ENGINE,
            "With --dummy-weights: whose selections are read; the indexer works all the same.",
            "model|process|RECORDING:context=N",
        ),
    ] = None
    dtype: Annotated[
        str | None,
        _option("--dtype", _ENGINE, "Weights and arithmetic.", "float32|bfloat16"),
    ] = None
    kv_dtype: Annotated[
        str | None, _option("--kv-dtype", _ENGINE, "Format of KV rows.", "float32|bf16|fp8")
    ] = None
    max_concurrency: Annotated[
        int | None, _option("--max-concurrency", _ENGINE, "Most requests at a time.", "N")
    ] = None
    prefill_chunk: Annotated[
        int | None, _option("--prefill-chunk", _ENGINE, "Most prompt rows per step.", "N")
    ] = None
    clock: Annotated[
        str | None,
        _option(
            "--clock",
            _ENGINE,
            "What arrivals and latencies count; a step counts as 1 ms, and runs repeat exactly.",
            "wall|steps",
        ),
    ] = None
    cuda_graphs: Annotated[
        bool | None,
        _flag(
            "--cuda-graphs/--no-cuda-graphs",
            _ENGINE,
            "Run steps of plain decoding as CUDA graphs, on a GPU with Triton (default yes).",
        ),
    ] = None
    validate: Annotated[
        bool | None,
        _flag(
            "--validate/--no-validate",
            _ENGINE,
            "Check all bookkeeping after every step; slow (default no).",
        ),
    ] = None

    config: Annotated[
        Path | None,
        _option(
            "--config",
            _SETTINGS,
            "YAML mapping of policy, memory, sampling, model and engine settings (device_kv_mib: 64).",
            "FILE",
        ),
    ] = None
    overrides: Annotated[
        list[str] | None,
        _option(
            "--set",
            _SETTINGS,
            "One setting, the value as YAML. Wins over --config. Repeatable.",
            "K=V",
        ),
    ] = None

    slo: Annotated[
        str | None,
        _option("--slo", _OUTPUT, "Latency bounds that goodput counts.", "tpot_ms=X,ttft_ms=Y"),
    ] = None
    tpot_bound_ms: Annotated[
        float | None,
        _option(
            "--tpot-bound-ms",
            _OUTPUT,
            "compare only: find the most requests at a time within this time per token.",
            "X",
        ),
    ] = None
    logdir: Annotated[
        Path | None,
        _option("--logdir", _OUTPUT, "Write TensorBoard events, run record and picture.", "DIR"),
    ] = None
    fingerprint: Annotated[
        bool, _flag("--fingerprint", _OUTPUT, "Add logits_sha256 to every request.")
    ] = False
    as_json: Annotated[
        bool, _flag("--json", _OUTPUT, "Print the result as JSON, and nothing else.")
    ] = False
    output: Annotated[
        Path | None, _option("--output", _OUTPUT, "Write the JSON to a file too.", "FILE")
    ] = None


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
