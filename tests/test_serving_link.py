"""The server's books about its engine, without one."""

from __future__ import annotations

import asyncio

import pytest

from kvpolicy.serving.errors import ApiError
from kvpolicy.serving.link import Choice, EngineLink, Submission
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
