"""`kvpolicy demo`: the same held-out text under three ways to hold the cache, one output."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpolicy.cli.compare import Comparison, compare_controllers, report_differences
from kvpolicy.cli.output import check_output, emit_json, printable, write_text
from kvpolicy.cli.run import Decoded, finish
from kvpolicy.config import EngineConfig, SamplingParams
from kvpolicy.errors import KvPolicyError

__all__ = ["CONTROLLERS", "DemoPrompt", "demo_command", "demo_prompts"]

# Everything on the device, twice the top-k of the model (256 rows), and just one top-k of it.
CONTROLLERS = ("resident", "hisparse", "hisparse:device_buffer_rows=128")

_PROMPTS = 4
_SMALLEST, _LARGEST = 2048, 3072  # bytes: long enough that a cache of 256 rows misses
_SKIP = 4096  # bytes at the head of each file: licences and imports
_TAIL_CHARACTERS = 240
_RULE_WIDTH = 72
_LEGEND = (
    "fetched: rows copied from host memory for attention; optional: MiB of rows kept on the device "
    "beyond\nwhat decoding needs (mean); tokens/s includes the prompts, and on a CPU says little."
)


@dataclass(frozen=True)
class DemoPrompt:
    """A piece of a text that the embedded model was not trained on."""

    source: str
    content: bytes


def demo_prompts() -> list[DemoPrompt]:
    """Whole lines from the middle of four held-out files, 2 to 3 KB each."""
    folder = files("kvpolicy.models").joinpath("tiny_dsa", "heldout")
    found = (f for f in folder.iterdir() if f.name.endswith(".txt"))
    texts = sorted(found, key=lambda f: (".py" not in f.name, f.name))  # source code first
    if len(texts) < _PROMPTS:
        raise KvPolicyError(f"the installation lacks its held-out texts ({len(texts)} found)")
    prompts = []
    for i, text in enumerate(texts[:: len(texts) // _PROMPTS][:_PROMPTS]):
        size = _SMALLEST + (_LARGEST - _SMALLEST) * i // (_PROMPTS - 1)
        content = text.read_bytes()
        start = content.index(b"\n", _SKIP) + 1
        end = content.rindex(b"\n", start, start + size) + 1
        prompts.append(DemoPrompt(text.name.removesuffix(".txt"), content[start:end]))
    return prompts


def demo_command(
    device: Annotated[
        str, typer.Option("--device", metavar="auto|cpu|cuda", help="Where to compute.")
    ] = "auto",
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", metavar="N", help="Tokens per prompt.")
    ] = 96,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Also write the JSON to a file.")
    ] = None,
) -> None:
    """Decode held-out text under three cache policies and check that the output is one.

    The whole history on the device, a small buffer of it, and a buffer of one selection: memory and
    traffic differ, every token and every logit must not. Exit code 1 if one does.
    """
    check_output(output)
    prompts = demo_prompts()
    settings: dict[str, Any] = {"model": "tiny-dsa", "device": device}
    config = EngineConfig(**settings)
    sampling = SamplingParams(max_new_tokens=max_new_tokens)

    def say(text: str) -> None:
        typer.echo(text, err=as_json)

    before, after = _phases(say)
    total = sum(len(prompt.content) for prompt in prompts)
    say(f"tiny-dsa, {len(prompts)} prompts of held-out text, {total:,} bytes, greedy decoding")
    contents = [prompt.content for prompt in prompts]
    comparison = compare_controllers(config, CONTROLLERS, contents, sampling, before, after)
    emit_json(_document(comparison, prompts), to_stdout=as_json, path=output)
    if not as_json:
        _print_continuation(prompts[0], comparison.runs[0])
        write_text(f"\n{comparison.table()}\n{_LEGEND}\n")
    say(verdict(comparison))
    report_differences(comparison)
    finish(comparison.failed)


def verdict(comparison: Comparison) -> str:
    """The line that the demo is about. Each generated token was decided by one row of logits."""
    first = comparison.runs[0].outputs
    tokens = sum(len(output.tokens) for output in first)
    digest = fingerprint(comparison.runs[0])
    answer = "yes" if comparison.equal else "NO"
    return (
        f"outputs bit-identical: {answer} ({tokens:,} tokens, "
        f"{tokens * len(comparison.runs):,} logit rows of {len(comparison.runs)} runs, "
        f"sha256 {digest[:16]})"
    )


def fingerprint(run: Decoded) -> str:
    """One SHA-256 over the logits fingerprints of all requests, in order."""
    joined = "".join(output.logits_sha256 for output in run.outputs)
    return hashlib.sha256(joined.encode()).hexdigest()


def _phases(
    say: Callable[[str], None],
) -> tuple[Callable[[int, str], None], Callable[[int, Decoded], None]]:
    """Lines around each run, for terminals and logs alike."""
    started = 0.0

    def before(index: int, name: str) -> None:
        nonlocal started
        started = time.monotonic()
        say(f"[{index + 1}/{len(CONTROLLERS)}] {name} ...")

    def after(index: int, run: Decoded) -> None:
        tokens = sum(len(output.tokens) for output in run.outputs)
        say(f"      {tokens:,} tokens in {time.monotonic() - started:.1f} s")

    return before, after


def _document(comparison: Comparison, prompts: list[DemoPrompt]) -> dict[str, Any]:
    return {
        **comparison.to_dict(fingerprint=True),
        "prompts": [{"source": p.source, "bytes": len(p.content)} for p in prompts],
        "bit_identical": comparison.equal,
        "logits_sha256": fingerprint(comparison.runs[0]),
    }


def _print_continuation(prompt: DemoPrompt, run: Decoded) -> None:
    """The end of the prompt, dimmed, and what the model wrote after it, highlighted."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    tail = prompt.content.decode(errors="replace")[-_TAIL_CHARACTERS:]
    tail = tail[tail.find("\n") + 1 :]
    console.print(Text(_rule(f"end of the prompt ({prompt.source})"), style="dim"))
    console.print(Text(printable(tail).rstrip("\n"), style="dim"))
    console.print(Text(_rule("continuation"), style="dim"))
    console.print(Text(printable(run.outputs[0].text), style="bold green"))
    console.print(Text("-" * _RULE_WIDTH, style="dim"))


def _rule(title: str) -> str:
    return f"-- {title} ".ljust(_RULE_WIDTH, "-")
