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
    shown,
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

ACCEPTED: Column = ("accepted", lambda metrics: shown(metrics["accepted_length"], "{:.2f}"))


@dataclass(frozen=True)
class Comparison:
    """Runs of the same task; `differences` holds one line per run that deviates, by its label. drafters:
    of each run, none where nobody drafts. same_law: labels of runs whose tokens are drawn anew, from
    the same law, so that they are not compared."""

    controllers: tuple[str, ...]
    runs: tuple[Decoded, ...]
    differences: Mapping[str, str]
    drafters: tuple[str, ...] = ()
    same_law: frozenset[str] = frozenset()

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
        return dict(zip(labels(self.controllers, self.drafters), self.runs, strict=True))

    @property
    def counts_steps(self) -> bool:
        return bool(self.runs[0].record["config"]["clock"] == "steps")

    def table(self) -> str:
        """One row per controller, the outputs' verdict last; below, whose decisions were replaced."""
        rows = [
            [
                name,
                *(show(run.metrics) for _, show in self._columns),
                self._verdict(name),
            ]
            for name, run in self.labelled.items()
        ]
        notes = fallback_notes({label: run.metrics for label, run in self.labelled.items()})
        headings = ["controller", *(heading for heading, _ in self._columns), "outputs"]
        return table(headings, rows) + notes

    @property
    def _columns(self) -> tuple[Column, ...]:
        return (*COLUMNS, ACCEPTED) if any(d != "none" for d in self.drafters) else COLUMNS

    def _verdict(self, name: str) -> str:
        if name in self.same_law:
            return "same law"
        return "DIFFERENT" if name in self.differences else "equal"

    def phases(self, slo: Slo | None) -> str:
        """One block per phase of the workload, one row per controller; what the columns mean."""
        runs = {label: run.phases for label, run in self.labelled.items()}
        return phase_table(runs, self.counts_steps) + legend(slo, self.counts_steps)

    def to_dict(self, fingerprint: bool, under_load: bool = False) -> dict[str, Any]:
        results = [
            {
                "controller": name,
                "drafter": drafter,
                "requests": run.requests(fingerprint),
                "metrics": run.metrics,
                "outputs_equal": None if label in self.same_law else label not in self.differences,
                **run.beside(),
                **(run.load() if under_load else {}),
            }
            for name, drafter, (label, run) in zip(
                self.controllers,
                self.drafters or ("none",) * len(self.runs),
                self.labelled.items(),
                strict=True,
            )
        ]
        record = {
            **self.runs[0].record,
            "controllers": list(dict.fromkeys(self.controllers)),
            "drafters": list(dict.fromkeys(self.drafters or ("none",))),
        }
        return {
            "results": results,
            "outputs_equal": self.equal,
            "requests_compared": self.compared,
            "record": record,
        }


def labels(controllers: Sequence[str], drafters: Sequence[str] = ()) -> list[str]:
    """What each run is called: its controller, and its drafter if any run has one; a name that comes
    again gets a number."""
    names = list(controllers)
    if any(drafter != "none" for drafter in drafters):
        names = [f"{c} + {d}" for c, d in zip(controllers, drafters, strict=True)]
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(f"{name} #{seen[name]}" if seen[name] > 1 else name)
    return found


def compare_controllers(
    config: EngineConfig,
    controllers: Sequence[str],
    task: Task,
    before: Callable[[int, str], None] = lambda index, name: None,
    after: Callable[[int, Decoded], None] = lambda index, run: None,
    drafters: Sequence[str] = ("none",),
    shadows: Sequence[str] = (),
    logdir: Path | None = None,
) -> Comparison:
    """Run the task under each controller with each drafter in turn; tokens and logits must agree bit for
    bit (sampled ones of standard and block verification their law).

    Every name is resolved before the first run. The first controller is what the others are
    compared with. before and after are told of each run. shadows: specs of controllers that stand beside
    each. logdir: where the events go, a folder per run.
    """
    from kvpolicy.controllers import make

    for name in controllers:
        make(name)
    check_shadows(shadows)
    runs: list[Decoded] = []
    named, drafting = crossed(controllers, drafters)
    every = list(zip(labels(named, drafting), named, drafting, strict=True))
    folders = event_folders(logdir, [label for label, _, _ in every])
    for index, (label, name, drafter) in enumerate(every):
        before(index, label)
        settings = under(config, name, drafter)
        try:
            watch = Watch(tuple(shadows), folders[index])
            runs.append(decode(settings, task, f"{index + 1}/{len(every)}", watch))
        except UserError as error:
            raise UserError(f"controller {name!r}: {error}") from None
        after(index, runs[-1])
    drawn = task.sampling.temperature > 0.0 and config.verification != "coupled"
    return comparison_of(named, runs, task.workload.closed, drafting, drawn)


def crossed(
    controllers: Sequence[str], drafters: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Every controller with every drafter: the controllers and the drafters of the runs."""
    pairs = [
        (controller, drafter) for controller in controllers for drafter in drafters or ("none",)
    ]
    return tuple(c for c, _ in pairs), tuple(d for _, d in pairs)


def under(config: EngineConfig, controller: str, drafter: str = "none") -> EngineConfig:
    """The same settings with another controller and drafter."""
    values = {**config.model_dump(by_alias=True), "controller": controller, "drafter": drafter}
    return EngineConfig(**values)


def comparison_of(
    controllers: Sequence[str],
    runs: Sequence[Decoded],
    closed: bool,
    drafters: Sequence[str] = (),
    drawn: bool = False,
) -> Comparison:
    """The runs with what each differs in from the first. drawn: runs with a drafter draw tokens anew.

    closed: they may differ in how many requests they served; a request that the first run lacks is
    compared with the next one that has it.
    """
    reference = list(runs[0].outputs)
    for run in runs[1:] if closed else ():
        reference += run.outputs[len(reference) :]
    drafters = tuple(drafters) or ("none",) * len(runs)
    names = labels(controllers, drafters)
    anew = {
        name for name, drafter in zip(names, drafters, strict=True) if drawn and drafter != "none"
    }
    pairs = zip(names, runs, strict=True)
    found = (
        (name, first_difference(reference, run.outputs, closed))
        for name, run in pairs
        if name not in anew
    )
    differences = {name: text for name, text in found if text}
    return Comparison(tuple(controllers), tuple(runs), differences, drafters, frozenset(anew))


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

    Repeat --controller for one row each (resident, hisparse and adaptive when none is given), and
    --drafter to run each with every drafter. A
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
        compare_at_bound(
            *(options, settings.engine, task, controllers, settings.tpot_bound), settings.drafters
        )
        return
    comparison = compare_controllers(
        settings.engine,
        controllers,
        task,
        drafters=settings.drafters or ("none",),
        shadows=settings.shadows,
        logdir=options.logdir,
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
    options: Options,
    config: EngineConfig,
    task: Task,
    controllers: Sequence[str],
    bound: float,
    drafters: Sequence[str] = (),
) -> None:
    """Report what each controller sustains within a bound on the time per token."""
    from kvpolicy.controllers import make

    for name in controllers:
        make(name)
    found = []
    controllers, drafters = crossed(controllers, drafters)
    for index, (name, drafter) in enumerate(zip(controllers, drafters, strict=True)):
        try:
            label = f"{index + 1}/{len(controllers)}"
            found.append(search(under(config, name, drafter), task, bound, label))
        except UserError as error:
            raise UserError(f"controller {name!r}: {error}") from None
    runs, bounds = [run for run, _ in found], [bound for _, bound in found]
    drawn = task.sampling.temperature > 0.0 and config.verification != "coupled"
    comparison = comparison_of(controllers, runs, True, drafters, drawn)
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
