"""One process of the engine, from the server's side: started, spoken to in frames, ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import subprocess
import sys
from typing import Any

from kvpolicy.errors import UserError

__all__ = ["EngineProcess", "Gone"]

log = logging.getLogger(__name__)

# Loading a model, and on a GPU compiling kernels and capturing graphs of all sizes.
START_SECONDS = 600.0
# To cancel what runs, wait for the device and close files, after the server has hung up.
EXIT_SECONDS = 10.0
_HEAD = 4
LOG_FORMAT = "%(levelname)s %(name)s: %(message)s"

# It finds modules where the server does.
_BOOT = """\
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from kvpolicy.serving.worker import run
run(int(sys.argv[1]))
"""


class Gone(Exception):
    """The process has ended, or hung up."""


class EngineProcess:
    """A process with an engine in it. Made by :meth:`start`."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.process = process
        self.ready: dict[str, Any] = {}
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, order: dict[str, Any]) -> EngineProcess:
        """A new one, ready to serve. UserError if its engine cannot be had, Gone if it ends."""
        ours, theirs = socket.socketpair()
        path = json.dumps([str(folder) for folder in sys.path])
        with theirs:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _BOOT, str(theirs.fileno()), path],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # stdout is the server's
                    pass_fds=[theirs.fileno()],
                )
            except BaseException:
                ours.close()
                raise
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        engine = cls(process, reader, writer)
        try:
            engine.send({**order, "log_format": LOG_FORMAT})
            async with asyncio.timeout(START_SECONDS):
                found = await engine.receive()
            if "error" in found:
                await engine.end()
                raise UserError(found["error"])
            engine.ready = found["ready"]
        except TimeoutError:
            await engine.end(0.0)
            raise Gone(f"not ready after {START_SECONDS:g} s") from None
        except BaseException:
            await engine.end(1.0)
            raise
        return engine

    def send(self, message: Any) -> None:
        """Queue a message. What is queued is bounded by what the server admits."""
        body = json.dumps(message, separators=(",", ":")).encode()
        self._writer.write(len(body).to_bytes(_HEAD, "big") + body)

    async def receive(self) -> dict[str, Any]:
        """The next frame. Gone if there will be none."""
        try:
            size = int.from_bytes(await self._reader.readexactly(_HEAD), "big")
            frame = json.loads(await self._reader.readexactly(size))
        except (OSError, asyncio.IncompleteReadError):
            raise Gone("the engine's process ended") from None
        assert isinstance(frame, dict)
        return frame

    async def end(self, seconds: float = EXIT_SECONDS) -> int:
        """Hang up, and wait for its end, which comes after ``seconds`` at the latest; its exit code."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        try:
            return await asyncio.to_thread(self.process.wait, seconds)
        except subprocess.TimeoutExpired:
            log.warning("the engine's process %d does not end: killed", self.process.pid)
            self.process.kill()
            return await asyncio.to_thread(self.process.wait)
