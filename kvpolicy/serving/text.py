"""Byte tokens as text that can be sent while more comes: no half characters, nothing of a stop text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

__all__ = ["TextStream", "token_bytes", "token_text"]


class TextStream:
    """Turns the tokens of one choice into text. All that it gives, joined, is what the engine calls the
    output's text: stop texts cut, invalid UTF-8 replaced by U+FFFD."""

    def __init__(self, stops: Sequence[bytes] = ()) -> None:
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = b""

    def feed(self, tokens: Sequence[int]) -> str:
        """Text that later tokens cannot change any more."""
        self._held += bytes(token for token in tokens if token < 256)
        keep = self._may_be_stop()
        ready, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return self._decoder.decode(ready)

    def finish(self, reason: str) -> str:
        """The rest. reason: why the request ended; ``stop`` cuts a stop text that stands at the end."""
        ends = [stop for stop in self._stops if self._held.endswith(stop)]
        if reason == "stop" and ends:
            self._held = self._held[: len(self._held) - max(map(len, ends))]
        text = self._decoder.decode(self._held, final=True)
        self._held = b""
        return text

    def _may_be_stop(self) -> int:
        """Bytes at the end that are a stop text, or may become one."""
        held, longest = self._held, 0
        for stop in self._stops:
            for size in range(min(len(stop), len(held)), longest, -1):
                if held.endswith(stop[:size]):
                    longest = size
                    break
        return longest


def token_bytes(token: int) -> list[int]:
    """The bytes of a token; none of a special one."""
    return [token] if token < 256 else []


def token_text(token: int) -> str:
    """How a token is called in logprobs: as OpenAI calls bytes that are no text by themselves."""
    if token < 128:
        return chr(token)
    return f"bytes:\\x{token:02x}" if token < 256 else f"<special:{token}>"
