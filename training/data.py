"""The training stream on the device and its step-numbered windows."""

from __future__ import annotations

import lzma
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

BOS_BYTE, EOS_BYTE, BOS = 0xFE, 0xFF, 256


class Stream:
    """The whole training text as one tensor, with the start of every document."""

    def __init__(self, path: Path, device: torch.device | str) -> None:
        """Load train.u8.xz: 0xFE before and 0xFF after every document, UTF-8 between."""
        raw = np.frombuffer(lzma.decompress(path.read_bytes()), dtype=np.uint8)
        self.starts = np.flatnonzero(raw == BOS_BYTE)
        self.size = len(raw)
        tokens = torch.from_numpy(raw.copy()).to(device).to(torch.int16)
        # 0xFE and 0xFF become ids 256 (BOS) and 257 (EOS).
        self.tokens = torch.where(tokens >= BOS_BYTE, tokens + (BOS - BOS_BYTE), tokens)

    def offsets(self, seed: int, step: int, batch: int, length: int) -> np.ndarray:
        """Window starts [batch] of a step; even windows start at a document's BOS, odd anywhere.

        A document is drawn in proportion to its length, so long ones are seen as whole.
        """
        rng = np.random.default_rng((seed, step))
        at = rng.integers(0, self.size - length - 1, size=batch)
        document = np.searchsorted(self.starts, at[0::2], side="right") - 1
        at[0::2] = self.starts[document]
        return at

    def windows(self, offsets: np.ndarray, length: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each [batch * length] int64."""
        device = self.tokens.device
        start = torch.from_numpy(offsets).to(device)
        span = self.tokens[start[:, None] + torch.arange(length + 1, device=device)].long()
        return span[:, :-1].reshape(-1), span[:, 1:].reshape(-1)


def teaching_rows(seed: int, step: int, batch: int, count: int, length: int) -> np.ndarray:
    """Positions [batch, count] whose attention teaches the indexers in a step."""
    return np.random.default_rng((seed, step, 1)).integers(0, length, size=(batch, count))
