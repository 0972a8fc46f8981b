"""`kvpolicy compare`: the same load under several controllers, with the same memory to use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvpolicy.cli.bound import bound_table, search
from kvpolicy.cli.logs import check_logdir, event_folders, write_logs
from kvpolicy.cli.options import Options, takes
from kvpolicy.cli.output import (
    Column,
    check_output,
    count,
    decimal,
    emit_json,
    fallback_notes,
    mib,
    percent,
    table,
    warn,
    write_text,
)
from kvpolicy.cli.phases import legend, phase_table
from kvpolicy.cli.run import Decoded, Task, Watch, decode, finish, task_of
from kvpolicy.cli.settings import resolve
from kvpolicy.cli.shadows import check_shadows, shadow_table
from kvpolicy.config import EngineConfig
from kvpolicy.errors import UserError
from kvpolicy.telemetry.slo import Slo

if TYPE_CHECKING:
    from kvpolicy.engine.request import RequestOutput

__all__ = ["DEFAULT_CONTROLLERS", "Comparison", "compare_controllers"]

DEFAULT_CONTROLLERS = ("resident", "hisparse", "adaptive")

COLUMNS: tuple[Column, ...] = (
    ("miss rate", percent("miss_rate")),
    ("fetched", count("fetched_rows")),
    ("moved MiB", mib("host_to_device_bytes")),
    ("peak MiB", mib("device_kv_bytes_peak")),
    ("optional", mib("optional_bytes_mean")),
    ("tokens/s", decimal("tokens_per_s")),
)


@dataclass(frozen=True)
class Comparison:
    """Runs of the same task; `differences` holds one line per run that deviates, by its label."""

    controllers: tuple[str, ...]
    runs: tuple[Decoded, ...]
    differences: Mapping[str, str]

    @property
    def equal(self) -> bool:
        return not self.differences

    @property
    def compared(self) -> int:
        """Requests that every run has served. Where a load is kept at a level, a controller under
        which requests end sooner is given more of them."""
        return min(len(run.outputs) for run in self.runs)

    @property
    def failed(self) -> list[int]:
        """Ids of requests that ended in an error under any controller."""
        return sorted({request for run in self.runs for request in run.failed})

    @property
    def labelled(self) -> dict[str, Decoded]:
        """The runs by controller, see :func:`labels`."""
        return dict(zip(labels(self.controllers), self.runs, strict=True))

    @property
    def counts_steps(self) -> bool:
        return bool(self.runs[0].record["config"]["clock"] == "steps")

    def table(self) -> str:
        """One row per controller, the outputs' verdict last; below, whose decisions were replaced."""
        rows = [
            [
                name,
                *(show(run.metrics) for _, show in COLUMNS),
                "DIFFERENT" if name in self.differences else "equal",
            ]
            for name, run in self.labelled.items()
        ]
        notes = fallback_notes({label: run.metrics for label, run in self.labelled.items()})
        headings = ["controller", *(heading for heading, _ in COLUMNS), "outputs"]
        return table(headings, rows) + notes

    def phases(self, slo: Slo | None) -> str:
        """One block per phase of the workload, one row per controller; what the columns mean."""
        runs = {label: run.phases for label, run in self.labelled.items()}
        return phase_table(runs, self.counts_steps) + legend(slo, self.counts_steps)

    def to_dict(self, fingerprint: bool, under_load: bool = False) -> dict[str, Any]:
        results = [
            {
                "controller": name,
                "drafter": "none",
                "requests": run.requests(fingerprint),
                "metrics": run.metrics,
                "outputs_equal": label not in self.differences,
                **run.beside(),
                **(run.load() if under_load else {}),
            }
            for name, (label, run) in zip(self.controllers, self.labelled.items(), strict=True)
        ]
        record = {**self.runs[0].record, "controllers": list(self.controllers)}
        return {
            "results": results,
            "outputs_equal": self.equal,
            "requests_compared": self.compared,
            "record": record,
        }


def labels(controllers: Sequence[str]) -> list[str]:
    """What each run is called: its controller; one that is named again gets a number."""
    seen: Counter[str] = Counter()
    found = []
    for name in controllers:
        seen[name] += 1
        found.append(f"{name} #{seen[name]}" if seen[name] > 1 else name)
    return found


def compare_controllers(
    config: EngineConfig,
    controllers: Sequence[str],
    task: Task,
    before: Callable[[int, str], None] = lambda index, name: None,
    after: Callable[[int, Decoded], None] = lambda index, run: None,
    shadows: Sequence[str] = (),
    logdir: Path | None = None,
) -> Comparison:
    """Run the task under each controller in turn; tokens and logits must agree bit for bit.

    Every name is resolved before the first run. The first controller is what the others are
    compared with. before and after are told of each run. shadows: specs of controllers that stand beside
    each. logdir: where the events go, a folder per run.
    """
    from kvpolicy.controllers import make

    for name in controllers:
        make(name)
    check_shadows(shadows)
    folders = event_folders(logdir, labels(controllers))
    runs: list[Decoded] = []
    for index, name in enumerate(controllers):
        before(index, name)
        settings = under(config, name)
        try:
            watch = Watch(tuple(shadows), folders[index])
            runs.append(decode(settings, task, f"{index + 1}/{len(controllers)}", watch))
        except UserError as error:
            raise UserError(f"controller {name!r}: {error}") from None
        after(index, runs[-1])
    return comparison_of(controllers, runs, task.workload.closed)


def under(config: EngineConfig, controller: str) -> EngineConfig:
    """The same settings with another controller."""
    return EngineConfig(**{**config.model_dump(by_alias=True), "controller": controller})


def comparison_of(controllers: Sequence[str], runs: Sequence[Decoded], closed: bool) -> Comparison:
    """The runs with what each differs in from the first.

    closed: they may differ in how many requests they served; a request that the first run lacks is
    compared with the next one that has it.
    """
    reference = list(runs[0].outputs)
    for run in runs[1:] if closed else ():
        reference += run.outputs[len(reference) :]
    pairs = zip(labels(controllers), runs, strict=True)
    found = ((name, first_difference(reference, run.outputs, closed)) for name, run in pairs)
    differences = {name: text for name, text in found if text}
    return Comparison(tuple(controllers), tuple(runs), differences)


def first_difference(
    reference: Sequence[RequestOutput], other: Sequence[RequestOutput], closed: bool = False
) -> str | None:
    """Where the outputs of the same requests part, or None when they are bitwise equal (closed: as
    far as both go)."""
    for index, (a, b) in enumerate(zip(reference, other, strict=not closed)):
        if a.tokens != b.tokens:
            pairs = enumerate(zip(a.tokens, b.tokens, strict=False))
            shorter = min(len(a.tokens), len(b.tokens))
            position = next((i for i, (x, y) in pairs if x != y), shorter)
            return f"request {index}: tokens differ from generated token {position} on"
        if a.finish_reason != b.finish_reason:
            return f"request {index}: ended with {b.finish_reason}, not {a.finish_reason}"
        if a.logits_sha256 != b.logits_sha256:
            return f"request {index}: the tokens agree, their logits do not"
    return None


def report_differences(comparison: Comparison) -> None:
    """One loud line on stderr per controller that changed the output, and exit code 1."""
    for name, text in comparison.differences.items():
        warn(f"OUTPUTS DIFFER under {name!r} (against {comparison.controllers[0]!r}): {text}")
    if not comparison.equal:
        raise typer.Exit(1)


@takes(Options)
def compare_command(options: Options) -> None:
    """Run the same prompts or --workload under several controllers with equal memory.

    Repeat --controller for one row each (resident, hisparse and adaptive when none is given). A
    policy may change speed and memory, never the output: tokens and logits are compared bit for
    bit, and a difference ends with exit code 1.
    """
    check_output(options.output)
    settings = resolve(options)
    task = task_of(options, settings)
    check_logdir(options.logdir)
    controllers = settings.controllers or DEFAULT_CONTROLLERS
    if settings.tpot_bound is not None:
        if settings.shadows:
            raise UserError("--shadow does not go with --tpot-bound-ms")
        compare_at_bound(options, settings.engine, task, controllers, settings.tpot_bound)
        return
    comparison = compare_controllers(
        settings.engine, controllers, task, shadows=settings.shadows, logdir=options.logdir
    )
    document = comparison.to_dict(options.fingerprint, under_load=task.named)
    emit_json(document, to_stdout=options.as_json, path=options.output)
    if not options.as_json:
        under_load = f"{comparison.phases(task.slo)}\n" if task.named else ""
        write_text(under_load + comparison.table() + shadow_table(comparison.labelled))
    write_logs(options.logdir, comparison.labelled, task, quiet=options.as_json)
    report_differences(comparison)
    finish(comparison.failed)


def compare_at_bound(
    options: Options, config: EngineConfig, task: Task, controllers: Sequence[str], bound: float
) -> None:
    """Report what each controller sustains within a bound on the time per token."""
    from kvpolicy.controllers import make

    for name in controllers:
        make(name)
    found = []
    for index, name in enumerate(controllers):
        try:
            label = f"{index + 1}/{len(controllers)}"
            found.append(search(under(config, name), task, bound, label))
        except UserError as error:
            raise UserError(f"controller {name!r}: {error}") from None
    runs, bounds = [run for run, _ in found], [bound for _, bound in found]
    comparison = comparison_of(controllers, runs, closed=True)
    document = comparison.to_dict(options.fingerprint, under_load=True)
    for result, each in zip(document["results"], bounds, strict=True):
        result["bound"] = each.to_dict()
    emit_json(document, to_stdout=options.as_json, path=options.output)
    if not options.as_json:
        names = list(comparison.labelled)
        equal = [name not in comparison.differences for name in names]
        write_text(bound_table(names, bounds, equal, comparison.counts_steps))
    write_logs(options.logdir, comparison.labelled, task, quiet=options.as_json, afterwards=True)
    report_differences(comparison)
    finish(comparison.failed)
