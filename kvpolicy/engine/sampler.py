"""Next tokens, chosen and kept on the device, so that the next step need not wait for the host."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from kvpolicy.config import SamplingParams
from kvpolicy.kernels.paging import upload
from kvpolicy.memory.decode import UNKNOWN


class DeviceSampler:
    """The last token of every seat, and how its next one is chosen.

    found: int64 [seats + 1, 2], (token, 1 where the logits were finite) per seat; the last row is
    nobody's.
    """

    def __init__(self, seats: int, device: torch.device) -> None:
        self.found = torch.zeros((seats + 1, 2), dtype=torch.int64, device=device)
        self._params = torch.zeros((seats + 1, 4), dtype=torch.int64, device=device)
        self._owner: list[int | None] = [None] * seats

    def seat(self, seat: int, request_id: int, params: SamplingParams) -> None:
        """Note how a seat's tokens are chosen, when another request sits there than before."""
        if self._owner[seat] == request_id:
            return
        self._owner[seat] = request_id
        bits = [
            struct.unpack("q", struct.pack("d", x))[0] for x in (params.temperature, params.top_p)
        ]
        self._params[seat] = upload([params.seed, params.top_k, *bits], self._params.device)

    def tokens_of(self, seats: Tensor, tokens: Tensor) -> Tensor:
        """Tokens of rows, those that only the device knows filled in. int64 [n]."""
        return torch.where(tokens == UNKNOWN, self.found[seats, 0], tokens)

    def choose(self, logits: Tensor, seats: Tensor, positions: Tensor, sampled: bool) -> None:
        """Choose a token per row, into ``found``. logits: float32 [n, V]. seats: int64 [n], -1 for
        nobody. positions: of the new tokens. sampled: False if all rows are greedy."""
        from kvpolicy.kernels.sampling import first_of_highest
        from kvpolicy.kernels.triton.sampling import sample

        if sampled:
            params = self._params[seats]
            bits = params[:, 2:].contiguous().view(torch.float64)
            tokens = sample(logits, params[:, 0], positions, bits[:, 0], params[:, 1], bits[:, 1])
        else:
            tokens = first_of_highest(logits)
        finite = torch.isfinite(logits).all(dim=-1).long()
        self.found[seats] = torch.stack([tokens, finite], dim=1)

    def choose_for(
        self, logits: Tensor, seats: Sequence[int], positions: Sequence[int], sampled: bool
    ) -> None:
        """:meth:`choose` with numbers of the host."""
        numbers = upload([seats, positions], logits.device)
        self.choose(logits, numbers[0], numbers[1], sampled)
