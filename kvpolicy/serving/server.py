"""Runs the server: a socket, uvicorn, the engine's process, and the signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvpolicy.config import EngineConfig, SamplingParams
from kvpolicy.errors import UserError
from kvpolicy.serving.app import Server, make_app
from kvpolicy.serving.calls import Defaults
from kvpolicy.serving.errors import ApiError
from kvpolicy.serving.link import EngineLink
from kvpolicy.serving.policy import policy_of
from kvpolicy.serving.settings import ServerSettings

__all__ = ["ServeConfig", "serve"]

log = logging.getLogger(__name__)

# What the kernel keeps of what a client has not read, so that one that never reads is found out.
SEND_BUFFER = 128 << 10
BACKLOG = 2048
# After the drain, for errors to reach their clients.
LAST_SECONDS = 5


@dataclass(frozen=True)
class ServeConfig:
    """All that a server is told. logdir: of TensorBoard events, None for none."""

    engine: EngineConfig
    sampling: SamplingParams
    server: ServerSettings
    logdir: str | None = None


class _Uvicorn(uvicorn.Server):
    """Signals are ours. interrupted: by SIGINT."""

    interrupted = False

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Connections:
    """The connections by the client's address, so that one can be cut off. head_seconds: a client that
    has connected, or has begun with the head of a call, must be done with that head by then."""

    def __init__(self, head_seconds: float) -> None:
        self._open: dict[Any, asyncio.Transport] = {}
        self._head_seconds = head_seconds

    def protocol(self) -> type[H11Protocol]:
        """uvicorn's, with both."""
        opened, seconds = self._open, self._head_seconds

        class Protocol(H11Protocol):
            timer: asyncio.TimerHandle | None = None

            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
                super().connection_made(transport)
                if self.client is not None:
                    opened[tuple(self.client)] = transport
                self.timer = self.loop.call_later(seconds, transport.abort)

            def data_received(self, data: bytes) -> None:
                super().data_received(data)
                head = self.cycle is None or self.cycle.response_complete
                if head and self.timer is None:
                    self.timer = self.loop.call_later(seconds, self.transport.abort)
                elif not head:
                    self.stop_timer()

            def stop_timer(self) -> None:
                if self.timer is not None:
                    self.timer.cancel()
                    self.timer = None

            def connection_lost(self, exc: Exception | None) -> None:
                self.stop_timer()
                if self.client is not None:
                    opened.pop(tuple(self.client), None)
                super().connection_lost(exc)

        return Protocol

    def abort(self, scope: Scope) -> None:
        """Cut off the client of a call."""
        transport = self._open.get(tuple(scope.get("client") or ()))
        if transport is not None:
            transport.abort()


async def serve(
    config: ServeConfig,
    reload: Callable[[], ServeConfig],
    announce: Callable[[str, int], None],
) -> bool:
    """Serve until SIGTERM or SIGINT, then drain. Returns whether it was SIGINT.

    reload: reads the config again, at SIGHUP. announce: told the address once requests are taken.
    UserError if the address or the engine cannot be had.
    """
    settings = config.server
    listener = _listen(settings)
    with contextlib.closing(listener):
        order = {
            "config": config.engine.model_dump(by_alias=True),
            "log_level": logging.getLogger("kvpolicy").getEffectiveLevel(),
            "logdir": config.logdir,
            "first_step": 0,
            "sample_seconds": settings.sample_seconds,
        }
        connections = _Connections(settings.body_seconds)
        link = EngineLink(order, settings, config.engine.max_concurrency)
        link.policy = policy_of(config.engine)
        server = Server(settings, link, model_name(config.engine), _defaults(config, link))
        server.abort = connections.abort
        link.on_end = server.ended
        await link.start()
        try:
            front = _front(server, settings, connections)
            with _signals(front, server, config, reload):
                announce(settings.host, listener.getsockname()[1])
                await front.serve([listener])
        finally:
            await link.close()
    return front.interrupted


def model_name(config: EngineConfig) -> str:
    """What the API calls the model: of a folder its own name, since paths are nobody's business."""
    return Path(config.model).name


def _defaults(config: ServeConfig, link: EngineLink) -> Callable[[], Defaults]:
    """What calls are checked against, once the engine has said what its model is."""

    def known() -> Defaults:
        return Defaults(
            model=model_name(config.engine),
            sampling=config.sampling,
            vocab=link.about["vocab"],
            max_context=link.about["max_context"],
            bos=link.about["bos"] is not None,
            max_choices=config.server.max_choices,
            request_seconds=config.server.request_seconds,
        )

    return known


def _front(server: Server, settings: ServerSettings, connections: _Connections) -> _Uvicorn:
    return _Uvicorn(
        uvicorn.Config(
            make_app(server),
            http=connections.protocol(),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            # By then all have been answered, as far as they read.
            timeout_graceful_shutdown=round(settings.drain_seconds) + LAST_SECONDS,
        )
    )


def _listen(settings: ServerSettings) -> socket.socket:
    """A bound socket. UserError if the address cannot be had."""
    host, port = settings.host, settings.port
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, number)
    except OSError as error:
        raise UserError(f"host = {host!r}: {error.strerror or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        listener.bind(address)
        listener.listen(BACKLOG)  # from here on calls wait, until the loop takes them
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise UserError(f"host = {host!r}, port = {port}: {error.strerror or error}") from None
    return listener


@contextlib.contextmanager
def _signals(
    front: _Uvicorn, server: Server, config: ServeConfig, reload: Callable[[], ServeConfig]
) -> Iterator[None]:
    """SIGTERM and SIGINT drain (a second SIGINT does not wait), SIGHUP reads the config again."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    def drain(interrupt: bool) -> None:
        if server.draining and interrupt:
            front.force_exit = True
        front.interrupted |= interrupt
        log.info("draining: %d requests run or wait", server.link.pending)
        if not server.draining:
            loop.call_later(config.server.drain_seconds, server.link.give_up)
        server.draining = front.should_exit = True

    def hang_up() -> None:
        task = asyncio.ensure_future(_reload(server, config, reload))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    loop.add_signal_handler(signal.SIGTERM, drain, False)
    loop.add_signal_handler(signal.SIGINT, drain, True)
    loop.add_signal_handler(signal.SIGHUP, hang_up)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)


async def _reload(server: Server, old: ServeConfig, reload: Callable[[], ServeConfig]) -> None:
    """Take over the policy of a config that was edited; a bad one changes nothing and says why."""
    try:
        new = await asyncio.to_thread(reload)
        policy = policy_of(new.engine)
        for name in EngineConfig.model_fields:
            before, after = getattr(old.engine, name), getattr(new.engine, name)
            if name not in policy and before != after:
                raise UserError(f"{name} = {after!r}: needs a restart (it is {before!r})")
        if (new.server, new.sampling) != (old.server, old.sampling):
            raise UserError("settings of the server and of sampling need a restart")
        await server.swap(policy, "SIGHUP")
    except (UserError, ApiError) as error:
        server.metrics.swaps.labels("reload", "refused").inc()
        log.error("SIGHUP: the policy stays as it is: %s", error)
