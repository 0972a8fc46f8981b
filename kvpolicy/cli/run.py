"""`kvpolicy run`: decode prompts and print the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from kvpolicy.cli import interrupts
from kvpolicy.cli.options import Options, takes
from kvpolicy.cli.output import check_output, emit_json, printable, summary, warn, write_text
from kvpolicy.cli.progress import step_progress
from kvpolicy.cli.prompts import read_prompts
from kvpolicy.cli.settings import resolve
from kvpolicy.config import EngineConfig, SamplingParams
from kvpolicy.errors import UserError

if TYPE_CHECKING:
    from kvpolicy.engine.request import RequestOutput

__all__ = ["Decoded", "decode", "run_command"]


@dataclass(frozen=True)
class Decoded:
    """What one engine made of the prompts."""

    outputs: list[RequestOutput]
    metrics: dict[str, Any]
    record: dict[str, Any]

    def requests(self, fingerprint: bool) -> list[dict[str, Any]]:
        """The outputs as JSON records."""
        return [output.to_dict(fingerprint=fingerprint) for output in self.outputs]

    @property
    def failed(self) -> list[int]:
        """Ids of the requests that ended in an error."""
        return [output.id for output in self.outputs if output.finish_reason == "error"]


def decode(
    config: EngineConfig, prompts: Sequence[bytes], sampling: SamplingParams, label: str
) -> Decoded:
    """Run all prompts through a new engine, with a progress display, and close it."""
    with interrupts.loading():
        from kvpolicy.engine.engine import Engine

        engine = Engine(config)
    with engine, step_progress(label) as on_step:
        outputs = engine.generate(prompts, sampling, on_step=on_step)
        return Decoded(outputs, engine.metrics(), engine.record())


@takes(Options)
def run_command(options: Options) -> None:
    """Decode prompts and print the text, or the result as JSON.

    Settings come from the defaults, --config, --set and the options below; the later one wins.
    """
    check_output(options.output)
    settings = resolve(options)
    if len(settings.controllers) > 1:
        raise UserError("run takes one --controller; to run several, use 'kvpolicy compare'")
    prompts = read_prompts(
        options.prompts or (), options.prompt_file or (), bos=settings.engine.bos
    )
    result = decode(settings.engine, prompts, settings.sampling, label="run:")
    document = {
        "requests": result.requests(options.fingerprint),
        "metrics": result.metrics,
        "record": result.record,
    }
    emit_json(document, to_stdout=options.as_json, path=options.output)
    if not options.as_json:
        write_text(_report(result, options.fingerprint))
    finish(result.failed)


def finish(failed: Sequence[int]) -> None:
    """Exit with 1 when requests ended in an error."""
    if failed:
        warn(f"error: requests that failed: {', '.join(map(str, failed))}")
        raise typer.Exit(1)


def _report(result: Decoded, fingerprint: bool) -> str:
    lines = []
    for output in result.outputs:
        lines.append(
            f"== request {output.id}: {output.prompt_tokens} prompt tokens, "
            f"{len(output.tokens)} generated, {output.finish_reason}"
        )
        if fingerprint:
            lines.append(f"   logits sha256 {output.logits_sha256}")
        lines += [printable(output.text), ""]
    return "\n".join(lines) + "\n" + summary(result.metrics)
