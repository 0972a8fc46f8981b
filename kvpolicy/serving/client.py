"""A lean HTTP client for the load generator: JSON out, JSON or a stream of events back.

A client of a library takes some 100 us for a chunk of a stream; at 20,000 tokens a second that is two
cores, and the client would be what is measured. This one takes 10. It speaks what a server of
`kvpolicy serve` sends: HTTP/1.1 with a length or in chunks, one call at a time on a connection.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from kvpolicy.errors import UserError

__all__ = ["Client", "Reply", "split_url"]

_LIMIT = 1 << 22


def split_url(url: str) -> tuple[str, int]:
    """Host and port of ``http://HOST:PORT``, with or without ``/v1``. UserError for anything else."""
    try:
        parts = urlsplit(url)
        port = parts.port or 80
    except ValueError as error:
        raise UserError(f"URL {url!r}: {error}") from None
    if parts.scheme != "http" or not parts.hostname or parts.path.rstrip("/") not in ("", "/v1"):
        raise UserError(f"URL {url!r}: must be http://HOST:PORT")
    return parts.hostname, port


@dataclass(slots=True)
class Reply:
    """The head of an answer; its body comes by :meth:`read` or :meth:`events`, once."""

    status: int
    headers: Mapping[str, str]
    _connection: _Connection

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([part async for part in self._connection.parts(self.headers)])

    async def events(self) -> AsyncIterator[bytes]:
        """What stands behind each ``data: ``, the final ``[DONE]`` left out."""
        rest = b""
        async for part in self._connection.parts(self.headers):
            *events, rest = (rest + part).split(b"\n\n")
            for event in events:
                data = event.removeprefix(b"data: ")
                if data != b"[DONE]":
                    yield data


class _Connection:
    """One connection. clean: the last answer was read to its end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.clean = True

    async def ask(self, head: str, body: bytes) -> Reply:
        self.clean = False
        self._writer.write(head.encode() + body)
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines[1:] if line)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        return Reply(int(lines[0].split()[1]), headers, self)

    async def parts(self, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
        """The body as it comes."""
        read = self._reader.readexactly
        if "chunked" in headers.get("transfer-encoding", ""):
            while size := int(await self._reader.readuntil(b"\r\n"), 16):
                yield (await read(size + 2))[:-2]
            await read(2)
        elif length := int(headers.get("content-length", 0)):
            yield await read(length)
        self.clean = headers.get("connection", "") != "close"

    def close(self) -> None:
        self._writer.close()


@dataclass(slots=True)
class Client:
    """Calls to one server. Connections are kept and used again. key: sent as a bearer token."""

    host: str
    port: int
    key: str | None = None
    _free: list[_Connection] = field(default_factory=list)

    async def ask(self, method: str, path: str, body: Any = None) -> Reply:
        """One call; the connection is the reply's until :meth:`done`. OSError and
        asyncio.IncompleteReadError (an EOFError) where the server hangs up."""
        raw = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host}:{self.port}"]
        lines += [f"Content-Length: {len(raw)}", "Content-Type: application/json"]
        if self.key is not None:
            lines.append(f"Authorization: Bearer {self.key}")
        head = "\r\n".join(lines) + "\r\n\r\n"
        while self._free:
            connection = self._free.pop()
            try:
                return await connection.ask(head, raw)
            except (OSError, EOFError):  # kept for too long: the server has closed it
                connection.close()
            except BaseException:
                connection.close()
                raise
        connection = _Connection(*await asyncio.open_connection(self.host, self.port, limit=_LIMIT))
        try:
            return await connection.ask(head, raw)
        except BaseException:
            connection.close()
            raise

    def done(self, reply: Reply) -> None:
        """Take the connection back."""
        connection = reply._connection
        if connection.clean:
            self._free.append(connection)
        else:
            connection.close()

    async def json(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and document of one call."""
        reply = await self.ask(method, path, body)
        try:
            return reply.status, json.loads(await reply.read())
        finally:
            self.done(reply)

    def close(self) -> None:
        """Close what is kept."""
        for connection in self._free:
            connection.close()
        self._free.clear()
