"""`kvpolicy run`: decode prompts and print the text, or go through a workload and print what it was like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvpolicy.cli import interrupts
from kvpolicy.cli.logs import check_logdir, event_folders, write_logs
from kvpolicy.cli.options import Options, takes
from kvpolicy.cli.output import (
    check_output,
    emit_json,
    fallback_notes,
    printable,
    summary,
    warn,
    write_text,
)
from kvpolicy.cli.phases import goodput_line, legend, phase_table
from kvpolicy.cli.progress import step_progress
from kvpolicy.cli.prompts import read_prompts
from kvpolicy.cli.settings import Resolved, resolve
from kvpolicy.cli.shadows import check_shadows, shadow_table
from kvpolicy.config import EngineConfig, SamplingParams
from kvpolicy.errors import UserError

if TYPE_CHECKING:
    from kvpolicy.cli.watching import ShadowRun, Watched
    from kvpolicy.engine.engine import Engine
    from kvpolicy.engine.request import RequestOutput
    from kvpolicy.telemetry.phases import PhaseReport
    from kvpolicy.telemetry.slo import Slo
    from kvpolicy.telemetry.timeline import Timeline
    from kvpolicy.workloads.runner import RunResult
    from kvpolicy.workloads.workload import Workload

__all__ = ["Decoded", "Task", "Watch", "decode", "decoded", "run_command", "task_of"]


@dataclass(frozen=True)
class Task:
    """What an engine is given to do. named: the workload was named (by a URI), not made of prompts."""

    workload: Workload
    sampling: SamplingParams
    slo: Slo | None = None
    named: bool = True


@dataclass(frozen=True)
class Watch:
    """Who looks on. shadows: specs of controllers. folder: of TensorBoard events, None for none."""

    shadows: tuple[str, ...] = ()
    folder: Path | None = None


@dataclass(frozen=True)
class Decoded:
    """What one engine made of its task, and what shadows would have missed."""

    outputs: list[RequestOutput]
    metrics: dict[str, Any]
    record: dict[str, Any]
    timeline: Timeline
    phases: list[PhaseReport]
    shadows: list[ShadowRun] = field(default_factory=list)

    def requests(self, fingerprint: bool) -> list[dict[str, Any]]:
        """The outputs as JSON records."""
        return [output.to_dict(fingerprint=fingerprint) for output in self.outputs]

    def load(self) -> dict[str, Any]:
        """What it was like under load, ready for JSON: phases, timeline, moments of each request."""
        moments = ("arrived", "admitted", "first_token", "last_token", "waited_steps")
        return {
            "phases": [phase.to_dict() for phase in self.phases],
            "timeline": self.timeline.to_dict(),
            "latencies": {
                name: [getattr(output.latencies, name) for output in self.outputs]
                for name in moments
            },
        }

    def beside(self) -> dict[str, Any]:
        """The shadows, ready for JSON; nothing without them."""
        return {"shadows": [shadow.to_dict() for shadow in self.shadows]} if self.shadows else {}

    @property
    def failed(self) -> list[int]:
        """Ids of the requests that ended in an error."""
        return [output.id for output in self.outputs if output.finish_reason == "error"]


def task_of(options: Options, settings: Resolved) -> Task:
    """The named workload, or the prompts of the command line. UserError for both or neither."""
    prompts, paths = options.prompts or (), options.prompt_file or ()
    if settings.workload is not None:
        if prompts or paths:
            raise UserError("give prompts or --workload, not both")
        return Task(settings.workload, settings.sampling, settings.slo)
    from kvpolicy.workloads.prompts import from_prompts

    contents = read_prompts(prompts, paths, bos=settings.engine.bos)
    workload = from_prompts(contents, settings.sampling)
    return Task(workload, settings.sampling, settings.slo, named=False)


def decode(config: EngineConfig, task: Task, label: str, watch: Watch = Watch()) -> Decoded:
    """Take a new engine through the task, with a progress display, and close it."""
    with interrupts.loading():
        from kvpolicy.cli.watching import watching
        from kvpolicy.engine.engine import Engine
        from kvpolicy.workloads.runner import Runner

        engine = Engine(config)
    engine.set_slo(task.slo)
    with engine, watching(engine, watch) as watched, step_progress(label) as on_step:
        runner = Runner(
            engine, task.workload, task.sampling, on_step=on_step, on_sample=watched.note
        )
        run = decoded(engine, runner.run(), task, watched)
        watched.finish(run)
        return run


def decoded(
    engine: Engine, result: RunResult, task: Task, watched: Watched | None = None
) -> Decoded:
    """A run's result with what the engine measured; goodput is of the whole run."""
    from kvpolicy.telemetry.phases import phase_reports
    from kvpolicy.telemetry.slo import goodput

    latencies = [output.latencies for output in result.outputs]
    metrics = engine.metrics()
    start = result.timeline.origin
    metrics["goodput_tokens_per_s"] = goodput(latencies, task.slo, start, result.end)
    return Decoded(
        outputs=result.outputs,
        metrics=metrics,
        record={**engine.record(), **task_record(task)},
        timeline=result.timeline,
        phases=phase_reports(result.timeline, latencies, task.slo),
        shadows=[] if watched is None else watched.shadows(result.timeline),
    )


def task_record(task: Task) -> dict[str, Any]:
    """What a run record says about a task: nothing about plain prompts."""
    record: dict[str, Any] = {"workload": task.workload.uri} if task.named else {}
    return record if task.slo is None else {**record, "slo": task.slo.to_dict()}


@takes(Options)
def run_command(options: Options) -> None:
    """Decode prompts and print the text, or take a --workload and print its phases.

    Settings come from the defaults, --config, --set and the options below; the later one wins.
    """
    check_output(options.output)
    settings = resolve(options)
    if len(settings.controllers) > 1:
        raise UserError("run takes one --controller; to run several, use 'kvpolicy compare'")
    if len(settings.drafters) > 1:
        raise UserError("run takes one --drafter; to run several, use 'kvpolicy compare'")
    if settings.tpot_bound is not None:
        raise UserError("--tpot-bound-ms goes with 'kvpolicy compare'")
    task = task_of(options, settings)
    check_logdir(options.logdir)
    check_shadows(settings.shadows)
    name = str(settings.engine.controller)
    folder = event_folders(options.logdir, [name])[0]
    result = decode(settings.engine, task, "run:", Watch(settings.shadows, folder))
    document = {
        "requests": result.requests(options.fingerprint),
        "metrics": result.metrics,
        "record": result.record,
        **result.beside(),
        **(result.load() if task.named else {}),
    }
    emit_json(document, to_stdout=options.as_json, path=options.output)
    if not options.as_json:
        write_text(_report(result, task, name, options.fingerprint))
    write_logs(options.logdir, {name: result}, task, quiet=options.as_json)
    finish(result.failed)


def finish(failed: Sequence[int]) -> None:
    """Exit with 1 when requests ended in an error."""
    if failed:
        warn(f"error: requests that failed: {', '.join(map(str, failed))}")
        raise typer.Exit(1)


def _report(result: Decoded, task: Task, controller: str, fingerprint: bool) -> str:
    counts_steps = result.record["config"]["clock"] == "steps"
    end = summary(result.metrics) + fallback_notes({controller: result.metrics})
    if task.slo is not None:
        end += goodput_line(result.metrics, task.slo, counts_steps)
    end += shadow_table({controller: result})
    if task.named:
        phases = phase_table({controller: result.phases}, counts_steps)
        return f"{phases}{legend(task.slo, counts_steps)}\n{end}"
    lines = []
    for output in result.outputs:
        lines.append(
            f"== request {output.id}: {output.prompt_tokens} prompt tokens, "
            f"{len(output.tokens)} generated, {output.finish_reason}"
        )
        if fingerprint:
            lines.append(f"   logits sha256 {output.logits_sha256}")
        lines += [printable(output.text), ""]
    return "\n".join(lines) + "\n" + end
