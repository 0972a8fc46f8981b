"""`kvpolicy compare`: the same prompts under several controllers, with the same memory to use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import typer

from kvpolicy.cli.options import Options, takes
from kvpolicy.cli.output import (
    Column,
    check_output,
    count,
    decimal,
    emit_json,
    mib,
    percent,
    table,
    warn,
    write_text,
)
from kvpolicy.cli.prompts import read_prompts
from kvpolicy.cli.run import Decoded, decode, finish
from kvpolicy.cli.settings import resolve
from kvpolicy.config import EngineConfig, SamplingParams
from kvpolicy.errors import UserError

__all__ = ["DEFAULT_CONTROLLERS", "Comparison", "compare_controllers"]

DEFAULT_CONTROLLERS = ("resident", "hisparse")

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
    """Runs of the same prompts; `differences` holds one line per controller that deviates."""

    controllers: tuple[str, ...]
    runs: tuple[Decoded, ...]
    differences: Mapping[str, str]

    @property
    def equal(self) -> bool:
        return not self.differences

    @property
    def failed(self) -> list[int]:
        """Ids of requests that ended in an error under any controller."""
        return sorted({request for run in self.runs for request in run.failed})

    def table(self) -> str:
        """One row per controller, the outputs' verdict last."""
        rows = [
            [
                name,
                *(show(run.metrics) for _, show in COLUMNS),
                "DIFFERENT" if name in self.differences else "equal",
            ]
            for name, run in zip(self.controllers, self.runs, strict=True)
        ]
        return table(["controller", *(heading for heading, _ in COLUMNS), "outputs"], rows)

    def to_dict(self, fingerprint: bool) -> dict[str, Any]:
        results = [
            {
                "controller": name,
                "drafter": "none",
                "requests": run.requests(fingerprint),
                "metrics": run.metrics,
                "outputs_equal": name not in self.differences,
            }
            for name, run in zip(self.controllers, self.runs, strict=True)
        ]
        record = {**self.runs[0].record, "controllers": list(self.controllers)}
        return {"results": results, "outputs_equal": self.equal, "record": record}


def compare_controllers(
    config: EngineConfig,
    controllers: Sequence[str],
    prompts: Sequence[bytes],
    sampling: SamplingParams,
    before: Callable[[int, str], None] = lambda index, name: None,
    after: Callable[[int, Decoded], None] = lambda index, run: None,
) -> Comparison:
    """Run the prompts under each controller in turn; tokens and logits must agree bit for bit.

    Every name is resolved before the first run. The first controller is what the others are
    compared with. before and after are told of each run.
    """
    from kvpolicy.controllers import make

    for name in controllers:
        make(name)
    runs: list[Decoded] = []
    for index, name in enumerate(controllers):
        before(index, name)
        settings = EngineConfig(**{**config.model_dump(by_alias=True), "controller": name})
        try:
            runs.append(decode(settings, prompts, sampling, f"{index + 1}/{len(controllers)}"))
        except UserError as error:
            raise UserError(f"controller {name!r}: {error}") from None
        after(index, runs[-1])
    pairs = zip(controllers, runs, strict=True)
    found = ((name, first_difference(runs[0], run)) for name, run in pairs)
    differences = {name: text for name, text in found if text}
    return Comparison(tuple(controllers), tuple(runs), differences)


def first_difference(reference: Decoded, other: Decoded) -> str | None:
    """Where two runs of the same prompts part, or None when they are bitwise equal."""
    for index, (a, b) in enumerate(zip(reference.outputs, other.outputs, strict=True)):
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
    """Run the same prompts under several controllers, each with the same memory to use.

    Repeat --controller for one row each (resident and hisparse when none is given). A policy may
    change speed and memory, never the output: tokens and logits are compared bit for bit, and
    a difference ends with exit code 1.
    """
    check_output(options.output)
    settings = resolve(options)
    prompts = read_prompts(
        options.prompts or (), options.prompt_file or (), bos=settings.engine.bos
    )
    comparison = compare_controllers(
        settings.engine, settings.controllers or DEFAULT_CONTROLLERS, prompts, settings.sampling
    )
    document = comparison.to_dict(options.fingerprint)
    emit_json(document, to_stdout=options.as_json, path=options.output)
    if not options.as_json:
        write_text(comparison.table())
    report_differences(comparison)
    finish(comparison.failed)
