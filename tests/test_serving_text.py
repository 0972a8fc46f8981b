"""Text of byte tokens while they come: joined, it is what the engine makes of all of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.config import SamplingParams
from kvpolicy.engine.clock import Clock
from kvpolicy.engine.request import Request, State
from kvpolicy.serving.text import TextStream, token_bytes, token_text

ROW = np.zeros(4, dtype=np.float32)
# Bytes that make characters of two to four bytes, broken ones, and overlapping stop texts.
BYTES = st.sampled_from([*b"abab", 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 256])
STOPS = st.lists(
    st.sampled_from([b"ab", b"aba", b"b", b"bb", "é".encode(), "€a".encode()]), max_size=3
)


def engine_text(tokens: list[int], stops: tuple[bytes, ...]) -> tuple[str, str, int]:
    """Text and finish reason of the engine's own request, and how many tokens it took."""
    params = SamplingParams(max_new_tokens=len(tokens), stop=stops)
    request = Request(0, (1,), params, (257,), stops, 0, Clock("steps"))
    request.move(State.PREFILL)
    for count, token in enumerate(tokens, start=1):
        request.take(token, ROW)
        if request.finished:
            return request.output().text, request.finish_reason, count
    raise AssertionError


@given(st.lists(BYTES, min_size=1, max_size=24), STOPS, st.data())
def test_pieces_joined_are_the_engines_text(
    tokens: list[int], stops: list[bytes], data: st.DataObject
) -> None:
    whole, reason, count = engine_text(tokens, tuple(stops))
    stream, pieces = TextStream(stops), []
    at = 0
    while at < count:
        step = data.draw(st.integers(1, count - at))
        pieces.append(stream.feed(tokens[at : at + step]))
        at += step
        assert whole.startswith("".join(pieces))  # nothing is sent that a stop text takes back
    pieces.append(stream.finish(reason))
    assert "".join(pieces) == whole


def test_characters_are_never_split() -> None:
    stream = TextStream()
    assert [stream.feed([byte]) for byte in "é€😀".encode()] == [
        "",
        "é",
        *["", "", "€"],
        *["", "", "", "😀"],
    ]
    assert stream.feed([0xE2]) + stream.finish("length") == "\ufffd"


def test_tokens_have_names() -> None:
    assert [token_text(t) for t in (65, 0xE2, 257)] == ["A", "bytes:\\xe2", "<special:257>"]
    assert [token_bytes(t) for t in (65, 257)] == [[65], []]
