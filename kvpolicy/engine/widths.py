"""How many tokens to draft and verify at all, from what steps of each width have given and cost.

A captured step computes all its rows, whatever is verified of them, so before the schedule of single tokens
comes a choice among few widths: none, half and all. It looks at finished steps only, so it may not bias
what is said (see :mod:`kvpolicy.speculative.schedule`).
"""

from __future__ import annotations

# Weight of a new step in the running means.
NEW = 0.1
# Steps of a width before it is judged: the first ones may compile and capture.
TRIES = 4
# One step in so many goes to another width than the best, in turn: at twice the time that costs 1.6 %.
EXPLORE = 64


class Widths:
    """Chooses among widths, for each power of two of requests apart. most: K."""

    def __init__(self, most: int) -> None:
        self.widths = tuple(dict.fromkeys((most, most // 2, 0)))
        self._seconds: dict[tuple[int, int], float] = {}
        self._tokens: dict[tuple[int, int], float] = {}
        self._tried: dict[tuple[int, int], int] = {}
        self._steps: dict[int, int] = {}

    @staticmethod
    def _size(requests: int) -> int:
        return (requests - 1).bit_length()

    def choose(self, requests: int, most: int) -> int:
        """Tokens to propose for each of so many requests in the next step, up to ``most``, which takes the
        place of wider widths (they cannot run). The same until :meth:`note`."""
        size = self._size(requests)
        widths = tuple(dict.fromkeys(min(width, most) for width in self.widths))
        for width in widths:
            if self._tried.get((size, width), 0) < TRIES:
                return width
        steps = self._steps.get(size, 0)
        if steps % EXPLORE == EXPLORE - 1:
            return widths[steps // EXPLORE % len(widths)]
        return max(widths, key=lambda width: self.rate(requests, width))

    def rate(self, requests: int, width: int) -> float:
        """Tokens per second of a step, as far as known."""
        key = (self._size(requests), width)
        return self._tokens.get(key, 0.0) / self._seconds.get(key, 1.0)

    def note(self, requests: int, width: int, tokens: int, seconds: float) -> None:
        """A step of this width has committed so many tokens of all requests in so many seconds. width: what
        it could verify of a request at most, which may be less than was chosen (the last tokens)."""
        size = self._size(requests)
        self._steps[size] = self._steps.get(size, 0) + 1
        key = (size, width)
        tried = self._tried[key] = self._tried.get(key, 0) + 1
        # The first steps weigh nothing in the end: the mean begins with the last of them.
        new = 1.0 if tried <= TRIES else NEW
        for means, value in (
            (self._tokens, tokens / requests),
            (self._seconds, max(seconds, 1e-9)),
        ):
            means[key] = means.get(key, value) + new * (value - means.get(key, value))
