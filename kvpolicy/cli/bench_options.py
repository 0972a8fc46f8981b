"""The options of `kvpolicy bench`, and what they become."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpolicy.config import EngineConfig
from kvpolicy.errors import UserError

if TYPE_CHECKING:
    from kvpolicy.bench.load import Load
    from kvpolicy.models.loader import DecodeModel

__all__ = ["BenchOptions", "DecodeOptions", "Prepared", "at_least_one", "prepared", "whole_numbers"]

MEMORY = ("device_kv_mib", "host_kv_mib")


def option(flag: str, metavar: str, help: str) -> Any:
    """An option whose default the help names."""
    return typer.Option(flag, metavar=metavar, help=help, show_default=False)


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What every benchmark takes; None: the default of the device."""

    model: Annotated[
        str | None, option("--model", "NAME|PATH", "An embedded model, a preset or a folder.")
    ] = None
    device: Annotated[
        str, option("--device", "auto|cpu|cuda", "Where to compute (default auto).")
    ] = "auto"
    backend: Annotated[
        str,
        option("--backend", "auto|reference|triton", "Kernels that are measured (default auto)."),
    ] = "auto"
    dtype: Annotated[
        str | None, option("--dtype", "float32|bfloat16", "Weights and arithmetic.")
    ] = None
    as_json: Annotated[bool, option("--json", " ", "Print JSON, and nothing else.")] = False
    output: Annotated[Path | None, option("--output", "FILE", "Write the JSON to a file too.")] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(BenchOptions):
    """What benchmarks of decoding take besides."""

    kv_dtype: Annotated[
        str | None, option("--kv-dtype", "float32|bf16|fp8", "Format of KV rows (default float32).")
    ] = None
    dummy_weights: Annotated[
        bool, option("--dummy-weights", " ", "Random weights in a preset's dimensions.")
    ] = False
    layers: Annotated[int | None, option("--layers", "N", "With --dummy-weights: layers.")] = None
    vocab: Annotated[int | None, option("--vocab", "N", "With --dummy-weights: vocabulary.")] = None
    selection: Annotated[
        str | None,
        option("--selection", "SOURCE", "With --dummy-weights: who chooses (model, process, ...)."),
    ] = None
    context: Annotated[
        int | None,
        option("--context", "N", "With --dummy-weights: tokens before the prompt, never computed."),
    ] = None
    concurrency: Annotated[
        str | None, option("--concurrency", "N,N", "Requests at a time (GPU 1,16,64; CPU 1,4).")
    ] = None
    prompt_tokens: Annotated[
        int | None, option("--prompt-tokens", "N", "Tokens of a prompt (GPU 4096; CPU 512).")
    ] = None
    steps: Annotated[
        int | None, option("--steps", "N", "Steps that are timed (GPU 200; CPU 10).")
    ] = None
    warm: Annotated[int | None, option("--warm", "N", "Steps before these (GPU 40; CPU 3).")] = None
    prefill_chunk: Annotated[
        int | None, option("--prefill-chunk", "N", "Prompt rows a step (GPU 2048; CPU 256).")
    ] = None
    device_kv_mib: Annotated[
        float | None, option("--device-kv-mib", "MIB", "Device memory for KV of all kinds.")
    ] = None
    host_kv_mib: Annotated[
        float | None, option("--host-kv-mib", "MIB", "Host memory for the history.")
    ] = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model, and what is to be done with it. levels: concurrencies, ascending."""

    config: EngineConfig
    model: DecodeModel
    levels: tuple[int, ...]
    load: Load

    def record(self, **more: Any) -> dict[str, Any]:
        """The run record: the engine's settings, and ``bench``."""
        from kvpolicy.telemetry.record import run_record

        bench = {
            **{"concurrency": list(self.levels), "prompt_tokens": self.load.prompt},
            "context": self.load.context,
            **{"warm": self.load.warm, "steps": self.load.steps, **more},
        }
        config = self.config.model_dump(by_alias=True)
        return {"bench": bench, **run_record(config, self.config.device, self.model.backend)}


def prepared(options: DecodeOptions, controller: str) -> Prepared:
    """Load the model. UserError for sizes that it does not have."""
    numbers = {
        name: getattr(options, name) for name in ("prompt_tokens", "steps", "warm", "prefill_chunk")
    }
    at_least_one(**numbers, context=options.context)
    if options.context and not options.dummy_weights:
        raise UserError(f"--context {options.context}: goes with --dummy-weights")
    if len({getattr(options, name) is None for name in MEMORY}) > 1:
        raise UserError("--device-kv-mib and --host-kv-mib go together")
    from kvpolicy.bench.load import Load
    from kvpolicy.engine.parts import load as load_model
    from kvpolicy.engine.parts import pick_device

    place = pick_device(engine_config(options).device)
    large = place.type == "cuda"
    levels = whole_numbers(options.concurrency or ("1,16,64" if large else "1,4"), "--concurrency")
    usual = 16 if options.context else 4096 if large else 512
    prompt = options.prompt_tokens or usual
    chunk = options.prefill_chunk or (2048 if large else 256)
    load = Load(
        prompt=prompt,
        reading=levels[-1] * -(-prompt // chunk),
        warm=options.warm or (40 if large else 3),
        steps=options.steps or (200 if large else 10),
        context=options.context or 0,
    )
    config = engine_config(
        options,
        device=place.type,
        dummy_weights=options.dummy_weights,
        controller=controller,
        max_concurrency=levels[-1],
        prefill_chunk=chunk,
    )
    model = load_model(config, place)
    if load.tokens > model.geometry.max_context:
        raise UserError(
            f"--prompt-tokens {load.prompt}: with --context {load.context}, --warm {load.warm} and "
            f"--steps {load.steps} a request may have {load.tokens} tokens, and the model's context is "
            f"{model.geometry.max_context}"
        )
    return Prepared(config, model, levels, load)


def engine_config(options: BenchOptions, **more: Any) -> EngineConfig:
    """The settings of an engine that were given, and ``more``. UserError for a wrong value."""
    keys = (
        *("model", "device", "backend", "dtype", "kv_dtype"),
        *("layers", "vocab", "selection", *MEMORY),
    )
    given = {key: value for key in keys if (value := getattr(options, key, None)) is not None}
    return EngineConfig(**{**given, **more})


def whole_numbers(text: str, option: str) -> tuple[int, ...]:
    """``1,16,64``, ascending. UserError naming the option for anything else."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 1 or found[-1] > 4096:
        raise UserError(f"{option} {text!r}: must be numbers from 1 to 4096, by commas")
    return tuple(found)


def at_least_one(**values: int | None) -> None:
    """UserError naming the option of a value below 1."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be at least 1")
