"""Request traces: the published formats, and the compact one of the traces that are shipped.

A trace is three columns: when each request came, tokens in, tokens out.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvpolicy.errors import UserError, unknown_name

__all__ = ["SHIPPED", "Shipped", "Trace", "load_trace", "read_trace", "write_compact"]

COMPACT = ("time_s", "in_tokens", "out_tokens")

# Conversations of the agentic trace have no common clock: one starts every so many seconds, which
# keeps about 60 going once the median one (3,589 s) has come round.
CONVERSATION_GAP_S = 60.0


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests by time. times: seconds from the first, float64 [n], ascending. inputs, outputs:
    tokens, int64 [n], at least 1."""

    times: NDArray[np.float64]
    inputs: NDArray[np.int64]
    outputs: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.times)


@dataclass(frozen=True, slots=True)
class Shipped:
    """A trace inside the package. scale, output_scale: what brings its mean lengths to about
    512 bytes and 64 tokens."""

    file: str
    about: str
    scale: float
    output_scale: float


SHIPPED: Mapping[str, Shipped] = {
    "mooncake-conversation": Shipped(
        "mooncake_conversation.csv.gz",
        "an hour of Kimi conversations: 12,031 requests, 12,035 in, 343 out (Mooncake, FAST'25)",
        scale=0.043,
        output_scale=0.19,
    ),
    "mooncake-synthetic": Shipped(
        "mooncake_synthetic.csv.gz",
        "multi-turn long-context data, Poisson: 3,993 requests, 15,325 in, 149 out (Mooncake)",
        scale=0.033,
        output_scale=0.43,
    ),
    "azure-conv": Shipped(
        "azure_conv.csv.gz",
        "an hour of Azure chat: 19,366 requests, 1,155 in, 211 out (Azure 2023, Splitwise)",
        scale=0.44,
        output_scale=0.3,
    ),
    "azure-code": Shipped(
        "azure_code.csv.gz",
        "an hour of Azure code completion: 8,819 requests, 2,048 in, 28 out (Azure 2023, Splitwise)",
        scale=0.25,
        output_scale=2.3,
    ),
    "agentic-coding": Shipped(
        "agentic_coding.csv.gz",
        "710 coding agents, one starting every minute: 49,334 requests, 122,379 in, 440 out",
        scale=0.0042,
        output_scale=0.145,
    ),
}
"""Traces inside the package; data/NOTICE has sources and licences."""


@cache
def _shipped(name: str) -> Trace:
    """Read once: environments draw thousands of episodes of one trace."""
    packed = files("kvpolicy.workloads").joinpath("data", SHIPPED[name].file).read_bytes()
    trace = read_trace(packed, name)
    for column in (trace.times, trace.inputs, trace.outputs):
        column.setflags(write=False)
    return trace


def load_trace(name: str) -> Trace:
    """A shipped trace by name, or one from a file in any known format. UserError otherwise."""
    if name in SHIPPED:
        return _shipped(name)
    path = Path(name).expanduser()
    if not path.exists() and not path.suffix and "/" not in name:
        raise unknown_name("trace", name, [*SHIPPED, "PATH"])
    try:
        return read_trace(path.read_bytes(), name)
    except OSError as error:
        raise UserError(f"trace {name!r}: {error.strerror or error}") from None


def read_trace(content: bytes, name: str) -> Trace:
    """A trace from a file's bytes, gzip or not: CSV of Azure, of kv-cache-tester or of our own
    (``time_s,in_tokens,out_tokens``), or JSON lines of Mooncake. name: for errors.

    Requests are put in order of time; lengths below 1 count as 1.
    """
    try:
        text = (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode()
        rows = list(_rows(text))
        if not rows:
            raise ValueError("it holds no requests")
        table = np.array(rows, dtype=np.float64)
        if not np.isfinite(table).all() or (np.abs(table) > 1e15).any():
            raise ValueError("a number is out of range")
    except (ValueError, KeyError, TypeError, OSError, EOFError, csv.Error) as error:
        reason = f"column {error} is missing" if isinstance(error, KeyError) else str(error)
        raise UserError(f"trace {name!r} is in no known format: {reason}") from None
    table = table[np.argsort(table[:, 0], kind="stable")]
    lengths = np.maximum(table[:, 1:].astype(np.int64), 1)
    return Trace(table[:, 0] - table[0, 0], lengths[:, 0], lengths[:, 1])


def write_compact(trace: Trace) -> bytes:
    """The shipped format: gzip of a CSV, times in whole milliseconds. The same bytes every time."""
    lines = [",".join(COMPACT)]
    columns = (trace.times, trace.inputs, trace.outputs)
    lines += [f"{time:.3f},{given},{made}" for time, given, made in zip(*columns, strict=True)]
    return gzip.compress("\n".join([*lines, ""]).encode(), mtime=0)


Row = tuple[float, float, float]


def _rows(text: str) -> Iterator[Row]:
    """(seconds, tokens in, tokens out) of every request."""
    if text.lstrip().startswith("{"):
        for line in filter(str.strip, text.splitlines()):
            item = json.loads(line)
            yield item["timestamp"] / 1e3, item["input_length"], item["output_length"]
        return
    reader = csv.DictReader(io.StringIO(text))
    columns = set(reader.fieldnames or ())
    for needed, read in _CSV.items():
        if columns.issuperset(needed):
            yield from read(reader)
            return
    known = "; ".join(",".join(needed) for needed in _CSV)
    raise ValueError(f"its columns are none of {known}")


def _azure(rows: Iterable[Mapping[str, str]]) -> Iterator[Row]:
    for row in rows:
        time = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
        yield time, float(row["ContextTokens"]), float(row["GeneratedTokens"])


def _agentic(rows: Iterable[Mapping[str, str]]) -> Iterator[Row]:
    starts: dict[str, float] = {}
    for row in rows:
        start = starts.setdefault(row["trace"], len(starts) * CONVERSATION_GAP_S)
        yield start + float(row["t_s"]), float(row["in_tokens"]), float(row["out_tokens"])


def _compact(rows: Iterable[Mapping[str, str]]) -> Iterator[Row]:
    for row in rows:
        time, given, made = (float(row[name]) for name in COMPACT)
        if math.isnan(time):
            raise ValueError("a time is not a number")
        yield time, given, made


_CSV: Mapping[tuple[str, ...], Callable[[Iterable[Mapping[str, str]]], Iterator[Row]]] = {
    COMPACT: _compact,
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _azure,
    ("trace", "t_s", "in_tokens", "out_tokens"): _agentic,
}
"""Columns that tell a CSV format -> how its rows are read."""
