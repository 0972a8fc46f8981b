"""Drafters for tests: one that knows the answer and checks its ring, and one that does everything wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from kvpolicy.speculative.drawing import RowSampling
from kvpolicy.speculative.proposal import Dense, OneHot, Proposal, Sparse


class Scripted:
    """Proposes the true continuation of known texts, wrong at some positions. Its ring holds every
    token's id and position, and it raises unless the window is exactly the text before the anchor.

    texts: whole contexts, prompt and answer. wrong: every so many positions are proposed wrong.
    """

    name = "scripted"
    taps: tuple[int, ...] = ()
    ring_width = 2

    def __init__(
        self, texts: Sequence[Sequence[int]], tokens: int = 4, window: int = 9, wrong: int = 3
    ) -> None:
        self.tokens, self.window, self.wrong = tokens, window, wrong
        self.texts = [[*text, *[0] * (tokens + 1)] for text in texts]

    def context(self, taps: Tensor, positions: Tensor) -> Tensor:
        return torch.stack([taps[:, 0, 0], positions.float()], dim=1)

    def propose(
        self,
        anchors: Tensor,
        positions: Tensor,
        context: Tensor,
        context_positions: Tensor,
        sampling: RowSampling,
        coupled: bool,
    ) -> Proposal:
        found = []
        pairs = zip(anchors.tolist(), positions.tolist(), strict=True)
        for row, (anchor, at) in enumerate(pairs):
            first = max(0, at - self.window + 1)
            where = context_positions[row]
            assert where[where >= 0].tolist() == list(range(first, at))
            assert where.shape == (self.window,)
            kept = context[row][where >= 0].long()
            assert kept[:, 1].tolist() == list(range(first, at))
            assert not context[row][where < 0].any()
            seen = [*kept[:, 0].tolist(), anchor]
            if seen == [0]:  # a row that pads a batch
                found.append([0] * self.tokens)
                continue
            same = [text for text in self.texts if text[first : at + 1] == seen]
            assert same, (at, seen)
            ahead = same[0][at + 1 : at + 1 + self.tokens]
            found.append(
                [
                    (token + 1) % 256 if (at + 1 + i) % self.wrong == 0 else token
                    for i, token in enumerate(ahead)
                ]
            )
        return Proposal(torch.tensor(found, device=anchors.device), OneHot())


class Garbage:
    """Another mistake at every call, with one sound proposal among them. tokens: K."""

    name = "garbage"
    taps: tuple[int, ...] = ()
    window, ring_width = 5, 1

    def __init__(self, seed: int = 0, tokens: int = 3) -> None:
        self.tokens = tokens
        self._random = random.Random(seed)

    def context(self, taps: Tensor, positions: Tensor) -> Tensor:
        mistake = self._random.randrange(40)
        if mistake == 0:
            raise ValueError("no context today")
        if mistake == 1:
            return taps
        return taps[:, 0] * (float("nan") if mistake == 2 else 1.0)

    def propose(
        self,
        anchors: Tensor,
        positions: Tensor,
        context: Tensor,
        context_positions: Tensor,
        sampling: RowSampling,
        coupled: bool,
    ) -> Proposal:
        r, k = len(anchors), self.tokens
        draw = self._random.randrange
        device = anchors.device
        tokens = torch.tensor([[draw(256) for _ in range(k)] for _ in range(r)], device=device)
        match draw(13):
            case 0:
                raise RuntimeError("out of order")
            case 1:
                return None  # type: ignore[return-value]
            case 2:
                return Proposal(tokens.float(), OneHot())
            case 3:
                return Proposal(tokens[:, 1:], OneHot())
            case 4:
                return Proposal(tokens - 300, OneHot())
            case 5:
                return Proposal(tokens + 10**9, OneHot())
            case 6:
                return Proposal(tokens, Dense(torch.full((r, k, 264), float("nan"), device=device)))
            case 7:
                law = torch.full((r, k, 2), -1.0, device=device)
                return Proposal(tokens, Sparse(tokens[..., None].repeat(1, 1, 2), law))
            case 8:
                return Proposal(tokens, OneHot(), torch.full((r, k), float("inf"), device=device))
            case 9:
                return Proposal(tokens, "surely")  # type: ignore[arg-type]
            case 10:
                return Proposal(tokens, Dense(torch.full((r, k, 264), 7.0, device=device)))
            case 11:
                return Proposal(tokens.to("meta"), OneHot())  # on another device
        return Proposal(tokens, OneHot())
