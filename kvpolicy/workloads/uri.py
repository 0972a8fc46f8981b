"""Workload URIs: ``synthetic:NAME?key=value&key=value`` and ``trace:NAME-OR-PATH?...``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple
from urllib.parse import quote, unquote

from pydantic import BeforeValidator, Field, PlainSerializer

from kvpolicy.config import Settings
from kvpolicy.errors import UserError

__all__ = ["Length", "Parameters", "Span", "Uri", "parse_uri"]

# A million requests is a day at 12 per second; more is a slip of the keyboard.
MAX_REQUESTS = 1_000_000
MAX_LENGTH = 1 << 24


@dataclass(frozen=True, slots=True)
class Uri:
    """A URI in its parts. text: as it was written. name: behind the scheme."""

    text: str
    scheme: str
    name: str
    query: dict[str, str] = field(default_factory=dict)


def parse_uri(text: str) -> Uri:
    """Split a URI; UserError if it has no scheme, or its query is no list of key=value."""
    scheme, colon, rest = text.partition(":")
    name, _, query = rest.partition("?")
    if not colon or not name:
        raise UserError(
            f"workload {text!r}: must be synthetic:NAME?key=value&... or trace:PATH?..."
        )
    values: dict[str, str] = {}
    for item in filter(None, query.split("&")):
        key, separator, value = item.partition("=")
        key = unquote(key).strip().replace("-", "_")
        if not separator or not key:
            raise UserError(f"workload {text!r}: {item!r} must be key=value")
        if key in values:
            raise UserError(f"workload {text!r}: {key} is given twice")
        values[key] = unquote(value)
    return Uri(text, scheme, unquote(name), values)


class Span(NamedTuple):
    """Lengths from ``low`` to ``high``, both included, each as likely."""

    low: int
    high: int

    def at(self, uniform: float) -> int:
        """The length that a number in [0, 1) stands for."""
        return self.low + int(uniform * (self.high - self.low + 1))

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


def _span(value: Any) -> Any:
    """``N`` or ``LOW-HIGH``, as text or number."""
    if isinstance(value, Span):
        return value
    low, dash, high = str(value).partition("-")
    try:
        span = Span(int(low), int(high) if dash else int(low))
    except ValueError:
        span = Span(0, 0)
    if not 1 <= span.low <= span.high <= MAX_LENGTH:
        raise ValueError(f"should be a number from 1 to {MAX_LENGTH}, or two as LOW-HIGH")
    return span


Length = Annotated[Span, BeforeValidator(_span), PlainSerializer(str)]
"""A field that reads ``N`` or ``LOW-HIGH``."""

Rate = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
Duration = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Scale = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Parameters(Settings):
    """What every workload takes.

    duration: length of the workload (of each phase, where it has levels), in seconds or engine
    steps, whichever the clock counts. prompt_bytes, output_tokens: a number or LOW-HIGH. text: a
    file or folder that prompts are cut from. seed: of all draws, and of every request's sampling.
    scale: factor on prompt lengths and output lengths; output_scale: on the latter instead.
    """

    duration: Duration
    prompt_bytes: Length | None = None
    output_tokens: Length | None = None
    text: str | None = None
    seed: Seed = 0
    scale: Scale = 1.0
    output_scale: Scale | None = None

    def prompt_size(self, length: float) -> int:
        """A prompt length after scaling, at least 1."""
        return min(max(round(length * self.scale), 1), MAX_LENGTH)

    def output_size(self, length: float) -> int:
        """An output length after scaling, at least 1."""
        scale = self.scale if self.output_scale is None else self.output_scale
        return min(max(round(length * scale), 1), MAX_LENGTH)

    def query(self) -> str:
        """The parameters as a URI's query, every default written out."""
        values = self.model_dump(exclude_none=True).items()
        shown = (
            (k, f"{v:g}" if isinstance(v, float) else quote(str(v), safe="/")) for k, v in values
        )
        return "&".join(f"{key}={value}" for key, value in shown)
