"""Reads recordings: tables as numpy columns, selections on demand."""

from __future__ import annotations

import io
import json
import lzma
import struct
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpolicy.errors import UserError
from kvpolicy.recording.layout import (
    KINDS,
    LANE_COLUMNS,
    REQUEST_COLUMNS,
    SEGMENT_COLUMNS,
    STEP_COLUMNS,
    Header,
)
from kvpolicy.recording.packing import unpack

__all__ = ["Recording", "Rows"]

Column = NDArray[Any]
Numbers = NDArray[np.int64]
Table = dict[str, Column]

# What zipfile, lzma, numpy and json say of bytes that nobody wrote like that.
_DAMAGE = (
    *(zipfile.BadZipFile, EOFError, lzma.LZMAError, zlib.error, ValueError, OSError),
    *(RuntimeError, OverflowError, struct.error, IndexError, TypeError),
    *(SyntaxError, MemoryError),
)
SHIPPED = Path(__file__).parent / "data"
SEED, DECODE = KINDS.index("seed"), KINDS.index("decode")


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one request whose selections are kept, in order; int64 [n] each.

    at: row of the step table. segment: row of the segment table. position: in the request. decode,
    accepted: bool; not decode: the last row of the prompt.
    """

    at: Numbers
    segment: Numbers
    position: Numbers
    decode: NDArray[np.bool_]
    accepted: NDArray[np.bool_]
    back: NDArray[np.bool_]


def find(name: str | Path) -> Path:
    """A file as it is, or the recording of this name that comes with the package."""
    path = Path(name)
    own = SHIPPED / f"{name}.npz"
    return own if not path.exists() and path.name == str(name) and own.exists() else path


class Recording:
    """A recording, read from a file, or from the package by its name (``tiny-dsa-step``).

    header: stores and selectors. record: the run record, with ``metrics`` of the run and its
    ``cache_rule``. steps, segments, requests: tables by column name (docs/recordings.md); ``segments``
    also has ``budgets``, int32 [segments, stores], -1 where every entry was resident. Selections stay
    packed in memory until they are asked for.

    Raises UserError, naming the file, for anything that is no complete recording of this version.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = find(path)
        try:
            with zipfile.ZipFile(self.path) as archive:
                self._read(_Members(archive))
        except UserError as error:
            raise UserError(f"recording {str(self.path)!r}: {error}") from None
        except FileNotFoundError:
            raise UserError(f"recording {str(self.path)!r}: there is no such file") from None
        except KeyError as error:
            raise UserError(
                f"recording {str(self.path)!r}: it is incomplete ({error.args[0]})"
            ) from None
        except _DAMAGE as error:
            text = " ".join(str(error).split()) or type(error).__name__
            raise UserError(
                f"recording {str(self.path)!r}: it is damaged or cut off ({text})"
            ) from None

    # --- reading ---------------------------------------------------------------------------------

    def _read(self, members: Mapping[str, Column]) -> None:
        self.header = Header.from_dict(_json(members["header"]))
        end = _json(members["end"])
        self.record: dict[str, Any] = end["record"]
        chunks = [f"{i:05d}" for i in range(end["chunks"])]
        steps = [_table(members, f"{c}.step", STEP_COLUMNS) for c in chunks]
        segments = [self._segments(members, c) for c in chunks]
        first = 0
        for step, segment in zip(steps, segments, strict=True):
            _check_range("at", segment["at"], len(step["step"]))
            segment["at"] = segment["at"] + first
            first += len(step["step"])
        self.steps = _joined(steps, STEP_COLUMNS)
        self.steps["seconds"] = members["seconds"]
        _check_lengths("step", self.steps)
        self.segments = _joined(segments, [*SEGMENT_COLUMNS, "budgets"])
        _check_range("kind", self.segments["kind"], len(KINDS))
        self.requests = _table(members, "request", REQUEST_COLUMNS)
        self._packed: dict[tuple[int, int], list[tuple[Column, Numbers]]] = defaultdict(list)
        for chunk in chunks:
            self._lanes(members, chunk)
        self._rows = self._rows_by_request()

    def _segments(self, members: Mapping[str, Column], chunk: str) -> Table:
        table = _table(members, f"{chunk}.segment", SEGMENT_COLUMNS)
        budgets = members[f"{chunk}.segment.budgets"]
        if budgets.shape != (len(table["at"]), len(self.header.stores)):
            raise UserError(f"budgets of shape {budgets.shape} do not fit its segments and stores")
        table["budgets"] = budgets
        return table

    def _lanes(self, members: Mapping[str, Column], chunk: str) -> None:
        """Cut a chunk's packed selections into those of each request and selector."""
        lanes = _table(members, f"{chunk}.lane", LANE_COLUMNS)
        _check_range("selector", lanes["selector"], len(self.header.selectors))
        counts, gaps = members[f"{chunk}.counts"], members[f"{chunk}.gaps"]
        if lanes["rows"].sum() != len(counts) or lanes["bytes"].sum() != len(gaps):
            raise UserError(f"chunk {chunk}: selections and their table do not fit together")
        parts = np.split(counts, np.cumsum(lanes["rows"])[:-1])
        bytes_ = np.split(gaps, np.cumsum(lanes["bytes"])[:-1])
        names = zip(lanes["request"].tolist(), lanes["selector"].tolist(), strict=True)
        for name, own, count in zip(names, bytes_, parts, strict=False):
            self._packed[name].append((own, count.astype(np.int64)))

    def _rows_by_request(self) -> dict[int, Rows]:
        own = self.segments
        rows = np.where(own["kind"] == DECODE, own["count"], own["kind"] == SEED)
        segment = np.repeat(np.arange(len(rows)), rows)
        inside = np.arange(segment.size) - np.repeat(np.cumsum(rows) - rows, rows)
        decode = own["kind"][segment] == DECODE
        # The one row that is kept of a prompt is the segment's last.
        inside = np.where(decode, inside, own["count"][segment] - 1)
        owner = own["request"][segment]
        order = np.argsort(owner, kind="stable")
        names, starts = np.unique(owner[order], return_index=True)
        found = {}
        for name, mine in zip(names.tolist(), np.split(order, starts[1:]), strict=True):
            at = segment[mine]
            found[name] = Rows(
                at=own["at"][at],
                segment=at,
                position=own["position"][at] + inside[mine],
                decode=decode[mine],
                accepted=inside[mine] < own["accepted"][at],
                back=decode[mine] & (own["joined"][at] > 0),
            )
        for (request, _), parts in self._packed.items():
            here = sum(len(count) for _, count in parts)
            if request not in found or here != len(found[request].at):
                raise UserError(f"request {request} has selections that no segment accounts for")
        return found

    # --- asking ----------------------------------------------------------------------------------

    @property
    def request_ids(self) -> tuple[int, ...]:
        """Requests of which selections are kept, ascending."""
        return tuple(sorted(self._rows))

    @property
    def topk(self) -> int:
        """The widest selection."""
        return max(selector.topk for selector in self.header.selectors)

    def rows(self, request: int) -> Rows:
        """The rows of a request whose selections are kept. KeyError for a request without any."""
        return self._rows[request]

    def selections(self, request: int, selector: int) -> NDArray[np.int32]:
        """What a selector chose for each of :meth:`rows`: int32 [n, topk], ascending, -1 after the
        last one. Unpacked anew at each call. UserError if the bytes are damaged."""
        k = self.header.selectors[selector].topk
        parts = [
            unpack(own, counts, k) for own, counts in self._packed.get((request, selector), [])
        ]
        return np.concatenate(parts) if parts else np.empty((0, k), dtype=np.int32)


class _Members(Mapping[str, Column]):
    """Arrays of an npz archive by name, each read when it is asked for. Pickles are refused."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive

    def __getitem__(self, name: str) -> Column:
        with io.BytesIO(self._archive.read(f"{name}.npy")) as content:
            array: Column = np.lib.format.read_array(content, allow_pickle=False)
        return array

    def __iter__(self) -> Iterator[str]:
        return (name.removesuffix(".npy") for name in self._archive.namelist())

    def __len__(self) -> int:
        return len(self._archive.namelist())


def _json(column: Column) -> Any:
    return json.loads(column.astype(np.uint8).tobytes())


def _table(members: Mapping[str, Column], prefix: str, columns: Mapping[str, Any]) -> Table:
    table = {name: members[f"{prefix}.{name}"] for name in columns}
    for name, kind in columns.items():
        if table[name].dtype != np.dtype(kind) or table[name].ndim != 1:
            raise UserError(f"column {prefix}.{name} is {table[name].dtype}, not {np.dtype(kind)}")
    _check_lengths(prefix, table)
    return table


def _joined(tables: list[Table], columns: Any) -> Table:
    """The tables of all chunks as one."""
    names = list(columns)
    if not tables:
        return {
            name: np.empty((0, 0) if name == "budgets" else 0, dtype=np.int64) for name in names
        }
    return {name: np.concatenate([table[name] for table in tables]) for name in names}


def _check_lengths(name: str, table: Table) -> None:
    lengths = {len(column) for column in table.values()}
    if len(lengths) > 1:
        raise UserError(f"the columns of its {name} table have {sorted(lengths)} rows")


def _check_range(name: str, column: Column, most: int) -> None:
    if column.size and (column.min() < 0 or column.max() >= most):
        raise UserError(
            f"column {name} holds {column.min()} to {column.max()}: allowed 0 to {most - 1}"
        )
