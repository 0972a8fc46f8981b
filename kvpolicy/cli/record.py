"""`kvpolicy record`: go through a workload or prompts, and keep what every selector chose."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpolicy.cli import interrupts
from kvpolicy.cli.options import Options, takes
from kvpolicy.cli.output import MIB, aligned, check_output, emit_json, finite, write_text
from kvpolicy.cli.progress import step_progress
from kvpolicy.cli.run import Decoded, Task, Watch, decoded, finish, task_of
from kvpolicy.cli.settings import resolve
from kvpolicy.cli.shadows import check_shadows, shadow_table
from kvpolicy.config import EngineConfig
from kvpolicy.errors import UserError

__all__ = ["RecordOptions", "record", "record_command"]


@dataclass(frozen=True, kw_only=True)
class RecordOptions(Options):
    """Those of `run`, with another file as the output."""

    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FILE.npz",
            help="The recording. Needed.",
            rich_help_panel="What to report",
            show_default=False,
        ),
    ] = None


def record(
    config: EngineConfig,
    task: Task,
    path: Path,
    label: str = "record:",
    shadows: tuple[str, ...] = (),
) -> Decoded:
    """Take a new engine through the task and write its recording, which appears when all went well."""
    with interrupts.loading():
        from kvpolicy.cli.watching import watching
        from kvpolicy.engine.engine import Engine
        from kvpolicy.recording.recorder import Recorder
        from kvpolicy.workloads.runner import Runner

        engine = Engine(config)
    engine.set_slo(task.slo)
    with (
        engine,
        Recorder(engine, path) as recorder,
        watching(engine, Watch(shadows)) as watched,
        step_progress(label) as on_step,
    ):
        runner = Runner(
            engine, task.workload, task.sampling, on_step=on_step, on_sample=watched.note
        )
        result = runner.run()
        run = decoded(engine, result, task, watched)
        about = {
            **run.record,
            **finite(run.beside()),
            "metrics": finite(run.metrics),
            "phases": [
                {"name": mark.phase.name, "start": mark.phase.start, "level": mark.phase.level}
                for mark in result.timeline.marks
            ],
        }
        recorder.finish(result.outputs, about, result.timeline.origin)
    return run


@takes(RecordOptions)
def record_command(options: RecordOptions) -> None:
    """Run prompts or a --workload under one controller and record what was selected.

    The recording (docs/recordings.md) holds which entries each decode step of each selector chose:
    policies and bounds can be computed from it without a model (kvpolicy oracle).
    """
    if options.output is None:
        raise UserError("--output FILE.npz is needed: where the recording goes")
    check_output(options.output)
    settings = resolve(options)
    if len(settings.controllers) > 1:
        raise UserError("record takes one --controller")
    if settings.tpot_bound is not None:
        raise UserError("--tpot-bound-ms goes with 'kvpolicy compare'")
    if options.logdir is not None:
        raise UserError("--logdir goes with 'kvpolicy run' and 'kvpolicy compare'")
    task = task_of(options, settings)
    check_shadows(settings.shadows)
    run = record(settings.engine, task, options.output, shadows=settings.shadows)
    summary = _summary(options.output)
    document = {**summary, "metrics": run.metrics, **run.beside(), "record": run.record}
    emit_json(document, options.as_json, None)
    if not options.as_json:
        name = str(settings.engine.controller)
        write_text(_report(summary, run) + shadow_table({name: run}))
    finish(run.failed)


def _summary(path: Path) -> dict[str, Any]:
    """What was written, read back from the file."""
    from kvpolicy.recording import Recording

    found = Recording(path)
    rows = sum(len(found.rows(request).at) for request in found.request_ids)
    return {
        "recording": str(path),
        "bytes": path.stat().st_size,
        "steps": len(found.steps["step"]),
        "requests": len(found.request_ids),
        "query_rows": rows,
        "entries": rows * sum(selector.topk for selector in found.header.selectors),
        "selectors": [selector.name for selector in found.header.selectors],
    }


def _report(summary: dict[str, Any], run: Decoded) -> str:
    lines = [
        ["recording", summary["recording"]],
        ["size, MiB", f"{summary['bytes'] / MIB:.2f}"],
        ["steps", f"{summary['steps']:,}"],
        ["requests", f"{summary['requests']:,}"],
        ["query rows", f"{summary['query_rows']:,}"],
        ["bits per entry", f"{8 * summary['bytes'] / max(summary['entries'], 1):.2f}"],
        ["miss rate", f"{run.metrics['miss_rate']:.1%}"],
    ]
    return aligned(lines)
