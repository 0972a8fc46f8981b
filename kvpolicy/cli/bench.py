"""`kvpolicy bench kernels|step|end-to-end`: how fast this machine does it, and what keeps it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from kvpolicy.cli import interrupts
from kvpolicy.cli.bench_options import (
    BenchOptions,
    DecodeOptions,
    Prepared,
    at_least_one,
    engine_config,
    option,
    prepared,
    whole_numbers,
)
from kvpolicy.cli.bench_tables import cell_table, kernel_table, step_table
from kvpolicy.cli.options import takes
from kvpolicy.cli.output import check_output, emit_json, warn, write_text
from kvpolicy.cli.progress import step_progress, task_progress
from kvpolicy.errors import UserError, unknown_name

if TYPE_CHECKING:
    from kvpolicy.bench.kernels import KernelReport
    from kvpolicy.bench.sizes import Sizes

__all__ = ["EndToEndOptions", "KernelOptions", "StepOptions", "app"]

DEFAULT_CONTROLLERS = ("resident", "hisparse", "static", "adaptive")


class _Kinds(TyperGroup):
    """Says what there is where something else is asked for."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            raise unknown_name("benchmark", args[0], self.commands)
        return super().resolve_command(ctx, args)


app = typer.Typer(add_completion=False, cls=_Kinds, invoke_without_command=True)


@app.callback()
def _bench(ctx: typer.Context) -> None:
    """Measure kernels beside their floors, the parts of a decode step, and whole decoding.

    Sizes are small on a CPU; on a GPU they are those of docs/performance.md.
    """
    if ctx.invoked_subcommand is None:
        raise UserError("what to measure is missing: kernels, step or end-to-end")


# --- kernels -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class KernelOptions(BenchOptions):
    """Sizes of `kvpolicy bench kernels`."""

    batches: Annotated[
        str | None, option("--batches", "N,N", "Requests (GPU 1,16,128; CPU 1,4).")
    ] = None
    context: Annotated[
        int | None, option("--context", "N", "Entries of a history (GPU 100352; CPU 512).")
    ] = None
    only: Annotated[
        str,
        option("--only", "NAME,NAME", "Of attention, indexer, linear, norm, memory, source."),
    ] = ""
    repeats: Annotated[
        int, option("--repeats", "N", "The median of so many is taken (default 7).")
    ] = 7


@app.command("kernels")
@takes(KernelOptions)
def kernels_command(options: KernelOptions) -> None:
    """Every kernel, checked against a plain computation, beside the time of its bytes and FLOPs.

    The rates behind these floors are measured at the start. On a GPU the dimensions are GLM-5.3's and
    times are inside CUDA graphs. Exit code 1 if a kernel is wrong or fails.
    """
    check_output(options.output)
    at_least_one(repeats=options.repeats, context=options.context)
    with interrupts.loading():
        from kvpolicy.bench.kernels import check_groups, measure_kernels

        groups = check_groups([name for name in options.only.split(",") if name])
        sizes, model = _sizes(options)
    with task_progress("bench:") as tell:
        report = measure_kernels(
            sizes, options.repeats, groups, lambda t: tell(f"{t.name}, batch {t.batch}")
        )
    settings = {"model": model, "only": list(groups), "repeats": options.repeats}
    emit_json(_kernel_document(report, sizes, settings), options.as_json, options.output)
    if not options.as_json:
        write_text(kernel_table(report))
    for timing in report.wrong:
        warn(f"error: {timing.name}, batch {timing.batch}: {timing.error}")
    if report.wrong:
        raise typer.Exit(1)


def _sizes(options: KernelOptions) -> tuple[Sizes, str]:
    """What to measure at, and the model's name."""
    from kvpolicy.bench.sizes import sizes_of
    from kvpolicy.engine.parts import pick_device

    named = engine_config(options)
    place = pick_device(named.device)
    large = place.type == "cuda"
    batches = whole_numbers(options.batches or ("1,16,128" if large else "1,4"), "--batches")
    model = options.model or ("glm-5.3" if large else "micro-glm")
    return sizes_of(model, batches, options.context, place, named.backend, options.dtype), model


def _kernel_document(
    report: KernelReport, sizes: Sizes, settings: dict[str, Any]
) -> dict[str, Any]:
    from kvpolicy.telemetry.record import run_record

    bench = {
        **settings,
        "batches": list(sizes.batches),
        "context": sizes.context,
        "dtype": str(sizes.dtype).removeprefix("torch."),
    }
    return {
        "benchmark": "kernels",
        "rates": report.rates.as_dict(),
        "results": [timing.as_dict() for timing in report.timings],
        "record": {"bench": bench, **run_record({}, str(sizes.device), sizes.backend)},
    }


# --- step --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StepOptions(DecodeOptions):
    """Those of `kvpolicy bench step`."""

    controller: Annotated[
        str, option("--controller", "SPEC", "Who decides about memory (default hisparse).")
    ] = "hisparse"
    picture: Annotated[
        Path | None, option("--picture", "FILE.png", "Stacked bars (needs matplotlib).")
    ] = None


@app.command("step")
@takes(StepOptions)
def step_command(options: StepOptions) -> None:
    """What a decode step is made of, at several concurrencies.

    On a GPU from a profiler's times of the kernels of replayed CUDA graphs, with the share of the step in
    which the device is busy; elsewhere parts are timed as calls. Unless --device-kv-mib says otherwise
    device memory is enough for every history.
    """
    check_output(options.output)
    _check_picture(options.picture)
    with interrupts.loading():
        given = prepared(options, options.controller)
        from kvpolicy.bench.step import measure_step
    share = None if options.device_kv_mib is not None else 1.0
    found = []
    for level in given.levels:
        with step_progress(f"bench: {level} at a time,") as on_step:
            found.append(measure_step(given.config, given.model, given.load, level, share, on_step))
    record = given.record()
    document = {"benchmark": "step", "results": [r.as_dict() for r in found], "record": record}
    emit_json(document, options.as_json, options.output)
    if not options.as_json:
        write_text(step_table(found))
    if options.picture is not None:
        from kvpolicy.bench.picture import draw_steps

        title = f"{given.config.model}, {given.model.backend} kernels, {record['device_name']}"
        draw_steps(options.picture, found, f"{title}, prompts of {given.load.prompt:,} tokens")


def _check_picture(path: Path | None) -> None:
    from kvpolicy.telemetry.picture import available

    if path is None:
        return
    if not available():
        raise UserError("--picture needs matplotlib: pip install 'kvpolicy[plot]'")
    check_output(path, "--picture")


# --- end-to-end --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EndToEndOptions(DecodeOptions):
    """Those of `kvpolicy bench end-to-end`."""

    controller: Annotated[
        list[str] | None,
        option("--controller", "SPEC", f"Repeatable (default {', '.join(DEFAULT_CONTROLLERS)})."),
    ] = None
    memory_share: Annotated[
        float,
        option(
            "--memory-share",
            "X",
            "Device memory holds this share of all histories at the largest concurrency (default 0.5).",
        ),
    ] = 0.5
    rounds: Annotated[
        int, option("--rounds", "N", "Of each controller; medians are taken (default 3).")
    ] = 3


@app.command("end-to-end")
@takes(EndToEndOptions)
def end_to_end_command(options: EndToEndOptions) -> None:
    """Tokens per second and time per token over concurrency, for several controllers.

    Decoding alone: prompts are read before anything is timed. Every controller gets the same requests and
    memory; rounds go through them forwards and backwards in turn.
    """
    check_output(options.output)
    at_least_one(rounds=options.rounds)
    if not 0.0 <= options.memory_share <= 1.0:
        raise UserError(f"--memory-share {options.memory_share:g}: must be a number from 0 to 1")
    controllers = tuple(dict.fromkeys(options.controller or DEFAULT_CONTROLLERS))
    with interrupts.loading():
        from kvpolicy.bench.end_to_end import measure_cells
        from kvpolicy.controllers import make

        for spec in controllers:
            make(spec)
        given = _limited(prepared(options, controllers[0]), options)
    found = []
    for level in given.levels:
        with step_progress(f"bench: {level} at a time,") as on_step:
            found += measure_cells(
                *(given.config, given.model, given.load, level),
                *(controllers, options.rounds, on_step),
            )
    document = {
        "benchmark": "end-to-end",
        "results": [cell.as_dict() for cell in found],
        "record": given.record(controllers=list(controllers), rounds=options.rounds),
    }
    emit_json(document, options.as_json, options.output)
    if not options.as_json:
        write_text(cell_table(found))


def _limited(given: Prepared, options: EndToEndOptions) -> Prepared:
    """With the memory that all controllers share."""
    from kvpolicy.bench.load import with_memory

    if options.device_kv_mib is not None:
        return given
    config = with_memory(
        given.config, given.model, given.load, given.levels[-1], options.memory_share
    )
    return replace(given, config=config)
