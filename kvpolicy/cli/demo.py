"""`kvpolicy demo`: one load step under every way to hold the cache, and one output."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpolicy.cli.compare import Comparison, compare_controllers, report_differences
from kvpolicy.cli.logs import check_logdir, write_logs
from kvpolicy.cli.output import check_output, emit_json, printable, shown, write_text
from kvpolicy.cli.run import Decoded, Task, finish
from kvpolicy.config import EngineConfig, SamplingParams
from kvpolicy.telemetry.slo import Slo

__all__ = ["CONTROLLERS", "LOADS", "Load", "demo_command", "demo_controllers"]

CONTROLLERS = ("resident", "hisparse", "hybrid", "adaptive")
"""Told in this order, those of them that are registered."""

_TAIL_CHARACTERS = 240
_RULE_WIDTH = 72
_READING = """\
low: memory is spare. Who keeps the whole history fetches nothing (idle is what is left over); a
  fixed buffer still fetches.
high: memory is short. Who holds on to it lets the others wait; who shares it fetches more.
low again: it is spare again. Who fills it up stops fetching.
"""


@dataclass(frozen=True)
class Load:
    """A load step that shows the difference. low, high: requests at a time. duration: steps of each
    phase. device_kv_mib: holds the whole history of ``low`` requests, and of ``high`` requests
    what hisparse keeps."""

    low: int
    high: int
    duration: int
    prompt_bytes: str
    output_tokens: int
    device_kv_mib: float
    prefill_chunk: int
    ttft_steps: int  # bound that goodput counts

    @property
    def uri(self) -> str:
        """The workload; its prompts are cut from texts that the model was not trained on."""
        return (
            f"synthetic:step?low={self.low}&high={self.high}&duration={self.duration}"
            f"&prompt_bytes={self.prompt_bytes}&text=heldout"
        )


LOADS = {
    # About 15 s for each controller on one core, most of it reading prompts.
    "cpu": Load(3, 10, 90, "500-900", 72, 17.0, 128, 60),
    "cuda": Load(8, 48, 200, "2000-3000", 128, 120.0, 1024, 120),
}


def demo_controllers() -> list[str]:
    """The controllers of the demo that this version has."""
    from kvpolicy.controllers import names

    return [name for name in CONTROLLERS if name in names()]


def demo_command(
    device: Annotated[
        str, typer.Option("--device", metavar="auto|cpu|cuda", help="Where to compute.")
    ] = "auto",
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter", metavar="NAME", help="Run every policy with this drafter too. Repeatable."
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", metavar="N", help="Tokens per request.", min=1),
    ] = None,
    logdir: Annotated[
        Path,
        typer.Option("--logdir", metavar="DIR", help="TensorBoard events, record and picture."),
    ] = Path("runs/demo"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Also write the JSON to a file.")
    ] = None,
) -> None:
    """Send a load step through four policies and check that their outputs are identical (80 s on a CPU).

    Few requests, then many, then few, of held-out text and with the same memory: what each policy
    keeps on the device, fetches and makes wait differs, every token and every logit must not. Exit
    code 1 if one does.
    """
    check_output(output)
    config, load = _config(device)
    task = _task(load, max_new_tokens)
    check_logdir(logdir)

    def say(text: str) -> None:
        typer.echo(text, err=as_json)

    controllers = demo_controllers()
    drafters = drafters_of(drafter)
    say(
        f"A load step under {len(controllers)} policies: {load.low}, then {load.high}, then {load.low} "
        f"requests at a time, {load.duration} engine steps each.\n"
        f"The same requests for each, and {config.device_kv_mib:g} MiB of device memory for KV. Model: "
        f"{config.model}."
    )
    before, after = _progress(say, len(controllers) * len(drafters))
    comparison = compare_controllers(
        config, controllers, task, before, after, drafters, logdir=logdir
    )
    emit_json(_document(comparison), to_stdout=as_json, path=output)
    if not as_json:
        _print_continuation(next(task.workload.requests()).prompt, comparison.runs[0])
        write_text(f"\n{comparison.phases(task.slo)}\n{_READING}{against(comparison)}\n")
    say(verdict(comparison))
    write_logs(logdir, comparison.labelled, task, quiet=as_json)
    report_differences(comparison)
    finish(comparison.failed)


def drafters_of(named: list[str] | None) -> tuple[str, ...]:
    """Without a drafter first, then what was named. UserError for a name that there is not."""
    from kvpolicy.speculative import registry

    for name in named or ():
        registry.check(name)
    return tuple(dict.fromkeys((registry.NONE, *(named or ()))))


def _config(device: str) -> tuple[EngineConfig, Load]:
    """The engine and the load that suits the device. UserError for a device that there is not."""
    values: dict[str, Any] = {"device": device, "clock": "steps"}
    EngineConfig(**values)
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    load = LOADS[device]
    values |= {
        "device_kv_mib": load.device_kv_mib,
        "max_concurrency": load.high,
        "prefill_chunk": load.prefill_chunk,
    }
    return EngineConfig(**values), load


def _task(load: Load, max_new_tokens: int | None) -> Task:
    from kvpolicy.workloads import make

    tokens = load.output_tokens if max_new_tokens is None else max_new_tokens
    workload = make(load.uri, "steps", output_tokens=tokens)
    return Task(workload, SamplingParams(), Slo(ttft=load.ttft_steps / 1e3))


def against(comparison: Comparison, name: str = "adaptive", other: str = "hisparse") -> str:
    """What one controller missed and let wait in each phase, beside another; nothing without both."""
    runs = comparison.labelled
    if name not in runs or other not in runs:
        return ""
    parts = []
    for mine, its in zip(runs[name].phases, runs[other].phases, strict=True):
        missed = [shown(phase.miss_rate_selected, "{:.1%}") for phase in (mine, its)]
        waits = [shown(phase.longest_wait_steps, "{:,.0f}") for phase in (mine, its)]
        if mine.level:
            parts.append(f"  {mine.name}: {missed[0]} ({missed[1]}), {waits[0]} steps ({waits[1]})")
    return "\n".join([f"Missed by {name} (by {other}), and the longest wait:", *parts, ""])


def verdict(comparison: Comparison) -> str:
    """The line that the demo is about. Each generated token was decided by one row of logits."""
    first = comparison.runs[0].outputs[: comparison.compared]
    tokens = sum(len(output.tokens) for output in first)
    digest = fingerprint(comparison)
    answer = "yes" if comparison.equal else "NO"
    what = "runs" if any(d != "none" for d in comparison.drafters) else "controllers"
    return (
        f"outputs bit-identical: {answer} ({len(first)} requests x {len(comparison.runs)} {what}, "
        f"{tokens * len(comparison.runs):,} logit rows, sha256 {digest[:16]})"
    )


def fingerprint(comparison: Comparison) -> str:
    """One SHA-256 over the logits fingerprints of the requests that every run served, in order."""
    outputs = comparison.runs[0].outputs[: comparison.compared]
    return hashlib.sha256("".join(o.logits_sha256 for o in outputs).encode()).hexdigest()


def _progress(
    say: Callable[[str], None], total: int
) -> tuple[Callable[[int, str], None], Callable[[int, Decoded], None]]:
    """Lines around each run, for terminals and logs alike."""
    started = 0.0

    def before(index: int, name: str) -> None:
        nonlocal started
        started = time.monotonic()
        say(f"[{index + 1}/{total}] {name} ...")

    def after(index: int, run: Decoded) -> None:
        tokens = sum(len(output.tokens) for output in run.outputs)
        seconds = time.monotonic() - started
        say(f"      {len(run.outputs)} requests, {tokens:,} tokens in {seconds:.1f} s")

    return before, after


def _document(comparison: Comparison) -> dict[str, Any]:
    return {
        **comparison.to_dict(fingerprint=True, under_load=True),
        "bit_identical": comparison.equal,
        "logits_sha256": fingerprint(comparison),
    }


def _print_continuation(prompt: bytes, run: Decoded) -> None:
    """The end of the first prompt, dimmed, and what the model wrote after it, highlighted."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    tail = prompt.decode(errors="replace")[-_TAIL_CHARACTERS:]
    tail = tail[tail.find("\n") + 1 :]
    for title, text, style in (
        ("end of the first prompt", tail, "dim"),
        ("what the model wrote", run.outputs[0].text, "bold green"),
    ):
        console.print(Text(_rule(title), style="dim"))
        console.print(Text(printable(text), style=style))
    console.print(Text("-" * _RULE_WIDTH, style="dim"))


def _rule(title: str) -> str:
    return f"-- {title} ".ljust(_RULE_WIDTH, "-")
