"""Writes a recording piece by piece: an npz file whose members come in chunks, with bounded memory."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpolicy.errors import UserError
from kvpolicy.recording.layout import LANE_COLUMNS, REQUEST_COLUMNS, Header
from kvpolicy.recording.packing import pack

__all__ = ["Lane", "RecordingWriter"]

Column = NDArray[Any]
Lane = tuple[int, int, NDArray[np.int32]]
"""(request, selector, entries [n, topk]): consecutive selections of one selector for one request."""

# A fixed time stamp: equal recordings are equal bytes.
_EPOCH = (1980, 1, 1, 0, 0, 0)


class RecordingWriter:
    """Appends chunks to a file that appears under its name when :meth:`close` succeeds.

    Compression runs in a thread of its own, one chunk behind. UserError if the file cannot be written.
    As a context manager it drops what is unfinished when an error leaves the block.
    """

    def __init__(self, path: Path, header: Header) -> None:
        header.check()
        self.path = path
        self.chunks = 0
        self._part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            # LZMA finds a row's repetition of the row before: a fifth smaller than deflate.
            self._zip = zipfile.ZipFile(self._part, "w", zipfile.ZIP_LZMA)
        except OSError as error:
            raise self._cannot(error) from None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvpolicy-recording")
        self._pending: Future[None] | None = None
        self._open = True
        self._later(self._write_json, "header", header.to_dict())

    def add(
        self, steps: Mapping[str, Column], segments: Mapping[str, Column], lanes: list[Lane]
    ) -> None:
        """Append a chunk. steps, segments: the columns of ``layout``; segments also ``budgets``, int32
        [segments, stores]. ``at`` counts from the chunk's first step. Waits for the chunk before."""
        self._later(self._write_chunk, self.chunks, dict(steps), dict(segments), lanes)
        self.chunks += 1

    def close(
        self,
        requests: Mapping[str, Column],
        record: Mapping[str, Any],
        seconds: Column | None = None,
    ) -> None:
        """Write the table of requests, the seconds of all steps (float32) and the record (ready for
        JSON), and let the file appear."""
        self._later(self._write_end, dict(requests), dict(record), seconds)
        try:
            self._wait()
            self._zip.close()
            self._part.replace(self.path)
        except OSError as error:
            raise self._cannot(error) from None
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Drop what is unfinished; nothing after a successful close."""
        if self._open:
            self._open = False
            self._thread.shutdown(cancel_futures=True)
            # Closing writes the directory; the file goes, so whether that works does not matter.
            with suppress(OSError, ValueError):
                self._zip.close()
            self._part.unlink(missing_ok=True)

    # --- in the thread ---------------------------------------------------------------------------

    def _write_chunk(
        self, chunk: int, steps: dict[str, Column], segments: dict[str, Column], lanes: list[Lane]
    ) -> None:
        for name, column in steps.items():
            self._write(f"{chunk:05d}.step.{name}", column)
        for name, column in segments.items():
            self._write(f"{chunk:05d}.segment.{name}", column)
        packed = [pack(entries) for *_, entries in lanes]
        sizes = [(r, s, len(e), p.size) for (r, s, e), p in zip(lanes, packed, strict=True)]
        for i, (name, kind) in enumerate(LANE_COLUMNS.items()):
            self._write(
                f"{chunk:05d}.lane.{name}", np.array([size[i] for size in sizes], dtype=kind)
            )
        counts = [(entries >= 0).sum(1) for *_, entries in lanes]
        self._write(
            f"{chunk:05d}.counts", np.concatenate([np.empty(0, int), *counts]).astype(np.int32)
        )
        self._write(f"{chunk:05d}.gaps", np.concatenate([np.empty(0, np.uint8), *packed]))

    def _write_end(
        self, requests: dict[str, Column], record: dict[str, Any], seconds: Column | None
    ) -> None:
        for name, kind in REQUEST_COLUMNS.items():
            self._write(f"request.{name}", np.asarray(requests[name], dtype=kind))
        if seconds is not None:
            self._write("seconds", np.asarray(seconds, dtype=np.float32))
        self._write_json("end", {"chunks": self.chunks, "record": record})

    def _write_json(self, name: str, value: Any) -> None:
        self._write(name, np.frombuffer(json.dumps(value).encode(), dtype=np.uint8))

    def _write(self, name: str, column: Column) -> None:
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, np.ascontiguousarray(column), allow_pickle=False)
        info = zipfile.ZipInfo(f"{name}.npy", _EPOCH)
        self._zip.writestr(info, buffer.getvalue(), zipfile.ZIP_LZMA)

    # --- the thread ------------------------------------------------------------------------------

    def _later(self, job: Any, *args: Any) -> None:
        self._wait()
        self._pending = self._thread.submit(job, *args)

    def _wait(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            try:
                pending.result()
            except OSError as error:
                raise self._cannot(error) from None

    def _cannot(self, error: OSError) -> UserError:
        return UserError(f"--output {str(self.path)!r}: {error.strerror or error}")

    def __enter__(self) -> RecordingWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abandon()
