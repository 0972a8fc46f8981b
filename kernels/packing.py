"""Weights as a backend keeps them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Packed:
    """Matrices [out, in] that are applied to the same rows.

    parts: in the memory order that the backend's products read best, one tensor each, or all joined
    in one. widths: outputs of each matrix.
    """

    parts: tuple[Tensor, ...]
    widths: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)
