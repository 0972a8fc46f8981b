"""The server's books about its engine, without one."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time

import pytest

from kvpolicy.serving.errors import ApiError
from kvpolicy.serving.link import Choice, EngineLink, Job, Submission
from kvpolicy.serving.process import EngineProcess
from kvpolicy.serving.settings import ServerSettings


def one_pending(link: EngineLink) -> Submission:
    """A call of one request that the engine has accepted."""
    group = Submission(link, streamed=True)
    group.choices.append(Choice(1, group, accepted=True))
    link._choices[1] = group.choices[0]
    return group


def test_a_call_that_fails_while_nobody_waits_is_not_done() -> None:
    """The server was sending: what it looks at next must be the error, not a cancelled choice."""

    async def fail() -> None:
        link = EngineLink({}, ServerSettings(), seats=4)
        group = one_pending(link)
        await group.accepted()
        link.give_up()
        assert group.choices[0].reason == "cancelled" and not group.done
        async with asyncio.timeout(5):
            await group.change()

    with pytest.raises(ApiError) as caught:
        asyncio.run(fail())
    assert caught.value.code == "draining"


def test_an_idle_engine_is_not_taken_for_a_stuck_one() -> None:
    """Silence counts from the first request on; dropping it and asking again does not start anew."""

    async def watch() -> None:
        link = EngineLink({}, ServerSettings(engine_seconds=1.0), seats=4)
        ours, theirs = socket.socketpair()
        with theirs, subprocess.Popen(["sleep", "60"]) as silent:
            reader, writer = await asyncio.open_connection(sock=ours)
            link._process = EngineProcess(silent, reader, writer)
            link._heard = time.perf_counter() - 100  # nothing was asked of it since
            watchdog = asyncio.create_task(link._watch())
            try:
                group = link.submit([Job("x", {})], streamed=True)
                await asyncio.sleep(0.3)
                assert silent.poll() is None
                for _ in range(20):
                    group.close()
                    group = link.submit([Job("x", {})], streamed=True)
                    await asyncio.sleep(0.1)
                assert silent.poll() == -9
            finally:
                watchdog.cancel()
                writer.close()
                silent.kill()

    asyncio.run(watch())


def test_steps_of_an_engine_count_once() -> None:
    """Though the one after it ends before its first sample."""

    async def serve() -> int:
        order = {"first_step": 10}
        link = EngineLink(order, ServerSettings(), seats=4)
        link.sample = {"step": 5}
        for restarts in (1, 2):
            ours, theirs = socket.socketpair()
            theirs.close()  # it has hung up
            streams = await asyncio.open_connection(sock=ours)
            link._process = EngineProcess(subprocess.Popen(["true"]), *streams)
            serving = asyncio.create_task(link._serve())
            async with asyncio.timeout(30):
                while link.restarts < restarts:
                    await asyncio.sleep(0.01)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        return order["first_step"]

    assert asyncio.run(serve()) == 15
